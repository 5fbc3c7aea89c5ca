"""Gradient norms over all partitions.

``torch.nn.utils.clip_grad_norm_`` gets the gradients of one partition only. Once the model is partitioned,
:func:`follow_torch` makes it include those of all partitions, as :func:`clip_grad_norm_` does; it can get some of the
parameters, too, such as those of one module. A parameter that is passed itself, not in a list, is clipped by its own
norm, without communication: it is on one partition, and hooks of parameters may do so at any time.

``torch.nn.utils.get_total_norm`` gets gradients, which do not tell what other partitions hold. It must get all of the
model; a subset is rejected.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Container, Iterable, Sequence

import torch

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

    Raises:
        SMPUsageError: The optimizer's state is sharded, and some parameters of the model are missing.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    own = {id(parameter): parameter for parameter in parameters if not isinstance(parameter, MetaParameter)}
    gradients = _gradients_of(own.values())
    norm = _norm_over_partitions(_gradients_of(_counted_here(own.values())), norm_type, _lacks_parameters(own))
    if state.optimizer is not None:
        state.optimizer._global_grad_norm = norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for kind in _by_kind(gradients):
        torch._foreach_mul_(kind, factor.to(kind[0].device, kind[0].dtype))
    return norm


def _clip_like_torch(
    original: Callable[..., torch.Tensor],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Replaces ``torch.nn.utils.clip_grad_norm_``: includes the gradients of other partitions.

    Raises:
        SMPUsageError: The gradients are multiplied by the loss scale; or tensors that are not of the model are among
            its parameters; or the only parameter is divided between ranks.
        RuntimeError: `error_if_nonfinite` is set and the norm is not finite.
    """
    if not _has_other_ranks():
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    own = {id(each) for each in state.require_model().local_parameters()}
    is_of_model = [isinstance(each, MetaParameter) or id(each) in own for each in tensors]
    if any(is_of_model):
        _check_unscaled()
    # A list may be empty here because other partitions hold its parameters.
    is_single = isinstance(parameters, torch.Tensor)
    is_local = is_single or (bool(tensors) and not any(is_of_model))
    if not is_local and not all(is_of_model):
        raise SMPUsageError(
            f"torch.nn.utils.clip_grad_norm_ gets {sum(is_of_model)} parameters of the model and "
            f"{len(is_of_model) - sum(is_of_model)} other tensors: clip them one after the other"
        )
    norm_type = float(norm_type)
    if is_local:
        if any(is_of_model) and _is_divided(tensors[0]):
            raise SMPUsageError(
                "torch.nn.utils.clip_grad_norm_ gets one parameter, of which this rank holds a part: pass all "
                "parameters of the model, or call `smp.clip_grad_norm_` on all ranks"
            )
        gradients = [each.grad for each in tensors if each.grad is not None]
        norm = inspect.unwrap(torch.nn.utils.get_total_norm)(gradients, norm_type, error_if_nonfinite, foreach)
    else:
        here = [each for each in tensors if id(each) in own]
        counted = [each.grad for each in _counted_here(here) if each.grad is not None]
        lacks_parameters = _lacks_parameters({id(each) for each in here})
        norm = _checked(_norm_over_partitions(counted, norm_type, lacks_parameters), norm_type, error_if_nonfinite)
        dtypes = [each.grad.dtype for each in here if each.grad is not None]
        norm = norm.to(dtypes[0] if dtypes else torch.get_default_dtype())
    torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm, foreach)
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


def _is_divided(parameter: torch.Tensor) -> bool:
    """Return whether other ranks hold other parts of a parameter's gradient."""
    is_sharded = state.optimizer is not None and state.optimizer.is_sharded
    return is_sharded or id(parameter) in shards(state.require_model().module)


def _lacks_parameters(own: Container[int]) -> bool | None:
    """Return whether a parameter of this rank is not among those with the given ids; `None` if none need be."""
    return None if state.optimizer is None else state.optimizer._lacks_parameters(own)


def _norm_over_partitions(
    gradients: Sequence[torch.Tensor], norm_type: float, lacks_parameters: bool | None = None
) -> torch.Tensor:
    """Return the norm, in float64, over the gradients of all ranks that hold one model.

    All of these ranks call this; with sharded gradients, all ranks of the job do.

    Args:
        gradients: What this rank adds.
        norm_type: Order of the norm.
        lacks_parameters: Whether this rank has not got all parameters that it needs; `None` if it needs none.

    Raises:
        SMPUsageError: Some rank has not got all parameters. All ranks raise it.
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
    if lacks_parameters is not None:
        # The second element tells all ranks that one of them must raise.
        both = torch.stack([total, torch.full_like(total, lacks_parameters)])
        _all_reduce(both, infinite, group)
        if both[1] > 0:
            raise SMPUsageError("with `shard_optimizer_state`, gradients are clipped all together: pass all parameters")
        total = both[0]
    else:
        _all_reduce(total, infinite, group)
    return total if infinite else total ** (1.0 / norm_type)


def _all_reduce(tensor: torch.Tensor, infinite: bool, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with errors.translated(CLASSES):
            dist.all_reduce(tensor, ReduceOp.MAX if infinite else ReduceOp.SUM, group)


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
    _replace(torch.nn.utils.clip_grad_norm_, _clip_like_torch)
    _replace(torch.nn.utils.get_total_norm, _total_norm)


def _replace(function: Callable[..., torch.Tensor], replacement: Callable[..., torch.Tensor]) -> None:
    """Replace what a function of PyTorch calls.

    The function itself stays, since scripts import it by name. It is a wrapper that enters ``torch.no_grad`` and calls
    the function in its closure.
    """
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, functools.partial) and cell.cell_contents.func is replacement:
            return
        if cell.cell_contents is inspect.unwrap(function):
            cell.cell_contents = functools.partial(replacement, cell.cell_contents)
            return
    warnings.warn(
        f"torch.nn.utils.{function.__name__} of PyTorch {torch.__version__} cannot be made to include other "
        f"partitions: call `smp.clip_grad_norm_`",
        stacklevel=2,
    )


def _check_unscaled() -> None:
    if state.loss_scale != 1.0 and state.model is not None and state.model.is_partitioned:
        raise SMPUsageError(
            "torch.nn.utils gets gradients that are multiplied by the loss scale: call "
            "`optimizer.clip_master_grads` or `smp.clip_grad_norm_`"
        )


def _has_other_ranks() -> bool:
    """Return whether other ranks have gradients, or parts of them, that belong to a norm."""
    is_sharded = state.optimizer is not None and state.optimizer.is_sharded
    return state.model is not None and (state.groups.mp_group is not None or is_sharded)


def _checked(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients of all partitions is {float(norm)}: it "
            f"cannot be clipped"
        )
    return norm


def _total_norm(
    original: Callable[..., torch.Tensor],
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Replaces ``torch.nn.utils.get_total_norm``: includes the gradients of other partitions.

    Raises:
        SMPUsageError: The tensors are only some of the gradients of a partitioned model, or they are multiplied by the
            loss scale.
        RuntimeError: `error_if_nonfinite` is set and the norm is not finite.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    # PyTorch accepts "inf" as text, too.
    norm_type = float(norm_type)
    gradients = (
        set() if state.model is None else {id(each.grad) for each in state.model.local_parameters()} - {id(None)}
    )
    number = sum(id(each) in gradients for each in tensors)
    if number:
        _check_unscaled()
    if not _has_other_ranks():
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    if number == len(gradients) == len(tensors):
        model = state.require_model()
        counted = [each.grad for each in _counted_here(model.local_parameters()) if each.grad is not None]
        own = {id(each) for each in model.local_parameters()}
        norm = _checked(
            _norm_over_partitions(counted, norm_type, _lacks_parameters(own)), norm_type, error_if_nonfinite
        )
        return norm.to(tensors[0].dtype if tensors else torch.get_default_dtype())
    if number == 0 or len(tensors) == 1:
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    raise SMPUsageError(
        f"torch.nn.utils gets {number} of the {len(gradients)} gradients that this partition has, and "
        f"{len(tensors) - number} other tensors: the norm would lack what other partitions have. Call "
        "`torch.nn.utils.clip_grad_norm_` or `smp.clip_grad_norm_` on all ranks, with the same parameters"
    )


def _by_kind(gradients: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Group gradients by device and type, as PyTorch's operations on lists of tensors want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return kinds.values()


def _wide(gradient: torch.Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
