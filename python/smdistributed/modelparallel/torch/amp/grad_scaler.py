"""A scale of the loss on which all partitions agree."""

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
    """As ``torch.amp.GradScaler``: a step in which any partition found a gradient that is not finite is skipped by all.

    Args:
        device: ``"cuda"`` or ``"cpu"``; by default where the partitions are.
        *args, **kwargs: As for PyTorch's.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(device or current_device().type, *args, **kwargs)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, *args)
        device = current_device()
        worst = torch.zeros(1, dtype=torch.float32, device=device)
        for flag in found.values():
            worst = torch.maximum(worst, flag.to(worst))
        if state.groups.pipe is not None:
            with errors.translated(CLASSES):
                dist.all_reduce(worst, ReduceOp.MAX, state.groups.pipe)
        # Also for a rank without parameters, which then knows that the others were asked.
        return {device: worst}
