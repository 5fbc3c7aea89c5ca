"""Batch normalization over the batches of all ranks.

In Keras 3 and in tf_keras, one method of the layer computes the moments of a batch from the input and the axes. The
layers here override it.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from horovod.tensorflow.mpi_ops import Sum, _allreduce, size


def _synchronized(mean: tf.Tensor, variance: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the moments over all ranks; each mean of this rank is over `count` values."""
    wide = tf.cast(mean, tf.float32) if mean.dtype in (tf.float16, tf.bfloat16) else mean
    spread = tf.cast(variance, wide.dtype)
    count = tf.cast(count, wide.dtype)
    # One collective for the sums, the sums of squares, and the number of values.
    sums = tf.concat(
        [tf.reshape(wide * count, [-1]), tf.reshape((spread + wide * wide) * count, [-1]), tf.reshape(count, [1])], 0
    )
    sums = _allreduce(sums, op=Sum, name="sync_batch_norm")
    total = tf.maximum(sums[-1], 1)
    first, second = tf.split(sums[:-1] / total, 2)
    global_mean = tf.reshape(first, tf.shape(mean))
    global_variance = tf.maximum(tf.reshape(second, tf.shape(mean)) - global_mean * global_mean, 0)
    return tf.cast(global_mean, mean.dtype), tf.cast(global_variance, variance.dtype)


def _count(inputs: Any, axes: Any, mask: Any = None) -> tf.Tensor:
    """Return the number of values of each mean."""
    if mask is not None:
        shape = tf.shape(inputs)
        others = [axis for axis in axes if axis >= len(mask.shape)]
        rest = tf.reduce_prod(tf.gather(shape, others)) if others else 1
        return tf.reduce_sum(tf.cast(mask, tf.int32)) * rest
    return tf.reduce_prod(tf.gather(tf.shape(inputs), list(axes)))


_DOC = """Batch normalization whose moments are those of all ranks' batches, each value with the same weight.

Args:
    fused: ``False``.
    **kwargs: Those of Keras's ``BatchNormalization``.

Raises:
    ValueError: `fused` is something else.
"""


def _of_keras3(base: type) -> type:
    class SyncBatchNormalization(base):
        __doc__ = _DOC

        def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
            _check(fused)
            super().__init__(**kwargs)

        def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
            mean, variance = super()._moments(inputs, mask)
            if size() == 1:
                return mean, variance
            axes = [axis for axis in range(len(inputs.shape)) if axis != self.axis % len(inputs.shape)]
            return _synchronized(mean, variance, _count(inputs, axes, mask))

    return SyncBatchNormalization


def _of_tf_keras(base: type) -> type:
    class SyncBatchNormalization(base):
        __doc__ = _DOC

        def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
            _check(fused)
            super().__init__(fused=False, **kwargs)

        def _calculate_mean_and_var(
            self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
        ) -> tuple[tf.Tensor, tf.Tensor]:
            mean, variance = super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask=mask)
            if size() == 1:
                return mean, variance
            return _synchronized(mean, variance, _count(inputs, reduction_axes, mask))

    return SyncBatchNormalization


def _check(fused: bool | None) -> None:
    if fused in (True, None):
        raise ValueError("SyncBatchNormalization does not support fused=True.")


@functools.cache
def layer_class(base: type) -> type:
    """Return the layer of this module for a Keras package.

    Args:
        base: Its ordinary layer of batch normalization.

    Returns:
        A subclass of it.
    """
    return _of_tf_keras(base) if hasattr(base, "_calculate_mean_and_var") else _of_keras3(base)


def __getattr__(name: str) -> Any:
    # The layer of `tf.keras`, which is imported on first use.
    if name == "SyncBatchNormalization":
        return layer_class(tf.keras.layers.BatchNormalization)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
