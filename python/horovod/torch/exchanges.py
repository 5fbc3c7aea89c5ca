"""Collectives that move rows without changing them: all-gather, broadcast, all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.torch.handles import _NOTHING, _first, _kept, _number, _Pending, _submit

# isort: split
import torch

from horovod.common.exceptions import ScalarError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.session import Average, rank
from horovod.torch.reductions import allreduce, grouped_allreduce

_ALL_GATHER = torch.ops.smd.named_all_gather.default
_BROADCAST = torch.ops.smd.named_broadcast.default
_ALL_TO_ALL = torch.ops.smd.named_all_to_all.default


def _gather(
    kind: str,
    tensors: list[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    blocking: bool,
    finish: Callable[[list], Any],
) -> _Pending:
    if not tensors:
        return _Pending(_NOTHING, None, finish, None)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ScalarError("Allgather of a rank-zero tensor: a tensor needs rows to be gathered")
    arguments = (kind, name or "", _number(process_set), blocking)
    devices = [tensor.device for tensor in tensors]

    def back(outputs: list[torch.Tensor]) -> Any:
        return finish([output.to(device) for output, device in zip(outputs, devices, strict=True)])

    # The core gathers by name in the host's memory.
    return _submit(_ALL_GATHER, [tensor.cpu() for tensor in tensors], *arguments, finish=back)


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
    def forward(ctx: Any, tensor: Any, name: Any, process_set: Any) -> Any:
        ctx.rows, ctx.process_set = tensor.shape[0] if tensor.dim() else 0, process_set
        return _gather("allgather", [tensor], name, process_set, True, _first).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
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
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        return _gather("grouped_allgather", list(tensors), name, process_set, True, tuple).wait()

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
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
    def forward(ctx: Any, tensor: Any, root_rank: Any, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return _broadcast(tensor, False, root_rank, name, process_set, True).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
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
    """The rows for each rank, and where the numbers of those received belong. No splits at all mean equal ones."""
    if splits is None:
        return None, torch.device("cpu")
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits to be a 32-bit integer tensor, not one of {splits.dtype}")
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects a 1D splits tensor, not one of {splits.dim()} dimensions")
        return splits.tolist() or None, splits.device
    return [int(rows) for rows in splits] or None, torch.device("cpu")


def _exchange(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, blocking: bool) -> _Pending:
    rows, device = _splits(splits)
    home = tensor.device

    def finish(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = outputs
        return output.to(home), received.to(device)

    arguments = ("alltoall", name or "", _number(process_set), blocking)
    # As `_gather`.
    return _submit(_ALL_TO_ALL, tensor.cpu(), rows, *arguments, finish=finish)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`alltoall`; returns a handle at once, for the output and the received splits."""
    return _kept(_exchange(tensor, splits, name, process_set, False))


class HorovodAlltoall(torch.autograd.Function):
    """An all-to-all; the gradient goes back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        output, received = _exchange(tensor, splits, name, process_set, True).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.rows = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *_: Any) -> Any:
        grad: torch.Tensor = alltoall(grad_output, splits=ctx.received, process_set=ctx.process_set)[0]
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
