"""Key-value caches, which models of Hugging Face create by default and which training does not use.

A layer gets the cache with the keys and values of all earlier layers. In a pipeline, these would be described,
compared and sent with each call, and their number grows with the square of the layers. As transformers itself does
with activation checkpointing, a model in training mode creates no cache, unless the call requests it (KVC-1).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.runtime.fallbacks import script_level

#: Arguments that pass a cache.
_CACHES = ("past_key_values", "past_key_value", "cache_params")


def without_new_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for a module that is divided among partitions.

    Args:
        module: The module.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        ``kwargs``, with ``use_cache=False`` if the module is in training mode, would create a cache by its
        configuration, and the call neither passes a cache nor requests one. For a model that can generate, a warning
        says so once.
    """
    if not module.training or not getattr(getattr(module, "config", None), "use_cache", False):
        return kwargs
    kind: Any = type(module)
    names = _parameters(kind)
    given = dict(zip(names, args, strict=False)) | kwargs
    if "use_cache" not in names or any(given.get(name) is not None for name in ("use_cache", *_CACHES)):
        return kwargs
    can_generate: Any = getattr(module, "can_generate", None)
    if callable(can_generate) and can_generate():
        _warn(type(module).__name__)
    return kwargs | {"use_cache": False}


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments of a class's ``forward``."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


@functools.cache
def _warn(name: str) -> None:
    warnings.warn(
        f"`{name}` trains over several partitions without a cache of keys and values, because each layer's call would "
        "carry those of all layers. The output has no cache, as with `use_cache=False`. Call the model with "
        "`use_cache=True` to keep it",
        stacklevel=script_level(),
    )
