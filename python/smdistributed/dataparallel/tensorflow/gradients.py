"""Gradients of the collectives.

A loss that depends on a collective's result on any rank depends on the inputs of all ranks. The gradient of an input
is that of the sum of all ranks' losses, so a backward pass calls collectives too, and every rank has to run it. The
gradients consist of differentiable operations, so derivatives of any order work.

========================  =============================================================================
operation                 gradient of this rank's input
========================  =============================================================================
all_reduce                the gradients of all ranks' outputs, reduced alike (sum, average)
reduce                    the root's, everywhere; divided by the number of ranks for an average
broadcast                 on the root, the sum of all ranks'; zeros elsewhere
all_gather                its own rows of the sum of all ranks'
reduce_scatter            the ranks' gradients, gathered; divided by the number of ranks for an average
all_to_all                sent back from where the rows came
========================  =============================================================================

The gradient of a minimum or maximum goes to the elements that attained it, in equal parts if several did. That of a
product is the product of the other ranks' elements. Bit operations are for types that have no gradients.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed._common import shims

_ops = shims.load_tensorflow()

for _name in ("SmdRank", "SmdSize", "SmdSessionId", "SmdBarrier"):
    tf.no_gradient(_name)


@tf.RegisterGradient("SmdAllReduce")
def _all_reduce(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    reduction, group = _reduction(op), op.get_attr("group")
    if reduction in ("sum", "average"):
        return _ops.smd_all_reduce(tensor=gradient, op=reduction, group=group)
    if reduction in ("min", "max"):
        attained = tf.cast(tf.equal(op.inputs[0], op.outputs[0]), gradient.dtype)
        total, count = _ops.smd_grouped_all_reduce(tensors=[gradient, attained], op="sum", group=group)
        return tf.math.divide_no_nan(total * attained, count)
    total = _ops.smd_all_reduce(tensor=gradient, op="sum", group=group)
    return total * _product_of_the_others(op.inputs[0], group)


@tf.RegisterGradient("SmdNamedAllReduce")
def _named_all_reduce(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    # All ranks must call collectives in the same order in a backward pass.
    return [_all_reduce(op, gradient), *[None] * (len(op.inputs) - 1)]


@tf.RegisterGradient("SmdGroupedAllReduce")
def _grouped_all_reduce(op: Any, *gradients: tf.Tensor) -> list[tf.Tensor]:
    reduction, group = _reduction(op), op.get_attr("group")
    if reduction in ("sum", "average"):
        # Integers among the tensors have no gradients.
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        tensors = [gradients[i] for i in places]
        reduced = _ops.smd_grouped_all_reduce(tensors=tensors, op=reduction, group=group) if tensors else []
        by_place = dict(zip(places, reduced, strict=True))
        return [by_place.get(i) for i in range(len(gradients))]
    raise LookupError(
        f"a grouped all-reduce has gradients for sum and average, not for {reduction}: reduce the tensors one by one"
    )


@tf.RegisterGradient("SmdReduce")
def _reduce(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    reduction, group = _reduction(op), op.get_attr("group")
    if reduction not in ("sum", "average"):
        raise LookupError(f"a reduce has gradients for sum and average, not for {reduction}: use an all-reduce")
    gradient = _ops.smd_broadcast(tensor=gradient, root=op.get_attr("root"), group=group)
    return gradient if reduction == "sum" else gradient / _size(group, gradient.dtype)


@tf.RegisterGradient("SmdBroadcast")
def _broadcast(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    return _ops.smd_reduce(tensor=gradient, op="sum", root=op.get_attr("root"), group=op.get_attr("group"))


@tf.RegisterGradient("SmdNamedBroadcast")
def _named_broadcast(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    return [_broadcast(op, gradient), *[None] * (len(op.inputs) - 1)]


@tf.RegisterGradient("SmdAllGather")
def _all_gather(op: Any, gradient: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    group = op.get_attr("group")
    own = _ops.smd_reduce_scatter(tensor=gradient, rows=op.outputs[1], op="sum", group=group)
    return tf.ensure_shape(own, op.inputs[0].shape)


@tf.RegisterGradient("SmdReduceScatter")
def _reduce_scatter(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    reduction, group = _reduction(op), op.get_attr("group")
    tensor = op.inputs[0]
    everything = _ops.smd_all_gather(tensor=gradient, group=group).output
    everything = tf.ensure_shape(everything, tensor.shape)
    if reduction == "average":
        everything /= _size(group, gradient.dtype)
    elif reduction in ("min", "max"):
        best = _ops.smd_all_gather(tensor=op.outputs[0], group=group).output
        attained = tf.cast(tf.equal(tensor, best), gradient.dtype)
        count = _ops.smd_all_reduce(tensor=attained, op="sum", group=group)
        everything = tf.math.divide_no_nan(everything * attained, count)
    elif reduction == "product":
        everything *= _product_of_the_others(tensor, group)
    return [everything, None]


@tf.RegisterGradient("SmdAllToAll")
def _all_to_all(op: Any, gradient: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor | None]:
    equal = op.inputs[1].shape.num_elements() == 0
    splits = op.inputs[1] if equal else op.outputs[1]
    back = _ops.smd_all_to_all(tensor=gradient, splits=splits, group=op.get_attr("group")).output
    return [tf.ensure_shape(back, op.inputs[0].shape), None]


def _reduction(op: Any) -> str:
    return tf.compat.as_str(op.get_attr("op"))


def _size(group: int, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(_ops.smd_size(group=group), dtype)


def _product_of_the_others(tensor: tf.Tensor, group: int) -> tf.Tensor:
    """Return the product of the other ranks' elements, without a division, because elements may be zero."""
    everything = _ops.smd_all_gather(tensor=tensor[tf.newaxis], group=group).output
    before = tf.math.cumprod(everything, axis=0, exclusive=True)
    after = tf.math.cumprod(everything, axis=0, exclusive=True, reverse=True)
    product = (before * after)[_ops.smd_rank(group=group)]
    return tf.math.conj(tf.ensure_shape(product, tensor.shape))
