"""Classes and functions for the names in a saved model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any


def objects_by_name(
    optimizer_modules: Iterable[Any], custom_optimizers: Sequence[type] | None, custom_objects: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the ``custom_objects`` with which a model is loaded.

    Args:
        optimizer_modules: Modules in which optimizers are found by name.
        custom_optimizers: The script's own classes of optimizers.
        custom_objects: The script's names; they take precedence.

    Returns:
        Objects by name.
    """
    found: dict[str, Any] = {}
    for module in optimizer_modules:
        classes = [cls for cls in vars(module).values() if isinstance(cls, type) and hasattr(cls, "from_config")]
        # Saved models contain the names as they are, or in lower case.
        found.update({spelled: cls for cls in classes for spelled in (cls.__name__, cls.__name__.lower())})
    found.update({cls.__name__: cls for cls in custom_optimizers or ()})
    own = (custom_objects or {}).items()
    return found | {name: _class_of(value) if _makes_objects(value) else value for name, value in own}


def _makes_objects(value: Any) -> bool:
    """Return whether a value is a function of options only, such as ``lambda **options: Mine(**options)``.

    Losses and activations take tensors as positional arguments.
    """
    if not isinstance(value, FunctionType):
        return False
    kinds = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds and kinds <= {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }


def _class_of(make: FunctionType) -> type:
    """Return a class whose objects the function makes, because Keras no longer accepts functions instead of classes."""
    return type(make.__name__, (), {"from_config": staticmethod(lambda config: make(**config))})
