"""Variables of other partitions: they stay, and take no memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.delayed import become_plain, handle_of

#: The shape of what it holds.
_EMPTY = (0,)


class AbsentVariable(resource_variable_ops.ResourceVariable):
    """A variable of another partition. What gives all variables of the model values gives it one, too, which it does not take."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares shapes, unless it gets back what it is read as; in a graph, which the rank that has it runs, an assignment."""
        if not tf.executing_eagerly():
            return super().assign(value, *args, **kwargs)
        shape = tf.convert_to_tensor(value).shape
        if shape != _EMPTY:
            self.shape.assert_is_compatible_with(shape)
        return self

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        (value,) = restored_tensors.values()
        return self.assign(value)


def leave(variable: Any) -> None:
    """A variable belongs to another partition. It keeps its handle: functions that were traced before have that."""
    inner = underlying(variable)
    # What tf_keras wraps it in for mixed precision.
    inner = getattr(inner, "_variable", inner)
    become_plain(inner)
    empty(inner)
    if isinstance(inner, resource_variable_ops.BaseResourceVariable):
        # Also what is made while a `tf.function` is traced.
        inner.__class__ = AbsentVariable


def empty(variable: Any) -> None:
    """Frees a variable's memory; TensorFlow's own ways would refuse another shape."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=handle_of(variable), value=tf.zeros(_EMPTY, underlying(variable).dtype))
