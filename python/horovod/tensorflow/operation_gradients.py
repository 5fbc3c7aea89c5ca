"""Gradients of Horovod's operations of TensorFlow. Importing the module registers them with TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from horovod.common.basics import warn_once
from horovod.common.process_sets import _temp_process_set_object
from horovod.tensorflow.mpi_ops import (
    _REDUCTIONS,
    Average,
    Sum,
    _allreduce,
    _grouped_allreduce,
    _number,
    allgather,
    alltoall,
    grouped_allgather,
    rank_op,
    size_op,
)

# isort: split
import tensorflow as tf

for _operation in (
    "HorovodSize",
    "HorovodProcessSetIncluded",
    "HorovodLocalSize",
    "HorovodRank",
    "HorovodLocalRank",
    "HorovodJoin",
    "HorovodBarrier",
):
    tf.no_gradient(_operation)


class _Forward:
    """Return the attributes of an operation that its gradient needs."""

    def __init__(self, operation: Any) -> None:
        self.process_set = _temp_process_set_object(operation.get_attr("process_set_id"))
        self.scope = {"ignore_name_scope": operation.get_attr("ignore_name_scope"), "process_set": self.process_set}

    def size(self, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(size_op(_number(self.process_set)), dtype)


def _factors(operation: Any) -> dict[str, Any]:
    """Return the factor by which the operation multiplies its input."""
    if operation.get_attr("is_scaled"):
        return {"prescale_factor": 1.0, "postscale_factor": 1.0}
    return {
        "prescale_factor": operation.get_attr("prescale_factor"),
        "postscale_factor": operation.get_attr("postscale_factor"),
    }


def _warn_of_gradient(op: int) -> None:
    if op not in (Average, Sum):
        warn_once(
            f"the gradient of an allreduce with op={_REDUCTIONS[op]} is the same operation on the gradient, "
            "as in Horovod"
        )


@tf.RegisterGradient("HorovodAllreduce")
def _allreduce_gradient(operation: Any, gradient: tf.Tensor) -> tf.Tensor:
    op = operation.get_attr("reduce_op")
    _warn_of_gradient(op)
    return _allreduce(gradient, op=op, **_factors(operation), **_Forward(operation).scope)


@tf.RegisterGradient("HorovodGroupedAllreduce")
def _grouped_allreduce_gradient(operation: Any, *gradients: tf.Tensor) -> list[tf.Tensor]:
    op = operation.get_attr("reduce_op")
    _warn_of_gradient(op)
    # Integer tensors have no gradients.
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    options = {**_factors(operation), **_Forward(operation).scope}
    reduced = _grouped_allreduce([gradients[place] for place in places], op=op, **options)
    by_place = dict(zip(places, reduced, strict=True))
    return [by_place.get(place) for place in range(len(gradients))]


def _own_rows(inputs: Sequence[tf.Tensor], averages: Sequence[tf.Tensor], forward: _Forward) -> list[tf.Tensor]:
    """Return this rank's part of the gradient of gathered `inputs`."""
    heights = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in inputs])[tf.newaxis]
    gathered = allgather(heights, **forward.scope)
    place = tf.cast(rank_op(), tf.int64)
    if _number(forward.process_set) != 0:
        place = tf.constant(forward.process_set.rank(), tf.int64)
    starts = tf.cumsum(gathered, exclusive=True)
    own = []
    for index, (tensor, average) in enumerate(zip(inputs, averages, strict=True)):
        start = starts[place, index]
        rows = average[start : start + gathered[place, index]]
        own.append(tf.ensure_shape(rows, tensor.shape))
    return own


@tf.RegisterGradient("HorovodAllgather")
def _allgather_gradient(operation: Any, gradient: tf.Tensor) -> tf.Tensor:
    forward = _Forward(operation)
    return _own_rows(operation.inputs, [_allreduce(gradient, op=Average, **forward.scope)], forward)[0]


@tf.RegisterGradient("HorovodGroupedAllgather")
def _grouped_allgather_gradient(operation: Any, *gradients: tf.Tensor) -> list[tf.Tensor]:
    forward = _Forward(operation)
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    averages = _grouped_allreduce([gradients[place] for place in places], op=Average, **forward.scope)
    own = _own_rows([operation.inputs[place] for place in places], averages, forward)
    by_place = dict(zip(places, own, strict=True))
    return [by_place.get(place) for place in range(len(gradients))]


@tf.RegisterGradient("HorovodBroadcast")
def _broadcast_gradient(operation: Any, gradient: tf.Tensor) -> tf.Tensor:
    average = _allreduce(gradient, op=Average, **_Forward(operation).scope)
    is_root = tf.equal(rank_op(), operation.get_attr("root_rank"))
    # Not multiplied by zero, which would keep NaN.
    return tf.where(is_root, average, tf.zeros_like(average))


@tf.RegisterGradient("HorovodAlltoall")
def _alltoall_gradient(operation: Any, gradient: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor | None]:
    back, _ = alltoall(gradient, splits=operation.outputs[1], **_Forward(operation).scope)
    # Rows beyond the splits were sent to no rank.
    missing = tf.shape(operation.inputs[0])[0] - tf.shape(back)[0]
    paddings = tf.concat([[[0, missing]], tf.zeros([tf.rank(back) - 1, 2], tf.int32)], 0)
    return [tf.ensure_shape(tf.pad(back, paddings), operation.inputs[0].shape), None]


def _scattered(operation: Any, gradient: tf.Tensor, forward: _Forward) -> tf.Tensor:
    scale = math.prod(_factors(operation).values())
    if operation.get_attr("reduce_op") == Sum:
        gradient = gradient * forward.size(gradient.dtype)
    return gradient * tf.cast(scale, gradient.dtype) if scale != 1 else gradient


@tf.RegisterGradient("HorovodReducescatter")
def _reducescatter_gradient(operation: Any, gradient: tf.Tensor) -> tf.Tensor:
    forward = _Forward(operation)
    return _scattered(operation, allgather(gradient, **forward.scope), forward)


@tf.RegisterGradient("HorovodGroupedReducescatter")
def _grouped_reducescatter_gradient(operation: Any, *gradients: tf.Tensor) -> list[tf.Tensor]:
    forward = _Forward(operation)
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    gathered = grouped_allgather([gradients[place] for place in places], **forward.scope)
    by_place = {
        place: _scattered(operation, gradient, forward) for place, gradient in zip(places, gathered, strict=True)
    }
    return [by_place.get(place) for place in range(len(gradients))]
