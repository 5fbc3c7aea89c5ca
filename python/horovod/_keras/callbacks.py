"""The engine of the callbacks for TensorFlow: functions for variables, and collectives."""

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
    HAS_DEVICES = True
    rank, size = staticmethod(mpi_ops.rank), staticmethod(mpi_ops.size)
    variables_of = staticmethod(variables_of)

    @staticmethod
    def is_variable(one: Any) -> bool:
        """Return whether an object is a variable.

        Args:
            one: The object.

        Returns:
            ``True`` if an object is a variable.
        """
        return isinstance(underlying(one), tf.Variable)

    @staticmethod
    def key(variable: Any) -> Any:
        """Return a key of a variable, for sets.

        Args:
            variable: The variable.

        Returns:
            The key.
        """
        return underlying(variable).ref()

    @staticmethod
    def describe(variable: tf.Variable) -> Any:
        """Return the description of a variable that ranks compare.

        Args:
            variable: The variable.

        Returns:
            Shape and type.
        """
        return variable.shape.as_list(), variable.dtype.name

    @staticmethod
    def number(value: Any) -> float:
        """Return the value of a variable or a number.

        Args:
            value: A variable or a number.

        Returns:
            The value.
        """
        return float(tf.convert_to_tensor(underlying(value)))

    @staticmethod
    def gather(one: Any, name: str) -> list[Any]:
        """Return the objects of all ranks.

        Args:
            one: This rank's object.
            name: Matches the ranks' calls: the same on all ranks.

        Returns:
            The objects in the order of ranks.
        """
        return allgather_object(one, name=name)

    @staticmethod
    def broadcast(variables: Sequence[tf.Variable], root_rank: int, device: str) -> None:
        """Broadcast the root's values to all ranks.

        Args:
            variables: The variables.
            root_rank: Rank in the world whose values are sent.
            device: Device from which values are sent; by default TensorFlow chooses.
        """
        with tf.device(device):
            broadcast_variables(variables, root_rank)

    @staticmethod
    def average(values: Sequence[float], name: str, device: str) -> Any:
        """Return averages over the ranks.

        Args:
            values: This rank's numbers.
            name: Matches the ranks' calls: the same on all ranks.
            device: Device on which they are averaged; by default TensorFlow chooses.

        Returns:
            The averages.
        """
        with tf.device(device):
            return mpi_ops._allreduce(tf.constant(values, tf.float64), name, mpi_ops.Average).numpy()

    @staticmethod
    def scale_velocities(optimizer: Any, ratio: float) -> None:
        """Multiply the sums of an optimizer's momentum.

        Args:
            optimizer: The optimizer.
            ratio: The factor.
        """
        for velocity in velocities(optimizer):
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))


class BroadcastGlobalVariablesCallbackImpl(_impl.BroadcastGlobalVariablesCallbackImpl):
    """The callback's methods on TensorFlow."""

    engine = Engine


class MetricAverageCallbackImpl(_impl.MetricAverageCallbackImpl):
    """The callback's methods on TensorFlow."""

    engine = Engine


class LearningRateScheduleCallbackImpl(_impl.LearningRateScheduleCallbackImpl):
    """The callback's methods on TensorFlow."""

    engine = Engine


class LearningRateWarmupCallbackImpl(_impl.LearningRateWarmupCallbackImpl):
    """The callback's methods on TensorFlow."""

    engine = Engine


def define(keras: Any, module: str) -> SimpleNamespace:
    """Define the callbacks for a Keras package on TensorFlow, as ``horovod.common.keras_callbacks.define``.

    Args:
        keras: The package.
        module: Module that the classes belong to.

    Returns:
        The classes.
    """
    return _impl.define(keras, module, Engine)
