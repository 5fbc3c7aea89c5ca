"""Norms of gradients over all partitions."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.handle import Absent
from smdistributed.modelparallel.torch.state import state


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, for the norm of all gradients of the model; each parameter counts once. All
    ranks of a pipeline call it.

    Args:
        parameters: The model's; those of other partitions may be among them.
        max_norm: The largest norm that is left as it is.
        norm_type: Which norm; ``math.inf`` is the largest gradient.

    Returns:
        The norm before clipping, the same on all ranks of a pipeline.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    own = {id(parameter): parameter for parameter in parameters if not isinstance(parameter, Absent)}
    gradients = [parameter.grad for parameter in own.values() if parameter.grad is not None]
    infinite = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=current_device())
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=_wide(gradient)).to(total)
        total = torch.maximum(total, norm) if infinite else total + norm**norm_type
    if state.groups.pipe is not None:
        with errors.translated(CLASSES):
            dist.all_reduce(total, ReduceOp.MAX if infinite else ReduceOp.SUM, state.groups.pipe)
    norm = total if infinite else total ** (1.0 / norm_type)
    if state.optimizer is not None:
        state.optimizer._global_grad_norm = norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype if gradient.is_floating_point() else total.dtype))
    return norm


def _wide(gradient: torch.Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
