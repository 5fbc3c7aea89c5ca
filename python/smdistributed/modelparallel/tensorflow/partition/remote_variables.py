"""Variables of other partitions: they stay, and take no memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.partition.delayed_initialization import become_plain, handle_of

#: The shape of what it holds.
_EMPTY = (0,)


class AbsentVariable(resource_variable_ops.ResourceVariable):
    """A variable of another partition. What gives all variables of the model values gives it one, too, which it does not take."""

    #: What it is read as while this rank writes the whole model.
    _smp_held: tf.Tensor | None = None

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if self._smp_held is not None and tf.executing_eagerly():
            return self._smp_held
        return super()._read_variable_op(no_copy)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Compares shapes, unless it gets back what it is read as; in a graph, which the rank that has it runs, an assignment."""
        if not tf.executing_eagerly():
            return super().assign(value, *args, **kwargs)
        shape = tf.convert_to_tensor(value).shape
        if shape != _EMPTY:
            self.shape.assert_is_compatible_with(shape)
        return self


def leave(variable: Any) -> None:
    """A variable belongs to another partition. It keeps its handle: functions that were traced before have that."""
    inner = _inmost(variable)
    become_plain(inner)
    empty(inner)
    if isinstance(inner, resource_variable_ops.BaseResourceVariable):
        # Also what is made while a `tf.function` is traced.
        inner.__class__ = AbsentVariable


def hold(variable: Any, value: Any) -> None:
    """Has a variable of another partition read as ``value``, which stays in the memory of this host, as its device may have no room."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        _inmost(variable)._smp_held = tf.convert_to_tensor(value)


def release(variable: Any) -> None:
    """Forgets what it was read as."""
    _inmost(variable).__dict__.pop("_smp_held", None)


def elsewhere(trackable: Any) -> AbsentVariable | None:
    """The variable that ``trackable`` is or stands for, if that is another partition's."""
    inner = _inmost(trackable)
    return inner if isinstance(inner, AbsentVariable) else None


def _inmost(variable: Any) -> Any:
    inner = underlying(variable)
    # What tf_keras wraps it in for mixed precision.
    return getattr(inner, "_variable", inner)


def empty(variable: Any) -> None:
    """Frees a variable's memory; TensorFlow's own ways would refuse another shape."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=handle_of(variable), value=tf.zeros(_EMPTY, underlying(variable).dtype))
