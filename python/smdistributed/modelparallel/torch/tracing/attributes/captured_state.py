"""What the CUDA graphs of modules depend on besides the values of parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

GLOBAL_HOOKS = (
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def address_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a graph depends on in a parameter or buffer besides its values."""
    hooks = len(tensor._backward_hooks or ()), len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())
    return id(tensor), _describe(tensor), tensor.requires_grad, *hooks


def captured_state(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return what a graph of the modules depends on besides parameters and buffers: attributes and hooks."""
    found: list[Any] = [len(hooks) for hooks in GLOBAL_HOOKS]
    seen: set[int] = set()
    for module in (part for each in modules for part in each.modules()):
        if id(module) in seen:
            continue
        seen.add(id(module))
        found += [len(getattr(module, hooks)) for hooks in HOOKS]
        found += [(name, _describe(item, seen)) for name, item in vars(module).items() if name not in _INTERNALS]
    return tuple(found)


def _describe(item: Any, seen: set[int] | None = None) -> Any:
    """Return a key that changes if an attribute changes. Objects in ``seen`` are described already."""
    if isinstance(item, _ATOMS):
        # By its text, because not-a-number is not equal to itself.
        return type(item), repr(item)
    if isinstance(item, torch.Tensor):
        if item.layout is not torch.strided:
            return id(item), item._version
        address = item.data_ptr(), item.shape, item.stride(), item.dtype
        # Numbers of a tensor on the host may be part of a graph.
        return address if item.device.type == "cuda" else (*address, item._version)
    seen = set() if seen is None else seen
    if id(item) in seen:
        return None
    seen.add(id(item))
    if isinstance(item, dict):
        return tuple((_describe(key, seen), _describe(each, seen)) for key, each in item.items())
    if isinstance(item, (list, tuple)):
        return tuple(_describe(each, seen) for each in item)
    if isinstance(item, (set, frozenset)):
        return frozenset(_describe(each, seen) for each in item)
    if isinstance(item, nn.Module) or callable(item):
        return id(item)
    return id(item), tuple((name, _describe(each, seen)) for name, each in getattr(item, "__dict__", {}).items())
