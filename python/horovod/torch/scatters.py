"""Reduce-scatters: reductions that leave each rank with a part of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.torch.handles import _NOTHING, _first, _in_host_memory, _kept, _number, _Pending, _submit

# isort: split
import torch

from horovod.common.exceptions import HorovodInternalError, ScalarError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.session import Average, Sum
from horovod.torch.compression import Compression
from horovod.torch.exchanges import allgather, grouped_allgather
from horovod.torch.reductions import _check_reduction

_REDUCE_SCATTER = torch.ops.smd.named_reduce_scatter.default


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
        return _Pending(_NOTHING, None, finish, None)
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM ops")
    spelled = _check_reduction(tensors, op, process_set)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ScalarError("Reducescatter does not support scalar inputs: a tensor needs rows to be shared out")
    sent, is_scaled, finish = _scaled_otherwise(tensors, factors, finish)
    arguments = (spelled, *map(float, factors), is_scaled, kind, name or "", _number(process_set), blocking)
    return _submit(_REDUCE_SCATTER, sent, *arguments, like=sent[0], finish=finish)


def _scaled_otherwise(
    tensors: list[torch.Tensor], factors: tuple[float, float], finish: Callable[[list], Any]
) -> tuple[list[torch.Tensor], bool, Callable[[list], Any]]:
    """Scale CUDA tensors, because the core applies factors only in the host's memory.

    Floating-point tensors are scaled here on the device, and the core compares the factors. Integers travel through the
    host.
    """
    if not tensors[0].is_cuda or factors == (1.0, 1.0):
        return tensors, False, finish
    device = tensors[0].device
    with torch.no_grad():
        if not all(tensor.is_floating_point() for tensor in tensors):
            return (
                _in_host_memory("scaled reducescatter of integers", tensors),
                False,
                lambda outputs: finish([output.to(device) for output in outputs]),
            )
        sent = [tensor * factors[0] for tensor in tensors]
    return sent, True, lambda outputs: finish([output.mul_(factors[1]) for output in outputs])


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce and scatter a tensor as :func:`reducescatter`, and return at once.

    Args:
        tensor: Input; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    factors = prescale_factor, postscale_factor
    return _kept(_scatter("reducescatter", [tensor], name, op, process_set, factors, False, _first))


def _scaled_back(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    op, process_set, factors = ctx.call
    scale = factors[0] * factors[1] * (process_set.size() if op == Sum else 1)
    return grad * scale if scale != 1 else grad


class HorovodReducescatter(torch.autograd.Function):
    """A reduce-scatter whose gradient is an all-gather."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, name: Any, op: Any, process_set: Any, prescale_factor: Any, postscale_factor: Any
    ) -> Any:
        """Reduce and scatter a tensor.

        Args:
            ctx: The context of autograd.
            tensor: Input.
            name: See :func:`reducescatter`.
            op: See :func:`reducescatter`.
            process_set: See :func:`reducescatter`.
            prescale_factor: See :func:`reducescatter`.
            postscale_factor: See :func:`reducescatter`.

        Returns:
            This rank's rows of the result.
        """
        factors = prescale_factor, postscale_factor
        ctx.call = (op, process_set, factors)
        return _scatter("reducescatter", [tensor], name, op, process_set, factors, True, _first).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        """Gather the gradients of all rows.

        Args:
            ctx: The context of autograd.
            grad_output: Gradient of this rank's rows.

        Returns:
            The gradient of the input, and ``None`` for other arguments.
        """
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
    """Reduce a tensor over the ranks, and give each rank a part of the rows; differentiable.

    The first ranks get one row more if the rows cannot be divided evenly.

    Args:
        tensor: Input of shape ``[rows, ...]``; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        compression: Type in which the tensor travels, a member of ``Compression``.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.

    Returns:
        This rank's rows of the result.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
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
    """Reduce and scatter several tensors as :func:`grouped_reducescatter`, and return at once.

    Args:
        tensors: Inputs; same number, shapes and types on all ranks.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.

    Returns:
        One handle for all tensors.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
    factors = prescale_factor, postscale_factor
    return _kept(_scatter("grouped_reducescatter", list(tensors), name, op, process_set, factors, False, tuple))


class HorovodGroupedReducescatter(torch.autograd.Function):
    """Reduce-scatters that run together."""

    @staticmethod
    def forward(
        ctx: Any, name: Any, op: Any, process_set: Any, prescale_factor: Any, postscale_factor: Any, *tensors: Any
    ) -> Any:
        """Reduce and scatter tensors.

        Args:
            ctx: The context of autograd.
            name: See :func:`reducescatter`.
            op: See :func:`reducescatter`.
            process_set: See :func:`reducescatter`.
            prescale_factor: See :func:`reducescatter`.
            postscale_factor: See :func:`reducescatter`.
            *tensors: Inputs.

        Returns:
            This rank's rows of each result.
        """
        factors = prescale_factor, postscale_factor
        ctx.call = (op, process_set, factors)
        return _scatter("grouped_reducescatter", list(tensors), name, op, process_set, factors, True, tuple).wait()

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
        """Gather the gradients of all rows.

        Args:
            ctx: The context of autograd.
            *grad_output: Gradients of this rank's rows.

        Returns:
            ``None`` for other arguments, and the gradients of the inputs.
        """
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
    """Reduce and scatter several tensors as :func:`reducescatter`: all run together or none does.

    Args:
        tensors: Inputs; same number, shapes and types on all ranks.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        compression: Type in which the tensor travels, a member of ``Compression``.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.

    Returns:
        This rank's rows of each result.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    if not tensors:
        return []
    small, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *small)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]
