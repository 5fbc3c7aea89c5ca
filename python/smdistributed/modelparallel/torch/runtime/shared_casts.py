"""Autocast's copies of parameters that all graphs of a program share.

Under autocast, a parameter is cast to the narrow type when an operation takes it, and autocast keeps the copy in a
cache. Without sharing, each replay of a graph would cast again, and each graph would hold narrow parameters of its own.

- CAST-1: the copies have fixed addresses, and are computed anew when a step begins. A stage that writes to parameters
  under autocast is not captured.
- CAST-2: each graph is captured with a cache of its own that contains these copies. It makes other casts itself: of
  frozen parameters, which autocast does not cache, to another type, and in a checkpointed module that is computed
  again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smdistributed.modelparallel.torch.runtime.task_execution import forget_casts
from smdistributed.modelparallel.torch.tracing.tasks import Task


class SharedCasts:
    """The narrow copies of parameters in float32.

    Args:
        dtype: The type to which autocast casts.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        #: Each parameter and its copy, by the id of the parameter.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, roots: list[torch.Tensor]) -> None:
        """Add the parameters that the autograd graph of ``roots`` casts to the type."""
        for parameter in torch.ops.smd.cast_parameters(roots, self._dtype):
            known = self._copies.get(id(parameter))
            if known is None or known[1].shape != parameter.shape or known[1].device != parameter.device:
                copy = torch.empty_like(parameter, dtype=self._dtype, requires_grad=False)
                self._copies[id(parameter)] = parameter, copy

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep only the copies of these parameters."""
        self._copies = {id(each): self._copies[id(each)] for each in parameters if id(each) in self._copies}

    def update(self) -> None:
        """Cast the parameters (CAST-1)."""
        if self._copies:
            parameters, copies = zip(*self._copies.values(), strict=True)
            with torch.no_grad():
                torch._foreach_copy_(copies, parameters)

    def fill_cache(self) -> None:
        """Replace what autocast's cache contains by these copies (CAST-2)."""
        forget_casts("cuda", self._dtype)
        copies = {place: copy for place, (_, copy) in self._copies.items()}
        with torch.enable_grad(), torch.autocast("cuda", self._dtype, cache_enabled=True), _CastsReplaced(copies):
            for parameter, _ in self._copies.values():
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
