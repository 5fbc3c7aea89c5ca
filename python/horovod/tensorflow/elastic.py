"""Elastic training, which continues when workers fail or join: ``hvd.elastic``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_object, broadcast_object_fn, broadcast_variables
from horovod.tensorflow.gradient_aggregation import forget_sums
from horovod.tensorflow.mpi_ops import init, rank, shutdown
from smdistributed._common.errors import from_report
from smdistributed.dataparallel.tensorflow.keras_variable import underlying

# The job may continue after these TensorFlow errors if one of our operations caused them.
_MAY_PASS = (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.InternalError, tf.errors.CancelledError)
_OURS = ("Horovod", "Smd", "smd:")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it continues after workers fail, leave or join.

    The function's first argument is a state. After a worker has failed, the function is called again with the state of
    the last commit. After hosts have joined or left, it is called again with the current state.

    Args:
        func: The training function.

    Returns:
        The decorated function, which returns what ``func`` returns.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, 10):
        ...         train_epoch(state.model)
        ...         state.commit()
        >>> train(hvd.elastic.TensorFlowKerasState(model, epoch=0))
    """
    return run_fn(func, _reset, _translated)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _MAY_PASS as error:
        text = str(error)
        if from_report(text) is None and not any(mark in text for mark in _OURS):
            raise
        raise HorovodInternalError(text) from error


def _reset() -> None:
    shutdown()
    init()


def _graph_broadcast(session: Any) -> Callable[..., Any]:
    """Return `broadcast_object` for a graph of TensorFlow 1, whose operations are created once for each root."""

    @functools.cache
    def broadcast_from(root_rank: int) -> Callable[[Any], Any]:
        return broadcast_object_fn(root_rank, session, f"broadcast_object_fn.{root_rank}")

    # Created now, because a session may finalize the graph.
    broadcast_from(0)
    return lambda obj, root_rank=0: broadcast_from(root_rank)(obj)


class TensorFlowState(ObjectState):
    """The state of a training on variables.

    When it is restored or synchronized, distributed optimizers drop the gradients that they have summed for
    ``backward_passes_per_step``: ranks begin the next step together.

    Args:
        variables: All variables; in a graph of TensorFlow 1 its global variables by default.
        session: Session for a graph of TensorFlow 1; the default session by default.
        **kwargs: Plain objects such as ``epoch=0``, which become attributes.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session
        self._values: list[np.ndarray] = []
        eager = tf.executing_eagerly()
        bcast = broadcast_object if eager else _graph_broadcast(session)
        self._assign: tuple[list[tf.Tensor], tf.Operation] | None = None
        self._broadcast: tf.Operation | None = None
        super().__init__(bcast_object=bcast, get_rank=rank, **kwargs)
        self._save_variables()

    def save(self) -> None:
        """Keep variables and objects in memory."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Return to the saved state."""
        self._restore_variables()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's state, and save it."""
        self._forget_sums()
        if tf.executing_eagerly():
            broadcast_variables(self.variables, root_rank=0)
        else:
            if self._broadcast is None:
                self._broadcast = broadcast_variables(self.variables, root_rank=0)
            self._session().run(self._broadcast)
        self._save_variables()
        super().sync()

    def _committed_state(self) -> Any:
        return self._values, super()._committed_state()

    def _restore_saved(self, saved: Any) -> None:
        self._values, objects = saved
        self._restore_variables()
        super()._restore_saved(objects)

    def _session(self) -> Any:
        return self.session or tf.compat.v1.get_default_session()

    def _save_variables(self) -> None:
        if tf.executing_eagerly():
            self._values = [np.array(underlying(variable).numpy()) for variable in self.variables]
        else:
            self._values = self._session().run(self.variables)

    def _forget_sums(self) -> None:
        forget_sums(None if tf.executing_eagerly() else self._session())

    def _restore_variables(self) -> None:
        self._forget_sums()
        if tf.executing_eagerly():
            for variable, value in zip(self.variables, self._values, strict=True):
                underlying(variable).assign(value)
            return
        if self._assign is None:
            inputs = [tf.compat.v1.placeholder(variable.dtype.base_dtype) for variable in self.variables]
            pairs = zip(self.variables, inputs, strict=True)
            self._assign = inputs, tf.group(*(variable.assign(value) for variable, value in pairs))
        inputs, assign = self._assign
        self._session().run(assign, dict(zip(inputs, self._values, strict=True)))


class TensorFlowKerasState(ObjectState):
    """The state of a training on a Keras model.

    It drops sums of ``backward_passes_per_step`` as :class:`TensorFlowState` does.

    Args:
        model: The model, built.
        optimizer: The optimizer; by default the model's.
        backend: Ignored.
        **kwargs: Plain objects such as ``epoch=0, batch=0``, which become attributes.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and hasattr(self.optimizer, "build"):
            # Creates the optimizer's variables, so that all ranks have the same ones at any point of the training.
            self.optimizer.build(model.trainable_variables)
        self._values: list[np.ndarray] = []
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_model()

    def save(self) -> None:
        """Keep model, optimizer and objects in memory."""
        self._save_model()
        super().save()

    def restore(self) -> None:
        """Return to the saved state."""
        self._restore_model()
        super().restore()

    def _restore_model(self) -> None:
        forget_sums()
        variables = self._variables()
        for variable, value in zip(variables, self._values, strict=False):
            underlying(variable).assign(value)
        for variable in variables[len(self._values) :]:
            # The variable was created after the commit.
            underlying(variable).assign(tf.zeros_like(underlying(variable)))

    def _committed_state(self) -> Any:
        return self._values, super()._committed_state()

    def _restore_saved(self, saved: Any) -> None:
        self._values, objects = saved
        self._restore_model()
        super()._restore_saved(objects)

    def sync(self) -> None:
        """Take over rank 0's state, and save it."""
        forget_sums()
        broadcast_variables(self._variables(), root_rank=0)
        self._save_model()
        super().sync()

    def _variables(self) -> list[Any]:
        own = [] if self.optimizer is None else self.optimizer.variables
        return [*self.model.variables, *(own() if callable(own) and not isinstance(own, list) else own)]

    def _save_model(self) -> None:
        self._values = [np.array(underlying(variable).numpy()) for variable in self._variables()]
