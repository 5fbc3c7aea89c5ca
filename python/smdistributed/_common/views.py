"""Views of optimizers: objects of a subclass with the same name that share the given one's ``__dict__``, so that there is one
state, whichever of both is used, saved or restored."""

from __future__ import annotations

from typing import Any


def view(optimizer: Any, methods: type, options: Any, module: str | None = None) -> Any:
    """The optimizer under a subclass of its class, with the same state.

    Args:
        optimizer: The optimizer.
        methods: What is different about it.
        options: For these methods.
        module: Where the class says that it is from; by default where the optimizer's is.
    """
    cls = type(optimizer)
    members = {
        "__doc__": cls.__doc__,
        "__module__": module or cls.__module__,
        "__qualname__": cls.__qualname__,
        "_smd_class": cls,
        "_smd_options": options,
    }
    return _sharing(optimizer, type(cls)(cls.__name__, (methods, cls), members))


def given(optimizer: Any) -> Any:
    """What a distributed optimizer was made of."""
    return _sharing(optimizer, optimizer._smd_class)


def _sharing(optimizer: Any, cls: type) -> Any:
    """An object of another class with the same state."""
    other = object.__new__(cls)
    # Past Keras' own `__setattr__`, which would track the dictionary as state.
    object.__setattr__(other, "__dict__", optimizer.__dict__)
    return other
