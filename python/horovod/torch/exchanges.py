"""Collectives that move rows without changing them: all-gather, broadcast, all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.torch.handles import _NOTHING, _check_devices, _first, _kept, _number, _Pending, _submit

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
    _check_devices(tensors)
    arguments = (kind, name or "", _number(process_set), blocking)
    return _submit(_ALL_GATHER, tensors, *arguments, like=tensors[0], finish=finish)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenate the rows of all ranks as :func:`allgather`, and return at once.

    Args:
        tensor: Input; do not write to it before the handle is complete.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    return _kept(_gather("allgather", [tensor], name, process_set, False, _first))


def _own_rows(grad: torch.Tensor, heights: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    place = process_set.rank()
    start = int(heights[:place].sum())
    return grad.narrow(0, start, int(heights[place]))


class HorovodAllgather(torch.autograd.Function):
    """An all-gather whose gradient is this rank's part of the average."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, process_set: Any) -> Any:
        """Gather the rows of all ranks.

        Args:
            ctx: The context of autograd.
            tensor: Input.
            name: See :func:`allgather`.
            process_set: See :func:`allgather`.

        Returns:
            The rows of all ranks.
        """
        ctx.rows, ctx.process_set = tensor.shape[0] if tensor.dim() else 0, process_set
        return _gather("allgather", [tensor], name, process_set, True, _first).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        """Average the gradients, and return this rank's rows.

        Args:
            ctx: The context of autograd.
            grad_output: Gradient of the rows of all ranks.

        Returns:
            The gradient of the input, and ``None`` for other arguments.
        """
        grad = allreduce(grad_output, op=Average, process_set=ctx.process_set)
        heights = allgather(torch.tensor([ctx.rows], device="cpu"), process_set=ctx.process_set)
        return _own_rows(grad, heights, ctx.process_set), None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the rows of all ranks; differentiable.

    Args:
        tensor: Input of shape ``[rows, ...]``. Ranks may have different numbers of rows.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        The rows of rank 0, then those of rank 1, and so on.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    return HorovodAllgather.apply(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Concatenate the rows of several tensors as :func:`grouped_allgather`, and return at once.

    Args:
        tensors: Inputs.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        One handle for all tensors.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    return _kept(_gather("grouped_allgather", list(tensors), name, process_set, False, tuple))


class HorovodGroupedAllgather(torch.autograd.Function):
    """All-gathers that run together."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        """Gather the rows of all ranks.

        Args:
            ctx: The context of autograd.
            name: See :func:`allgather`.
            process_set: See :func:`allgather`.
            *tensors: Inputs.

        Returns:
            The rows of all ranks, for each tensor.
        """
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        return _gather("grouped_allgather", list(tensors), name, process_set, True, tuple).wait()

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
        """Average the gradients, and return this rank's rows.

        Args:
            ctx: The context of autograd.
            *grad_output: Gradients of the outputs.

        Returns:
            ``None`` for other arguments, and the gradients of the inputs.
        """
        grads = grouped_allreduce(list(grad_output), op=Average, process_set=ctx.process_set)
        heights = allgather(torch.tensor([ctx.rows], device="cpu"), process_set=ctx.process_set)
        own = [_own_rows(grad, heights[:, at], ctx.process_set) for at, grad in enumerate(grads)]
        return (None, None, *own)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Concatenate the rows of several tensors as :func:`allgather`: all run together or none does.

    Args:
        tensors: Inputs.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        One output for each tensor.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
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
    """Return the root's tensor as :func:`broadcast` does, by a handle.

    Args:
        tensor: Input; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    return _kept(_broadcast(tensor, False, root_rank, name, process_set, False))


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast; the gradient of the root's input is the average of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: Any, name: Any, process_set: Any) -> Any:
        """Broadcast the root's tensor.

        Args:
            ctx: The context of autograd.
            tensor: Input.
            root_rank: See :func:`broadcast`.
            name: See :func:`broadcast`.
            process_set: See :func:`broadcast`.

        Returns:
            The root's values.
        """
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return _broadcast(tensor, False, root_rank, name, process_set, True).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        """Average the gradients for the root.

        Args:
            ctx: The context of autograd.
            grad_output: Gradient of the output.

        Returns:
            The average on the root and zeros elsewhere; ``None`` for other arguments.
        """
        grad = allreduce(grad_output, op=Average, process_set=ctx.process_set)
        return grad if rank() == ctx.root_rank else torch.zeros_like(grad), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor on every rank; differentiable.

    Args:
        tensor: Input; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Broadcast in place as :func:`broadcast_`, and return at once.

    Args:
        tensor: Input and output; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    return _kept(_broadcast(tensor, True, root_rank, name, process_set, False))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast the root's values to all ranks, in place; not differentiable.

    Args:
        tensor: Input and output; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        ``tensor``.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    return _broadcast(tensor, True, root_rank, name, process_set, True).wait()


def _splits(splits: Any) -> tuple[list[int] | None, torch.device]:
    """Return the rows for each rank (none: equal parts), and the device for the numbers of received rows."""
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

    def finish(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = outputs
        return output, received.to(device)

    arguments = ("alltoall", name or "", _number(process_set), blocking)
    return _submit(_ALL_TO_ALL, tensor, rows, *arguments, like=tensor, finish=finish)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Exchange rows as :func:`alltoall`, and return at once.

    Args:
        tensor: Rows, in the order of the ranks that they are for.
        splits: Rows for each rank: a list, or a tensor of int32; ``None`` means equal parts.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        A handle for the output and the received splits.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    return _kept(_exchange(tensor, splits, name, process_set, False))


class HorovodAlltoall(torch.autograd.Function):
    """An all-to-all; its gradient returns the rows to their senders."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        """Exchange rows.

        Args:
            ctx: The context of autograd.
            tensor: Rows to send.
            splits: See :func:`alltoall`.
            name: See :func:`alltoall`.
            process_set: See :func:`alltoall`.

        Returns:
            The received rows, and how many came from each rank.
        """
        output, received = _exchange(tensor, splits, name, process_set, True).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.rows = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *_: Any) -> Any:
        """Return the gradients of rows to their senders.

        Args:
            ctx: The context of autograd.
            grad_output: Gradient of the received rows.
            *_: Ignored.

        Returns:
            The gradient of the input, and ``None`` for other arguments.
        """
        grad: torch.Tensor = alltoall(grad_output, splits=ctx.received, process_set=ctx.process_set)[0]
        if grad.shape[0] < ctx.rows:
            # Rows beyond the splits were sent to no rank.
            grad = torch.cat([grad, grad.new_zeros((ctx.rows - grad.shape[0], *grad.shape[1:]))])
        return grad, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to each rank, and receive rows from each; differentiable.

    Args:
        tensor: Rows, in the order of the ranks that they are for.
        splits: Rows for each rank: a list, or a tensor of int32; ``None`` means equal parts.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        The received rows in the order of ranks. With ``splits``, also how many rows came from each rank.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)
