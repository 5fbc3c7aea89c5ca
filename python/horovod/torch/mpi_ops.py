"""Collectives on PyTorch tensors.

Ranks submit them in any order, on any thread; they find each other by name within a process set. The asynchronous forms
return a handle. In-place forms end in an underscore and are not differentiable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed._common import shims

# PyTorch first, through the loader: it says what is missing.
_core_ops = shims.load_torch()

import torch  # noqa: E402

from horovod.common import basics as _basics_module  # noqa: E402
from horovod.common.basics import HorovodBasics, warn_once  # noqa: E402
from horovod.common.exceptions import HorovodInternalError, at_execution, at_submission  # noqa: E402
from horovod.common.process_sets import ProcessSet, global_process_set  # noqa: E402
from horovod.common.util import (  # noqa: E402, F401
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from horovod.torch.compression import Compression  # noqa: E402

_basics = HorovodBasics(__file__, "mpi_lib_v2")

shutdown = _basics.shutdown
init = _basics.init
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)

# The core's names.
_OPS = {Average: "average", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}

_ALL_REDUCE = torch.ops.smd.named_all_reduce.default
_ALL_GATHER = torch.ops.smd.named_all_gather.default
_BROADCAST = torch.ops.smd.named_broadcast.default
_ALL_TO_ALL = torch.ops.smd.named_all_to_all.default
_REDUCE_SCATTER = torch.ops.smd.named_reduce_scatter.default


class _Pending:
    """An operation in flight.

    Args:
        work: The core's handle.
        outputs: Of in-place forms; others have their results in `work`.
        finish: Makes what `synchronize` returns of the outputs.
    """

    __slots__ = ("finish", "outputs", "stream", "work")

    def __init__(self, work: Any, outputs: list[torch.Tensor] | None, finish: Callable[[list], Any], like: Any) -> None:
        self.work = work
        self.outputs = outputs
        self.finish = finish
        # Where an operation on a GPU is queued.
        self.stream = torch.cuda.current_stream(like.device) if like is not None and like.is_cuda else None

    def wait(self) -> Any:
        try:
            self.work.wait()
        except (RuntimeError, ValueError) as error:
            raise at_execution(error) from None
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return self.finish(self.work.results() if self.outputs is None else self.outputs)


_handle_map: dict[int, _Pending] = {}
_numbers = itertools.count()

_basics_module._cleanups.append(_handle_map.clear)


def _first(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0]


def _number(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} does not exist, or has not been registered: call `add_process_set` first")
    return number


def _submit(
    call: Callable[..., Any],
    *args: Any,
    like: torch.Tensor | None = None,
    outputs: list[torch.Tensor] | None = None,
    finish: Callable[[list], Any] = _first,
) -> _Pending:
    try:
        work = call(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        raise at_submission(error) from None
    return _Pending(work, outputs, finish, like)


def _kept(pending: _Pending) -> int:
    handle = next(_numbers)
    _handle_map[handle] = pending
    return handle


def _check_reduction(tensors: Sequence[torch.Tensor], op: int, process_set: ProcessSet) -> str:
    if op not in _OPS:
        raise ValueError(f"{op!r} is no reduction: expected Average, Sum, Adasum, Min, Max or Product")
    for tensor in tensors:
        if tensor.dtype == torch.bool:
            raise ValueError(f"tensor type {tensor.type()} is not supported in reductions")
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"tensors of a group must be on same device: one is on {tensors[0].device}, another on {tensor.device}"
            )
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if _basics.is_initialized() and not num_rank_is_power_2(size()):
            raise NotImplementedError(
                f"Running Adasum with non-power of 2 ranks is not supported yet: there are {size()}"
            )
    return _OPS[op]


def _reduce(
    kind: str,
    tensors: list[torch.Tensor],
    in_place: bool,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    blocking: bool,
    finish: Callable[[list], Any],
) -> _Pending:
    spelled = _check_reduction(tensors, op, process_set)
    factors = float(prescale_factor), float(postscale_factor)
    arguments = (spelled, *factors, kind, name or "", _number(process_set), blocking)
    return _submit(
        _ALL_REDUCE,
        tensors,
        tensors if in_place else [],
        *arguments,
        like=tensors[0],
        outputs=tensors if in_place else None,
        finish=finish,
    )


def _allreduce_async(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    if output is not tensor:
        output.copy_(tensor)
    return allreduce_async_(output, None, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce`; returns a handle at once."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    return _kept(_reduce("allreduce", [tensor], False, name, op, *factors, process_set, False, _first))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce_`; returns a handle at once."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    return _kept(_reduce("allreduce", [tensor], True, name, op, *factors, process_set, False, _first))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`allreduce`, in place; not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    return _reduce("allreduce", [tensor], True, name, op, *factors, process_set, True, _first).wait()


def _warn_of_gradient(op: int) -> None:
    if op not in (Average, Sum):
        warn_once(
            f"the gradient of an allreduce with op={_OPS[op]} is the same operation on the gradient, as in Horovod"
        )


class HorovodAllreduce(torch.autograd.Function):
    """An all-reduce whose gradient is one, too."""

    @staticmethod
    def forward(ctx, tensor, average, name, op, prescale_factor, postscale_factor, process_set):
        ctx.call = (op, prescale_factor, postscale_factor, process_set)
        return _reduce(
            "allreduce", [tensor], False, name, op, prescale_factor, postscale_factor, process_set, True, _first
        ).wait()

    @staticmethod
    def backward(ctx, grad_output):
        _warn_of_gradient(ctx.call[0])
        op, *factors, process_set = ctx.call
        grad = allreduce(
            grad_output,
            op=op,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            process_set=process_set,
        )
        return grad, None, None, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks of a process set; differentiable.

    Args:
        tensor: Same shape and type on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches ranks' calls; given by the core if there is none.
        compression: How it travels.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values first.
        postscale_factor: Multiplied with the result.
        process_set: Whose ranks.

    Returns:
        A tensor of the same shape and type.

    Raises:
        ValueError: The arguments are not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or one is gone.
    """
    op = handle_average_backwards_compatibility(op, average)
    small, ctx = compression.compress(tensor)
    reduced = HorovodAllreduce.apply(small, None, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, ctx)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`grouped_allreduce`; returns one handle at once."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    return _kept(_grouped(list(tensors), False, name, op, *factors, process_set, False, tuple))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`grouped_allreduce_`; returns one handle at once."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    return _kept(_grouped(list(tensors), True, name, op, *factors, process_set, False, tuple))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`grouped_allreduce`, in place; not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    return synchronize(
        grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    )


class _Nothing:
    """What a group of no tensors waits for."""

    @staticmethod
    def wait() -> None:
        pass

    @staticmethod
    def is_completed() -> bool:
        return True

    @staticmethod
    def results() -> list[torch.Tensor]:
        return []


def _grouped(tensors: list[torch.Tensor], in_place: bool, name: str | None, op: int, *rest: Any) -> _Pending:
    if not tensors:
        return _Pending(_Nothing(), None, rest[-1], None)
    return _reduce("grouped_allreduce", tensors, in_place, name, op, *rest)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """All-reduces that run together, whose gradients are reduced together."""

    @staticmethod
    def forward(ctx, average, name, op, prescale_factor, postscale_factor, process_set, *tensors):
        ctx.call = (op, prescale_factor, postscale_factor, process_set)
        return _grouped(
            list(tensors), False, name, op, prescale_factor, postscale_factor, process_set, True, tuple
        ).wait()

    @staticmethod
    def backward(ctx, *grad_output):
        _warn_of_gradient(ctx.call[0])
        op, prescale_factor, postscale_factor, process_set = ctx.call
        grads = grouped_allreduce(
            list(grad_output),
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return (None, None, None, None, None, None, *grads)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce`, of several tensors: all run together or none does."""
    op = handle_average_backwards_compatibility(op, average)
    if not tensors:
        return []
    small, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = HorovodGroupedAllreduce.apply(None, name, op, prescale_factor, postscale_factor, process_set, *small)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Reduces a sparse tensor: gathers everybody's indices and values.

    Returns:
        A function that waits, and returns a sparse tensor that is not coalesced.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(f"a sparse tensor cannot be reduced with op={_OPS.get(op, op)}: use Average or Sum")
    sparse = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = sparse.indices().transpose(0, 1).contiguous()
    values = sparse.values()
    indices_name, values_name = (f"{name}.indices", f"{name}.values") if name else (None, None)
    indices_handle = allgather_async(indices, indices_name, process_set)
    values_handle = allgather_async(values, values_name, process_set)
    members = process_set.size()

    def handle() -> torch.Tensor:
        everybodys_indices = synchronize(indices_handle)
        everybodys_values = synchronize(values_handle)
        if op == Average:
            everybodys_values = everybodys_values / members
        indices = everybodys_indices.transpose(0, 1)
        return torch.sparse_coo_tensor(indices, everybodys_values, sparse.size(), check_invariants=False)

    return handle


def _gather(
    kind: str,
    tensors: list[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    blocking: bool,
    finish: Callable[[list], Any],
) -> _Pending:
    if not tensors:
        return _Pending(_Nothing(), None, finish, None)
    arguments = (kind, name or "", _number(process_set), blocking)
    return _submit(_ALL_GATHER, tensors, *arguments, like=tensors[0], finish=finish)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As :func:`allgather`; returns a handle at once."""
    return _kept(_gather("allgather", [tensor], name, process_set, False, _first))


def _own_rows(grad: torch.Tensor, heights: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    place = process_set.rank()
    start = int(heights[:place].sum())
    return grad.narrow(0, start, int(heights[place]))


class HorovodAllgather(torch.autograd.Function):
    """An all-gather whose gradient is this rank's part of the average."""

    @staticmethod
    def forward(ctx, tensor, name, process_set):
        ctx.rows, ctx.process_set = tensor.shape[0] if tensor.dim() else 0, process_set
        return _gather("allgather", [tensor], name, process_set, True, _first).wait()

    @staticmethod
    def backward(ctx, grad_output):
        grad = allreduce(grad_output, op=Average, process_set=ctx.process_set)
        heights = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        return _own_rows(grad, heights, ctx.process_set), None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The rows of all ranks, one rank's after the other's; differentiable. Ranks may have different numbers of rows."""
    return HorovodAllgather.apply(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`grouped_allgather`; returns one handle at once."""
    return _kept(_gather("grouped_allgather", list(tensors), name, process_set, False, tuple))


class HorovodGroupedAllgather(torch.autograd.Function):
    """All-gathers that run together."""

    @staticmethod
    def forward(ctx, name, process_set, *tensors):
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        return _gather("grouped_allgather", list(tensors), name, process_set, True, tuple).wait()

    @staticmethod
    def backward(ctx, *grad_output):
        grads = grouped_allreduce(list(grad_output), op=Average, process_set=ctx.process_set)
        heights = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        own = [_own_rows(grad, heights[:, at], ctx.process_set) for at, grad in enumerate(grads)]
        return (None, None, *own)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """As :func:`allgather`, of several tensors: all run together or none does."""
    return HorovodGroupedAllgather.apply(name, process_set, *tensors) if tensors else ()


def _broadcast(
    tensor: torch.Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet, blocking: bool
) -> _Pending:
    outputs = [tensor] if in_place else []
    arguments = (int(root_rank), "broadcast", name or "", _number(process_set), blocking)
    return _submit(_BROADCAST, tensor, outputs, *arguments, like=tensor, outputs=outputs or None)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast`; returns a handle at once."""
    return _kept(_broadcast(tensor, False, root_rank, name, process_set, False))


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast; the root gets the average of the gradients."""

    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set):
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return _broadcast(tensor, False, root_rank, name, process_set, True).wait()

    @staticmethod
    def backward(ctx, grad_output):
        grad = allreduce(grad_output, op=Average, process_set=ctx.process_set)
        return grad if rank() == ctx.root_rank else torch.zeros_like(grad), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of `root_rank`, a rank of the world; differentiable."""
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast_`; returns a handle at once."""
    return _kept(_broadcast(tensor, True, root_rank, name, process_set, False))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As :func:`broadcast`, in place; not differentiable."""
    return _broadcast(tensor, True, root_rank, name, process_set, True).wait()


def _splits(splits: Any) -> tuple[list[int] | None, torch.device]:
    """The rows for each rank, and where the numbers of those received belong."""
    if splits is None:
        return None, torch.device("cpu")
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits to be a 32-bit integer tensor, not one of {splits.dtype}")
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects a 1D splits tensor, not one of {splits.dim()} dimensions")
        return splits.tolist(), splits.device
    return [int(rows) for rows in splits], torch.device("cpu")


def _exchange(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, blocking: bool) -> _Pending:
    rows, device = _splits(splits)

    def finish(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = outputs
        return output, received.to(device)

    arguments = ("alltoall", name or "", _number(process_set), blocking)
    return _submit(_ALL_TO_ALL, tensor, rows, *arguments, like=tensor, finish=finish)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`alltoall`; returns a handle at once, for the output and the received splits."""
    return _kept(_exchange(tensor, splits, name, process_set, False))


class HorovodAlltoall(torch.autograd.Function):
    """An all-to-all; the gradient goes back the way the rows came."""

    @staticmethod
    def forward(ctx, tensor, splits, name, process_set):
        output, received = _exchange(tensor, splits, name, process_set, True).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.rows = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx, grad_output, *_):
        grad, _ = alltoall(grad_output, splits=ctx.received, process_set=ctx.process_set)
        if grad.shape[0] < ctx.rows:
            # Rows that went nowhere.
            grad = torch.cat([grad, grad.new_zeros((ctx.rows - grad.shape[0], *grad.shape[1:]))])
        return grad, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows to each rank, and gets rows from each; differentiable.

    Args:
        tensor: Rows, in the order of the ranks that they are for.
        splits: Rows for each rank: a list, or a tensor of int32; ``None`` means equal parts.
        name: See :func:`allreduce`.
        process_set: Whose ranks.

    Returns:
        What was received, in the order of ranks, and if there are splits, how many rows from each.
    """
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _scatter(
    kind: str,
    tensors: list[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
    blocking: bool,
    finish: Callable[[list], Any],
) -> _Pending:
    if not tensors:
        return _Pending(_Nothing(), None, finish, None)
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM ops")
    spelled = _check_reduction(tensors, op, process_set)
    arguments = (spelled, float(factors[0]), float(factors[1]), kind, name or "", _number(process_set), blocking)
    return _submit(_REDUCE_SCATTER, tensors, *arguments, like=tensors[0], finish=finish)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As :func:`reducescatter`; returns a handle at once."""
    factors = prescale_factor, postscale_factor
    return _kept(_scatter("reducescatter", [tensor], name, op, process_set, factors, False, _first))


def _scaled_back(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    op, process_set, factors = ctx.call
    scale = factors[0] * factors[1] * (process_set.size() if op == Sum else 1)
    return grad * scale if scale != 1 else grad


class HorovodReducescatter(torch.autograd.Function):
    """A reduce-scatter; its gradient is gathered."""

    @staticmethod
    def forward(ctx, tensor, name, op, process_set, prescale_factor, postscale_factor):
        factors = prescale_factor, postscale_factor
        ctx.call = (op, process_set, factors)
        return _scatter("reducescatter", [tensor], name, op, process_set, factors, True, _first).wait()

    @staticmethod
    def backward(ctx, grad_output):
        grad = allgather(grad_output, process_set=ctx.call[1])
        return _scaled_back(ctx, grad), None, None, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces over the ranks, and leaves each with its share of the rows; differentiable. The first ranks get one row more
    if the rows cannot be shared out evenly."""
    small, ctx = compression.compress(tensor)
    reduced = HorovodReducescatter.apply(small, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(reduced, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As :func:`grouped_reducescatter`; returns one handle at once."""
    factors = prescale_factor, postscale_factor
    return _kept(_scatter("grouped_reducescatter", list(tensors), name, op, process_set, factors, False, tuple))


class HorovodGroupedReducescatter(torch.autograd.Function):
    """Reduce-scatters that run together."""

    @staticmethod
    def forward(ctx, name, op, process_set, prescale_factor, postscale_factor, *tensors):
        factors = prescale_factor, postscale_factor
        ctx.call = (op, process_set, factors)
        return _scatter("grouped_reducescatter", list(tensors), name, op, process_set, factors, True, tuple).wait()

    @staticmethod
    def backward(ctx, *grad_output):
        grads = grouped_allgather(list(grad_output), process_set=ctx.call[1])
        return (None, None, None, None, None, *(_scaled_back(ctx, grad) for grad in grads))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`reducescatter`, of several tensors: all run together or none does."""
    if not tensors:
        return []
    small, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *small)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]


def poll(handle: int) -> bool:
    """Whether the operation is complete or failed.

    Raises:
        ValueError: There is no such handle, or no more.
    """
    if handle not in _handle_map:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handle_map[handle].work.is_completed()


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result; the handle is used up. ``None`` for a handle that there is not.

    Raises:
        HorovodInternalError: The operation failed.
    """
    pending = _handle_map.pop(handle, None)
    return None if pending is None else pending.wait()


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks have. Meanwhile it takes part in the others'
    all-reduces with what changes nothing; their other collectives fail.

    Args:
        device: Accepted, and not needed.

    Returns:
        The rank that joined last.
    """
    pending = _submit(torch.ops.smd.named_join.default, finish=lambda _: None)
    pending.wait()
    return pending.work.last()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every member of the process set has called it."""
    _submit(torch.ops.smd.named_barrier.default, "barrier", _number(process_set), finish=lambda _: None).wait()


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
