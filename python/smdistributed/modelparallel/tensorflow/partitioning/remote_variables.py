"""Variables of other partitions: their objects exist on this rank, without memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import become_plain, handle_of

#: The shape of a remote variable's memory: no elements.
_EMPTY = (0,)


class RemoteVariable(resource_variable_ops.ResourceVariable):
    """A variable of another partition. Assignments of values for the whole model are checked and ignored."""

    #: The value that reads return while this rank writes the whole model.
    _smp_read_value: tf.Tensor | None = None

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if self._smp_read_value is not None and tf.executing_eagerly():
            return self._smp_read_value
        return super()._read_variable_op(no_copy)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the shape of ``value`` in eager code; the placeholder that a read returns is accepted.

        In a graph, add the assignment, which runs on the rank that holds the variable.
        """
        if not tf.executing_eagerly():
            return super().assign(value, *args, **kwargs)
        shape = tf.convert_to_tensor(value).shape
        if shape != _EMPTY:
            self.shape.assert_is_compatible_with(shape)
        return self


def make_remote(variable: Any) -> None:
    """Make a variable remote. It keeps its handle, to which functions that were traced before refer."""
    inner = _inmost(variable)
    become_plain(inner)
    empty(inner)
    if isinstance(inner, resource_variable_ops.BaseResourceVariable):
        # The change of class takes effect at once, also while a `tf.function` is traced.
        inner.__class__ = RemoteVariable


def set_read_value(variable: Any, value: Any) -> None:
    """Set the value that reads of a remote variable return.

    It is kept in host memory, because the device's may not suffice.
    """
    with tf.init_scope(), tf.device("/device:CPU:0"):
        _inmost(variable)._smp_read_value = tf.convert_to_tensor(value)


def clear_read_value(variable: Any) -> None:
    """Clear the value that reads return."""
    _inmost(variable).__dict__.pop("_smp_read_value", None)


def as_remote(trackable: Any) -> RemoteVariable | None:
    """Return the remote variable that ``trackable`` is or wraps, else ``None``."""
    inner = _inmost(trackable)
    return inner if isinstance(inner, RemoteVariable) else None


def _inmost(variable: Any) -> Any:
    inner = underlying(variable)
    # tf_keras wraps variables for mixed precision.
    return getattr(inner, "_variable", inner)


def empty(variable: Any) -> None:
    """Free a variable's memory, bypassing TensorFlow's functions, which reject another shape."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=handle_of(variable), value=tf.zeros(_EMPTY, underlying(variable).dtype))
