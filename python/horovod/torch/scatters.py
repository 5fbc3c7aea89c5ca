"""Reduce-scatters: reductions that leave each rank with its share of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.torch.handles import _NOTHING, _first, _kept, _number, _Pending, _submit

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
    """CUDA tensors with factors, which the core applies in the host's memory only: floats are scaled here, on the device,
    and the core compares the factors; integers travel through the host."""
    if not tensors[0].is_cuda or factors == (1.0, 1.0):
        return tensors, False, finish
    device = tensors[0].device
    with torch.no_grad():
        if not all(tensor.is_floating_point() for tensor in tensors):
            return (
                [tensor.cpu() for tensor in tensors],
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
    def forward(
        ctx: Any, tensor: Any, name: Any, op: Any, process_set: Any, prescale_factor: Any, postscale_factor: Any
    ) -> Any:
        factors = prescale_factor, postscale_factor
        ctx.call = (op, process_set, factors)
        return _scatter("reducescatter", [tensor], name, op, process_set, factors, True, _first).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
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
    def forward(
        ctx: Any, name: Any, op: Any, process_set: Any, prescale_factor: Any, postscale_factor: Any, *tensors: Any
    ) -> Any:
        factors = prescale_factor, postscale_factor
        ctx.call = (op, process_set, factors)
        return _scatter("grouped_reducescatter", list(tensors), name, op, process_set, factors, True, tuple).wait()

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
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
