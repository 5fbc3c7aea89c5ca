"""Accumulators: sums over the microbatches of a step, in variables that exist while the step runs.

An addition inside a called function cannot reuse the memory of an argument, because the caller holds it. It can reuse
that of a variable, so each summand's memory is freed at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

#: Element types that TensorFlow can add to variables on every device.
_TYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_numbers = itertools.count()


class Accumulator:
    """A sum over microbatches in the graph of a step.

    Args:
        tensor: The tensor to add up, in the graph of the trace.
        device: The device of the sum.
    """

    def __init__(self, tensor: tf.Tensor, device: str) -> None:
        self._like, self._device = tensor, device
        with tf.device(device):
            # The variable is shared by all steps, which run one after the other; a failed step's value is replaced by
            # the next.
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tensor.dtype, shape=tensor.shape, shared_name=f"smp_sum_{next(_numbers)}"
            )

    @staticmethod
    def supports(tensor: tf.Tensor) -> bool:
        """Return whether a tensor can be accumulated in a variable."""
        return tensor.dtype in _TYPES and tensor.shape.is_fully_defined()

    def begin(self, after: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Set the sum to zeros after ``after``; return all operations that this needs."""
        with tf.device(self._device), tf.control_dependencies(after):
            # Not `tf.zeros`, which TensorFlow would turn into a constant that keeps its memory.
            zeros = tf.raw_ops.Empty(shape=self._like.shape, dtype=self._like.dtype, init=True)
            return [self._handle.op, zeros.op, tf.raw_ops.AssignVariableOp(resource=self._handle, value=zeros)]

    def add(self, value: tf.Tensor) -> tf.Operation:
        """Add a microbatch's value; may be called in a function."""
        return tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def end(self, after: Sequence[tf.Operation]) -> tuple[tf.Tensor, tf.Operation]:
        """Return the sum after ``after``, and the operation that frees the variable, which the sum then owns alone."""
        with tf.device(self._device):
            with tf.control_dependencies(after):
                value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._like.dtype)
            value.set_shape(self._like.shape)
            with tf.control_dependencies([value]):
                return value, tf.raw_ops.DestroyResourceOp(resource=self._handle)
