"""Autocast's copies of parameters that all graphs of a program share.

Under autocast, a parameter is cast to the narrow type when an operation takes it, and autocast keeps the copy in a
cache. In a graph of its own, each microbatch would cast again, and each copy of a graph would keep narrow parameters.

- CAST-1: the copies have fixed addresses, and are computed anew when a step begins. Parameters do not change in it.
- CAST-2: each graph is captured with a cache of its own that contains these copies. If an operation takes a parameter
  for which there is none, its cast belongs to that graph alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smdistributed.modelparallel.torch.tracing.tasks import Task


class SharedCasts:
    """The narrow copies of a program's parameters.

    Args:
        dtype: The type to which autocast casts.
        parameters: The parameters, in float32.
    """

    def __init__(self, dtype: torch.dtype, parameters: Iterable[torch.Tensor]) -> None:
        self._dtype = dtype
        self._parameters = list({id(each): each for each in parameters}.values())
        self._copies = [torch.empty_like(each, dtype=dtype, requires_grad=False) for each in self._parameters]

    def update(self) -> None:
        """Cast the parameters (CAST-1)."""
        if self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._parameters)

    def fill_cache(self) -> None:
        """Let autocast's cache contain these copies and nothing else (CAST-2)."""
        torch.clear_autocast_cache()
        copies = {id(each): copy for each, copy in zip(self._parameters, self._copies, strict=True)}
        with torch.enable_grad(), torch.autocast("cuda", self._dtype, cache_enabled=True), _CastsReplaced(copies):
            for parameter in self._parameters:
                torch.ops.smd.autocast_cast(parameter)


class _CastsReplaced(TorchDispatchMode):
    """Returns given copies for casts of parameters.

    Args:
        copies: The copies by the ids of the parameters.
    """

    def __init__(self, copies: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._copies:
            return self._copies[id(args[0])].detach()
        return func(*args, **(kwargs or {}))


def cast_dtypes(tasks: Iterable[Task]) -> set[torch.dtype]:
    """Return the types to which autocast casts parameters of tasks, where it keeps the casts."""
    return {
        dtype
        for task in tasks
        for device, enabled, dtype, is_cached in task.context.autocast
        if device == "cuda" and enabled and is_cached and task.context.grad
    }
