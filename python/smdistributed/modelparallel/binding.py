"""Step functions that are attributes of a class."""

from __future__ import annotations

import inspect
from typing import Any

#: Names of first parameters that receive the object.
_OBJECTS = ("self", "cls")


def binds_instance(signature: inspect.Signature, instance: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``instance.step(*args, **kwargs)`` passes ``instance`` to the body, as calls of methods do.

    Bodies such as ``def train_step(model, batch)`` become class attributes, too, and their callers pass no object. The
    signature that fits the call decides; where both fit, the name of the first parameter does.

    Args:
        signature: The signature of the body.
        instance: The object whose attribute was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    named = next(iter(signature.parameters), None) in _OBJECTS
    with_it, without = _fits(signature, (instance, *args), kwargs), _fits(signature, args, kwargs)
    # Where neither fits, the name of the first parameter decides, and the call raises the body's own error.
    return named if with_it == without else with_it


def _fits(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
