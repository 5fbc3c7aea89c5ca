"""Collectives with compression, and for ``tf.IndexedSlices``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Sum,
    _allreduce,
    _grouped_allreduce,
    _grouped_reducescatter,
    _number,
    _reducescatter,
    allgather,
    handle_average_backwards_compatibility,
    size_op,
)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over the ranks of a process set; differentiable.

    Args:
        tensor: Same shape and type on all ranks; or ``tf.IndexedSlices``, whose rows are gathered.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which tensors travel, a member of ``Compression``.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        process_set: The ranks that take part.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.

    Returns:
        A tensor of the same shape and type.

    Raises:
        ValueError: An argument is not acceptable.
        NotImplementedError: ``tf.IndexedSlices`` cannot be reduced with this ``op``.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.

    Examples:
        >>> loss = hvd.allreduce(loss)  # the average over the ranks
    """
    op = handle_average_backwards_compatibility(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        _check_sparse(op, prescale_factor, postscale_factor)
        with tf.device(device_sparse):
            return _gathered(tensor, op, name, process_set, ignore_name_scope)
    with tf.device(device_dense):
        small, ctx = compression.compress(tf.convert_to_tensor(tensor))
        factors = prescale_factor, postscale_factor
        reduced = _allreduce(small, name, op, *factors, ignore_name_scope, process_set)
        return compression.decompress(reduced, ctx)


def _check_sparse(op: int, prescale_factor: float, postscale_factor: float) -> None:
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
            "sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Average, Sum):
        raise NotImplementedError("sparse tensors are reduced by Average and Sum only")
    if prescale_factor != 1.0 or postscale_factor != 1.0:
        raise NotImplementedError("prescale_factor and postscale_factor are not supported with sparse tensors")


def _gathered(
    slices: tf.IndexedSlices, op: int, name: str | None, process_set: ProcessSet, ignore_name_scope: bool
) -> tf.IndexedSlices:
    """Return the rows of all ranks; rows that several ranks have are repeated."""
    names = (f"{name}.values", f"{name}.indices") if name else (None, None)
    values = allgather(slices.values, names[0], ignore_name_scope, process_set)
    indices = allgather(slices.indices, names[1], ignore_name_scope, process_set)
    if op == Average:
        ranks = tf.cast(size_op(_number(process_set)), values.dtype)
        # For integers as well: their averages are floats.
        values = values / ranks
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as :func:`allreduce`: the dense ones run together or none does.

    Args:
        tensors: Inputs; same number, shapes and types on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which tensors travel, a member of ``Compression``.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        process_set: The ranks that take part.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.

    Returns:
        One result for each tensor.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    if not tensors:
        return list(tensors)
    op = handle_average_backwards_compatibility(op, average)
    results: list[Any] = list(tensors)
    dense = [place for place, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    if len(dense) < len(results):
        _check_sparse(op, prescale_factor, postscale_factor)
    with tf.device(device_sparse):
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                full = f"{name}_{place + 1}of{len(tensors)}" if name else None
                results[place] = _gathered(tensor, op, full, process_set, ignore_name_scope)
    with tf.device(device_dense):
        small = [compression.compress(tf.convert_to_tensor(tensors[place])) for place in dense]
        factors = prescale_factor, postscale_factor
        sent = [tensor for tensor, _ in small]
        reduced = _grouped_allreduce(sent, name, op, *factors, ignore_name_scope, process_set)
        for place, tensor, (_, ctx) in zip(dense, reduced, small, strict=True):
            results[place] = compression.decompress(tensor, ctx)
    return results


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over the ranks, and give each rank a part of the rows; differentiable.

    The first ranks get one row more if the rows cannot be divided evenly.

    Args:
        tensor: Input of shape ``[rows, ...]``; same shape and type on all ranks.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        compression: Type in which tensors travel, a member of ``Compression``.
        op: ``Average`` or ``Sum``.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        process_set: The ranks that take part.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.

    Returns:
        This rank's rows of the result.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    with tf.device(device_dense):
        small, ctx = compression.compress(_dense(tensor))
        factors = prescale_factor, postscale_factor
        reduced = _reducescatter(small, name, op, ignore_name_scope, process_set, *factors)
        return compression.decompress(reduced, ctx)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors as :func:`reducescatter`: all run together or none does.

    Args:
        tensors: Inputs; same number, shapes and types on all ranks.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        compression: Type in which tensors travel, a member of ``Compression``.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.

    Returns:
        This rank's rows of each result.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    if not tensors:
        return list(tensors)
    with tf.device(device_dense):
        small = [compression.compress(_dense(tensor)) for tensor in tensors]
        factors = prescale_factor, postscale_factor
        reduced = _grouped_reducescatter([tensor for tensor, _ in small], None, op, False, process_set, *factors)
        return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, small, strict=True)]


def _dense(tensor: Any) -> tf.Tensor:
    if isinstance(tensor, tf.IndexedSlices):
        raise NotImplementedError("reducescatter does not support sparse tensors")
    return tf.convert_to_tensor(tensor)
