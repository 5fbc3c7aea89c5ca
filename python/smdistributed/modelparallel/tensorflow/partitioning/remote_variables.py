"""Variables of other partitions: the objects stay, without memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import become_plain, handle_of

#: The shape of a remote variable's memory.
_EMPTY = (0,)


class RemoteVariable(resource_variable_ops.ResourceVariable):
    """A variable of another partition. Assignments of values for the whole model are checked and ignored."""

    #: What it is read as while this rank writes the whole model.
    _smp_read_value: tf.Tensor | None = None

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if self._smp_read_value is not None and tf.executing_eagerly():
            return self._smp_read_value
        return super()._read_variable_op(no_copy)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks the shape of ``value`` in eager code; the placeholder that a read returns passes.

        In a graph, adds the assignment, which runs on the rank that holds the variable.
        """
        if not tf.executing_eagerly():
            return super().assign(value, *args, **kwargs)
        shape = tf.convert_to_tensor(value).shape
        if shape != _EMPTY:
            self.shape.assert_is_compatible_with(shape)
        return self


def make_remote(variable: Any) -> None:
    """Makes a variable remote. It keeps its handle, which functions that were traced before refer to."""
    inner = _inmost(variable)
    become_plain(inner)
    empty(inner)
    if isinstance(inner, resource_variable_ops.BaseResourceVariable):
        # Also what is made while a `tf.function` is traced.
        inner.__class__ = RemoteVariable


def set_read_value(variable: Any, value: Any) -> None:
    """Sets the value that reads of a remote variable return.

    It stays in host memory, since the device may have no room.
    """
    with tf.init_scope(), tf.device("/device:CPU:0"):
        _inmost(variable)._smp_read_value = tf.convert_to_tensor(value)


def clear_read_value(variable: Any) -> None:
    """Clears the value that reads return."""
    _inmost(variable).__dict__.pop("_smp_read_value", None)


def as_remote(trackable: Any) -> RemoteVariable | None:
    """Returns the remote variable that ``trackable`` is or stands for, else ``None``."""
    inner = _inmost(trackable)
    return inner if isinstance(inner, RemoteVariable) else None


def _inmost(variable: Any) -> Any:
    inner = underlying(variable)
    # What tf_keras wraps it in for mixed precision.
    return getattr(inner, "_variable", inner)


def empty(variable: Any) -> None:
    """Frees a variable's memory; TensorFlow's own ways would refuse another shape."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=handle_of(variable), value=tf.zeros(_EMPTY, underlying(variable).dtype))
