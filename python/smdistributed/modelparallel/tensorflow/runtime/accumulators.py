"""Accumulators: sums over the microbatches of a step, in variables that exist while the step runs.

An addition inside a called function cannot reuse the memory of an argument, because the caller holds it. It can reuse a
variable's, so each summand is freed at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

#: What TensorFlow adds to variables on every device.
_TYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_numbers = itertools.count()


class Accumulator:
    """A sum over microbatches, in the graph of a step.

    Args:
        tensor: What is added up, in the graph of the trace.
        device: Where.
    """

    def __init__(self, tensor: tf.Tensor, device: str) -> None:
        self._like, self._device = tensor, device
        with tf.device(device):
            # Steps run one after the other; one that has failed may have left a value, which the next one replaces.
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tensor.dtype, shape=tensor.shape, shared_name=f"smp_sum_{next(_numbers)}"
            )

    @staticmethod
    def supports(tensor: tf.Tensor) -> bool:
        """Whether a tensor can be added up so."""
        return tensor.dtype in _TYPES and tensor.shape.is_fully_defined()

    def begin(self, after: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Makes zeros, once ``after`` have ended; returns all operations that this takes."""
        with tf.device(self._device), tf.control_dependencies(after):
            # TensorFlow would make a constant of other zeros, which stays.
            zeros = tf.raw_ops.Empty(shape=self._like.shape, dtype=self._like.dtype, init=True)
            return [self._handle.op, zeros.op, tf.raw_ops.AssignVariableOp(resource=self._handle, value=zeros)]

    def add(self, value: tf.Tensor) -> tf.Operation:
        """Adds a microbatch's value, also in a function."""
        return tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def end(self, after: Sequence[tf.Operation]) -> tuple[tf.Tensor, tf.Operation]:
        """The sum, once ``after`` have ended, and what frees the variable, whose memory it then has for itself."""
        with tf.device(self._device):
            with tf.control_dependencies(after):
                value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._like.dtype)
            value.set_shape(self._like.shape)
            with tf.control_dependencies([value]):
                return value, tf.raw_ops.DestroyResourceOp(resource=self._handle)
