"""The reduction of a step's gradients: what the tape and the optimizers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed import _core
from smdistributed.dataparallel.bucket_size import bucket_bytes
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name
from smdistributed.dataparallel.tensorflow.collectives import call, ops
from smdistributed.dataparallel.tensorflow.compression import Compression

Gradient = tf.Tensor | tf.IndexedSlices | None


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    *,
    compression: type = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    sparse_as_dense: bool = True,
    bucket_cap_mb: float | None = 25,
    name: str | None = None,
) -> list[Gradient]:
    """Reduces the gradients of one step over the ranks.

    Args:
        gradients: One for each variable: a tensor, ``tf.IndexedSlices``, or ``None``. All ranks have the same kinds,
            shapes and types.
        variables: What they are gradients of, in the same order.
        compression: A member of ``Compression``.
        op: ``AVERAGE``, which ``None`` means too, or ``SUM``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense first; otherwise the ranks' slices are gathered.
        bucket_cap_mb: Most MiB of gradients that are reduced together.
        name: A prefix for the operations in a graph.

    Returns:
        The reduced gradients, in the same order; ``None`` stays ``None``.

    Raises:
        ValueError: ``op`` or ``bucket_cap_mb`` is none of those.
    """
    check_options(op, bucket_cap_mb)
    if len(gradients) != len(variables):
        raise ValueError(f"there are {len(gradients)} gradients of {len(variables)} variables")
    reduced: list[Gradient] = []
    with tf.name_scope(name or "smd_reduce_gradients"):
        for gradient in gradients:
            # Graphs of TF1 have no order but the one that they are told.
            last = [] if tf.executing_eagerly() or not reduced else [_tensor_of(g) for g in reduced if g is not None]
            with tf.control_dependencies(last[-1:]):
                reduced.append(_reduce(gradient, compression, op or ReduceOp.AVERAGE, sparse_as_dense))
    return reduced


def check_options(op: ReduceOp | None, bucket_cap_mb: float | None) -> None:
    """Raises ValueError for what gradients cannot be reduced with."""
    if core_name(op, ReduceOp.AVERAGE) not in ("average", "sum"):
        raise ValueError(f"gradients are reduced by ReduceOp.AVERAGE or ReduceOp.SUM, not by {op}")
    bucket_bytes(bucket_cap_mb)


def _tensor_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _reduce(gradient: Gradient, compression: type, op: ReduceOp, sparse_as_dense: bool) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        if not sparse_as_dense:
            return _gather(gradient, op)
        gradient = tf.convert_to_tensor(gradient)
    sent, ctx = compression.compress(gradient)
    return compression.decompress(call(ops.smd_all_reduce, tensor=sent, op=op.value), ctx)


def _gather(slices: tf.IndexedSlices, op: ReduceOp) -> tf.IndexedSlices:
    """The slices of all ranks, one after the other."""
    rows = tf.shape(slices.indices, out_type=tf.int64)[0]
    counts = call(ops.smd_all_gather, tensor=rows[None])
    longest = tf.reduce_max(counts)
    mine = tf.sequence_mask(counts, longest)
    indices = call(ops.smd_all_gather, tensor=_padded(slices.indices, longest - rows))
    # In the order of calls, which a graph of TF1 has to be told.
    with tf.control_dependencies([] if tf.executing_eagerly() else [indices]):
        values = call(ops.smd_all_gather, tensor=_padded(slices.values, longest - rows))
    mine = tf.reshape(mine, [-1])
    values = tf.boolean_mask(values, mine)
    if op is ReduceOp.AVERAGE:
        values = values / tf.cast(_core.size(), values.dtype)
    return tf.IndexedSlices(values, tf.boolean_mask(indices, mine), slices.dense_shape)


def _padded(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    shape = tf.concat([rows[None], tf.shape(tensor, out_type=tf.int64)[1:]], 0)
    return tf.concat([tensor, tf.zeros(shape, tensor.dtype)], 0)
