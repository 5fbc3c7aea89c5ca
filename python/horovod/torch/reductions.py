"""All-reduces of one tensor, and of several together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horovod.torch.handles import (
    _NOTHING,
    _check_devices,
    _first,
    _in_host_memory,
    _kept,
    _number,
    _Pending,
    _submit,
    synchronize,
)

# isort: split
import torch

from horovod.common.basics import warn_once
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.session import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
    is_initialized,
    size,
)
from horovod.common.util import num_rank_is_power_2
from horovod.torch.compression import Compression

# Names in the core.
_OPS = {Average: "average", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}

_ALL_REDUCE = torch.ops.smd.named_all_reduce.default


def _check_reduction(tensors: Sequence[torch.Tensor], op: int, process_set: ProcessSet) -> str:
    if op not in _OPS:
        raise ValueError(f"{op!r} is not a reduction: expected Average, Sum, Adasum, Min, Max or Product")
    for tensor in tensors:
        if tensor.dtype == torch.bool:
            raise ValueError(f"tensor type {tensor.type()} is not supported in reductions")
    _check_devices(tensors)
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if is_initialized() and not num_rank_is_power_2(size()):
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
    sent, is_scaled = tensors, False
    if tensors[0].is_cuda and (op == Adasum or factors != (1.0, 1.0)):
        is_scaled = op != Adasum and all(tensor.is_floating_point() for tensor in tensors)
        with torch.no_grad():
            sent = (
                [tensor * factors[0] for tensor in tensors]
                if is_scaled
                else _in_host_memory("Adasum" if op == Adasum else f"scaled {kind} of integers", tensors)
            )
        finish = _finish_otherwise(tensors, in_place, factors[1] if is_scaled else 1.0, finish)
        in_place = True
    arguments = (spelled, *factors, is_scaled, kind, name or "", _number(process_set), blocking)
    return _submit(
        _ALL_REDUCE,
        sent,
        sent if in_place else [],
        *arguments,
        like=sent[0],
        outputs=sent if in_place else None,
        finish=finish,
    )


def _finish_otherwise(
    tensors: list[torch.Tensor], in_place: bool, factor: float, finish: Callable[[list], Any]
) -> Callable[[list], Any]:
    """Return a function that completes a reduction which the core runs only in host memory.

    Scaling is done here on the device, and the core compares the factors. Adasum and scaled integers travel through the
    host.
    """

    # Parameters may be reduced in place, in the same way as the core does it.
    @torch.no_grad()
    def back(outputs: list[torch.Tensor]) -> Any:
        outputs = [output.mul_(factor) if factor != 1.0 else output for output in outputs]
        if in_place:
            return finish([tensor.copy_(output) for tensor, output in zip(tensors, outputs, strict=True)])
        return finish([output.to(tensor.device) for tensor, output in zip(tensors, outputs, strict=True)])

    return back


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor as :func:`allreduce`, and return at once.

    Args:
        tensor: Input; same shape and type on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
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
    """Reduce a tensor in place as :func:`allreduce_`, and return at once.

    Args:
        tensor: Input and output; same shape and type on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
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
    """Reduce ``tensor`` over the ranks of a process set, in place; not differentiable.

    Args:
        tensor: Input and output; same shape and type on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        ``tensor``.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    return _reduce("allreduce", [tensor], True, name, op, *factors, process_set, True, _first).wait()


def _warn_of_gradient(op: int) -> None:
    if op not in (Average, Sum):
        warn_once(
            f"the gradient of an allreduce with op={_OPS[op]} is the same operation on the gradient, as in Horovod"
        )


class HorovodAllreduce(torch.autograd.Function):
    """An all-reduce whose gradient is an all-reduce, too."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        average: Any,
        name: Any,
        op: Any,
        prescale_factor: Any,
        postscale_factor: Any,
        process_set: Any,
    ) -> Any:
        """Reduce a tensor.

        Args:
            ctx: The context of autograd.
            tensor: Input.
            average: Ignored: ``op`` says it.
            name: See :func:`allreduce`.
            op: See :func:`allreduce`.
            prescale_factor: See :func:`allreduce`.
            postscale_factor: See :func:`allreduce`.
            process_set: See :func:`allreduce`.

        Returns:
            The reduced tensor.
        """
        ctx.call = (op, prescale_factor, postscale_factor, process_set)
        return _reduce(
            "allreduce", [tensor], False, name, op, prescale_factor, postscale_factor, process_set, True, _first
        ).wait()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        """Reduce the gradient by the same operation.

        Args:
            ctx: The context of autograd.
            grad_output: Gradient of the output.

        Returns:
            The gradient of the input, and ``None`` for other arguments.
        """
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
    """Reduce ``tensor`` over the ranks of a process set; differentiable.

    Args:
        tensor: Input; same shape and type on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        compression: Type in which the tensor travels, a member of ``Compression``.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        A new tensor of the same shape and type.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.

    Examples:
        >>> loss = hvd.allreduce(loss, name="loss")  # the average over the ranks
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
    """Reduce several tensors as :func:`grouped_allreduce`, and return at once.

    Args:
        tensors: Inputs; same number, shapes and types on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        One handle for all tensors.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
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
    """Reduce several tensors in place as :func:`grouped_allreduce_`, and return at once.

    Args:
        tensors: Inputs and outputs; same number, shapes and types on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        One handle for all tensors.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
    """
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
    """Reduce several tensors in place: all run together or none does; not differentiable.

    Args:
        tensors: Inputs and outputs; same number, shapes and types on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        ``tensors``.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    op = handle_average_backwards_compatibility(op, average)
    return synchronize(
        grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    )


def _grouped(tensors: list[torch.Tensor], in_place: bool, name: str | None, op: int, *rest: Any) -> _Pending:
    if not tensors:
        return _Pending(_NOTHING, None, rest[-1], None)
    return _reduce("grouped_allreduce", tensors, in_place, name, op, *rest)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """All-reduces that run together, and whose gradients are reduced together."""

    @staticmethod
    def forward(
        ctx: Any,
        average: Any,
        name: Any,
        op: Any,
        prescale_factor: Any,
        postscale_factor: Any,
        process_set: Any,
        *tensors: Any,
    ) -> Any:
        """Reduce tensors.

        Args:
            ctx: The context of autograd.
            average: Ignored: ``op`` says it.
            name: See :func:`allreduce`.
            op: See :func:`allreduce`.
            prescale_factor: See :func:`allreduce`.
            postscale_factor: See :func:`allreduce`.
            process_set: See :func:`allreduce`.
            *tensors: Inputs.

        Returns:
            The reduced tensors.
        """
        ctx.call = (op, prescale_factor, postscale_factor, process_set)
        return _grouped(
            list(tensors), False, name, op, prescale_factor, postscale_factor, process_set, True, tuple
        ).wait()

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> Any:
        """Reduce the gradients by the same operation.

        Args:
            ctx: The context of autograd.
            *grad_output: Gradients of the outputs.

        Returns:
            ``None`` for other arguments, and the gradients of the inputs.
        """
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
    """Reduce several tensors as :func:`allreduce`: all run together or none does.

    Args:
        tensors: Inputs; same number, shapes and types on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        compression: Type in which the tensor travels, a member of ``Compression``.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.

    Returns:
        New tensors of the same shapes and types.

    Raises:
        ValueError: An argument is not acceptable, or the name is in use.
        HorovodInternalError: Ranks disagree, or a rank has ended.
    """
    op = handle_average_backwards_compatibility(op, average)
    if not tensors:
        return []
    small, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = HorovodGroupedAllreduce.apply(None, name, op, prescale_factor, postscale_factor, process_set, *small)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]
