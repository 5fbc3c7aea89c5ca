"""Views of optimizers: objects of a subclass with the same name, which share the ``__dict__`` of the given optimizer.

Both objects therefore have one state, whichever of them is used, saved or restored.
"""

from __future__ import annotations

from typing import Any


def view(optimizer: Any, methods: type, options: Any, module: str | None = None) -> Any:
    """Return the optimizer under a subclass of its class, with the same state.

    Args:
        optimizer: The optimizer.
        methods: The methods that differ.
        options: Options for these methods.
        module: ``__module__`` of the class; by default that of the optimizer's.

    Returns:
        The view.
    """
    cls = type(optimizer)
    members = {
        "__doc__": cls.__doc__,
        "__module__": module or cls.__module__,
        "__qualname__": cls.__qualname__,
        "_smd_class": cls,
        "_smd_options": options,
    }
    metaclass: Any = type(cls)
    return _sharing(optimizer, metaclass(cls.__name__, (methods, cls), members))


def original_optimizer(optimizer: Any) -> Any:
    """Return the original optimizer of a distributed one.

    Args:
        optimizer: The distributed optimizer.

    Returns:
        A view of the original class.
    """
    return _sharing(optimizer, optimizer._smd_class)


def _sharing(optimizer: Any, cls: type) -> Any:
    """Return an object of another class with the same state."""
    other: Any = object.__new__(cls)
    # Bypasses Keras' own `__setattr__`, which would track the dictionary as state.
    object.__setattr__(other, "__dict__", optimizer.__dict__)
    return other
