"""Gradient norms over all partitions.

``torch.nn.utils.clip_grad_norm_`` gets the gradients of one partition only. Once the model is partitioned,
:func:`follow_torch` makes it and ``get_total_norm`` include those of all partitions. They must get all gradients of
the model; a subset is rejected, because the other partitions would not add theirs. The norm of a single gradient
stays local, because a parameter is on one partition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn.utils import clip_grad

from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPUsageError
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.nn.module import shards
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the norm of all gradients of the model, as ``torch.nn.utils.clip_grad_norm_`` does in one process.

    All ranks that hold one model call it. Each parameter counts once, also where tensor parallelism divides it. With
    the configuration's ``fp16`` or ``bf16``, gradients of the master weights are clipped, without the loss scale, and
    all ranks of the job call it.

    Args:
        parameters: Parameters of the model; those of other partitions may be among them.
        max_norm: Largest norm that is left unchanged.
        norm_type: Order of the norm; ``math.inf`` is the largest gradient.

    Returns:
        The norm before clipping, the same on all ranks that hold one model.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    own = {id(parameter): parameter for parameter in parameters if not isinstance(parameter, MetaParameter)}
    if state.optimizer is not None:
        state.optimizer._check_clipped(list(own.values()))
    gradients = _gradients_of(own.values())
    norm = _norm_over_partitions(_gradients_of(_counted_here(own.values())), norm_type)
    if state.optimizer is not None:
        state.optimizer._global_grad_norm = norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for kind in _by_kind(gradients):
        torch._foreach_mul_(kind, factor.to(kind[0].device, kind[0].dtype))
    return norm


def _gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that the optimizer uses."""
    if state.optimizer is None:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
    return state.optimizer._gradients_of(list(parameters))


def _counted_here(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters whose gradients this rank adds to a norm.

    These are slices. The first rank of a tensor-parallel group also adds the gradients of parameters that all its
    ranks have. If the group shards those gradients (OSH-2), every rank adds its own part.
    """
    if state.groups.rank_in("tp") == 0 or state.model is None:
        return list(parameters)
    own = set(shards(state.model.module))
    if state.optimizer is not None and state.optimizer.is_sharded:
        own |= {id(parameter) for _, parameter in state.model.default_reducer_named_parameters()}
    return [parameter for parameter in parameters if id(parameter) in own]


def _norm_over_partitions(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm, in float64, over the gradients of all ranks that hold one model.

    All of these ranks call this; with sharded gradients, all ranks of the job do.
    """
    infinite = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=current_device())
    optimizer = state.optimizer
    for kind in _by_kind(gradients if optimizer is None else optimizer._counted(gradients)):
        # A few kernels on a GPU, whatever the number of gradients.
        found = torch.stack(torch._foreach_norm(kind, norm_type, dtype=_wide(kind[0]))).to(total)
        total = torch.maximum(total, found.max()) if infinite else total + (found**norm_type).sum()
    # Of sharded gradients, each element counts on exactly one rank of the job.
    is_sharded = optimizer is not None and optimizer.is_sharded
    group = state.groups.objects("world") if is_sharded else state.groups.mp_group
    if group is not None:
        with errors.translated(CLASSES):
            dist.all_reduce(total, ReduceOp.MAX if infinite else ReduceOp.SUM, group)
    return total if infinite else total ** (1.0 / norm_type)


def divided(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return which tensors of an optimizer are slices of parameters that tensor parallelism divides.

    Args:
        optimizer: The optimizer.

    Returns:
        Their ids; none unless ``smp.DistributedOptimizer`` wraps the optimizer.
    """
    if not _is_wrapped(optimizer):
        return set()
    slices = shards(state.require_model().module)
    return {id(each) for each, source in _sources(optimizer) if id(source) in slices}


@torch.no_grad()
def whole_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the norm of all gradients of an optimizer, over all ranks that hold one model.

    All of these ranks call it, also those without parameters. Unless ``smp.DistributedOptimizer`` wraps the optimizer,
    it is the norm of the gradients on this rank.

    Args:
        optimizer: The optimizer, whose states are not sharded.

    Returns:
        The norm, in float64.
    """
    pairs = _sources(optimizer)
    if _is_wrapped(optimizer):
        counted = {id(each) for each in _counted_here([source for _, source in pairs])}
        pairs = [(each, source) for each, source in pairs if id(source) in counted]
        return _norm_over_partitions([each.grad for each, _ in pairs if each.grad is not None], 2.0)
    found = [torch.linalg.vector_norm(each.grad, dtype=_wide(each.grad)) for each, _ in pairs if each.grad is not None]
    return (
        torch.stack([each.double() for each in found]).norm()
        if found
        else torch.zeros((), dtype=torch.float64, device=current_device())
    )


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    return state.optimizer is not None and state.optimizer.optimizer is optimizer and state.model is not None


def _sources(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor of an optimizer with the model's parameter of which it is the master weight, or itself."""
    known = {} if state.optimizer is None else state.optimizer.master_sources
    return [(each, known.get(id(each), each)) for group in optimizer.param_groups for each in group["params"]]


def follow_torch() -> None:
    """Make the functions of ``torch.nn.utils`` compute norms over all partitions, for the life of this process."""
    if not isinstance(clip_grad._get_total_norm, _TotalNorm):
        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _TotalNorm(clip_grad._get_total_norm)


class _TotalNorm:
    """Replaces ``torch.nn.utils.get_total_norm``, which ``clip_grad_norm_`` calls."""

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self._original = original
        functools.update_wrapper(self, original)

    @torch.no_grad()
    def __call__(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Compute the norm as PyTorch's function does.

        Raises:
            SMPUsageError: The tensors are only some of the gradients of a partitioned model.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # PyTorch accepts "inf" as text, too.
        norm_type = float(norm_type)
        model = state.model
        if state.loss_scale != 1.0 and model is not None and model.is_partitioned:
            own = {id(each.grad) for each in model.local_parameters() if each.grad is not None}
            if any(id(each) in own for each in tensors):
                raise SMPUsageError(
                    "torch.nn.utils gets gradients that are multiplied by the loss scale: call "
                    "`optimizer.clip_master_grads` or "
                    "`smp.clip_grad_norm_`"
                )
        is_sharded = state.optimizer is not None and state.optimizer.is_sharded
        if model is None or (state.groups.mp_group is None and not is_sharded):
            return self._original(tensors, norm_type, error_if_nonfinite, foreach)
        missing = {id(each.grad) for each in model.local_parameters() if each.grad is not None}
        all_of_model = len(missing)
        others = 0
        for each in tensors:
            if id(each) in missing:
                missing.discard(id(each))
            else:
                others += 1
        if missing == set() and not others:
            counted = [each.grad for each in _counted_here(model.local_parameters()) if each.grad is not None]
            norm = _norm_over_partitions(counted, norm_type)
            if error_if_nonfinite and not bool(norm.isfinite()):
                raise RuntimeError(
                    f"The total norm of order {norm_type} of the gradients of all partitions is {float(norm)}: it "
                    f"cannot be clipped"
                )
            return norm.to(tensors[0].dtype if tensors else torch.get_default_dtype())
        if len(missing) == all_of_model or len(tensors) == 1:
            return self._original(tensors, norm_type, error_if_nonfinite, foreach)
        raise SMPUsageError(
            f"torch.nn.utils gets {all_of_model - len(missing)} of the {all_of_model} gradients that this partition "
            f"has, and {others} other tensors: the norm would lack what other partitions have. Call "
            "`smp.clip_grad_norm_` on all ranks, with the same parameters"
        )


def _by_kind(gradients: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Group gradients by device and type, as PyTorch's operations on lists of tensors want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return kinds.values()


def _wide(gradient: torch.Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
