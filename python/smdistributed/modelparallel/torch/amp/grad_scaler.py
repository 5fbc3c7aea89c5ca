"""A loss scale that is equal on all partitions."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.state import state


class GradScaler(torch.amp.GradScaler):
    """Scale losses as ``torch.cuda.amp.GradScaler`` does.

    All ranks that hold parts of one model, its partitions and shards, skip a step in which one of them found a gradient
    that is not finite.

    Args:
        init_scale: The first scale.
        growth_factor: The factor after ``growth_interval`` steps without an overflow.
        backoff_factor: The factor after an overflow.
        growth_interval: The number of steps without an overflow before the scale grows.
        enabled: Whether losses are scaled at all.
        device: ``"cuda"`` or ``"cpu"``; by default the device of the partitions.

    Raises:
        TypeError: ``init_scale`` is not a number, such as when a device comes first, as in ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        if isinstance(init_scale, str | torch.device):
            raise TypeError(
                f"`init_scale` is {init_scale!r}: expected a number, since `smp.amp.GradScaler` takes its arguments "
                f"in the order of `torch.cuda.amp.GradScaler`; pass `device={str(init_scale)!r}`"
            )
        kind = current_device().type if device is None else torch.device(device).type
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, *args)
        device = current_device()
        worst = torch.zeros(1, dtype=torch.float32, device=device)
        for flag in found.values():
            worst = torch.maximum(worst, flag.to(worst))
        is_sharded = state.optimizer is not None and state.optimizer.is_sharded
        group = state.groups.objects("world") if is_sharded else state.groups.mp_group
        if group is not None:
            with errors.translated(CLASSES):
                dist.all_reduce(worst, ReduceOp.MAX, group)
        # Also on a rank without parameters, so that it takes part in the exchange with the others.
        return {device: worst}
