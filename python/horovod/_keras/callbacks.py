"""Callbacks for ``model.fit`` on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from horovod.common import keras_callbacks as _impl
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.functions import allgather_object, broadcast_variables
from smdistributed.dataparallel.tensorflow.keras.callbacks import variables_of, velocities
from smdistributed.dataparallel.tensorflow.keras_variable import underlying


class Engine:
    """Variables of TensorFlow, and of Keras on it."""

    VARIABLE = "tf.Variable"
    rank, size = staticmethod(mpi_ops.rank), staticmethod(mpi_ops.size)
    variables_of = staticmethod(variables_of)

    @staticmethod
    def is_variable(one: Any) -> bool:
        """Whether it is one."""
        return isinstance(underlying(one), tf.Variable)

    @staticmethod
    def key(variable: Any) -> Any:
        """What stands for it in sets."""
        return underlying(variable).ref()

    @staticmethod
    def describe(variable: tf.Variable) -> Any:
        """What ranks compare."""
        return variable.shape.as_list(), variable.dtype.name

    @staticmethod
    def number(value: Any) -> float:
        """Of a variable, or a number."""
        return float(tf.convert_to_tensor(underlying(value)))

    @staticmethod
    def gather(one: Any, name: str) -> list[Any]:
        """The objects of all ranks."""
        return allgather_object(one, name=name)

    @staticmethod
    def broadcast(variables: Sequence[tf.Variable], root_rank: int, device: str) -> None:
        """Gives all ranks the root's values."""
        with tf.device(device):
            broadcast_variables(variables, root_rank)

    @staticmethod
    def average(values: Sequence[float], name: str, device: str) -> Any:
        """Over the ranks."""
        with tf.device(device):
            return mpi_ops._allreduce(tf.constant(values, tf.float64), name, mpi_ops.Average).numpy()

    @staticmethod
    def scale_velocities(optimizer: Any, ratio: float) -> None:
        """Multiplies what momentum has summed."""
        for velocity in velocities(optimizer):
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))


class BroadcastGlobalVariablesCallbackImpl(_impl.BroadcastGlobalVariablesCallbackImpl):
    engine = Engine


class MetricAverageCallbackImpl(_impl.MetricAverageCallbackImpl):
    engine = Engine


class LearningRateScheduleCallbackImpl(_impl.LearningRateScheduleCallbackImpl):
    engine = Engine


class LearningRateWarmupCallbackImpl(_impl.LearningRateWarmupCallbackImpl):
    engine = Engine


def define(keras: Any, module: str) -> SimpleNamespace:
    """As ``horovod.common.keras_callbacks.define``."""
    return _impl.define(keras, module, Engine)
