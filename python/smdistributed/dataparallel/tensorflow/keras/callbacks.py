"""Callbacks for ``model.fit``, of Keras 3 and of tf_keras alike."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smdistributed._common.training import is_number, warming_up
from smdistributed.dataparallel.exceptions import MismatchError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import oob_allreduce
from smdistributed.dataparallel.tensorflow.job import rank, size
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.variables import broadcast_variables

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class _Callback:
    """The methods that both Keras packages call on a callback, independent of its base class.

    So one class serves both, and importing this module imports neither.
    """

    model: Any = None
    params: dict[str, Any]

    def __init__(self) -> None:
        self.params = {}

    def set_model(self, model: Any) -> None:
        """Set the model; called by Keras."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Set the parameters of the training (`epochs`, `steps`, `verbose`); called by Keras."""
        self.params = params

    def _implements_train_batch_hooks(self) -> bool:
        names = ("on_train_batch_begin", "on_train_batch_end")
        return any(getattr(type(self), name) is not getattr(_Callback, name) for name in names)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        # Events that a callback does not handle.
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing."""


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Ignore an event."""


# Keras checks this attribute to decide whether the end of a batch must be awaited.
_events: tuple[Any, ...] = (_Callback.on_train_batch_begin, _Callback.on_train_batch_end, _nothing)
for _event in _events:
    _event._is_default = True


def _warn_of_device(callback: _Callback, device: str) -> None:
    if device:
        text = f"`device` of {type(callback).__name__} has no effect: values are sent from the device on which they are"
        warnings.warn(text, stacklevel=3)


class BroadcastGlobalVariablesCallback(_Callback):
    """Broadcast the model's and the optimizer's variables of one rank to all ranks, once.

    Variables that exist before the first batch are broadcast then. All variables are broadcast at the end of the first
    batch, because layers and optimizers create variables when they see their first batch.

    Args:
        root_rank: Global rank whose values are sent.
        device: Ignored with a warning: values are sent from the device on which they are.
        local_variables: A variable or a list of variables that keep each rank's own values.

    Raises:
        ValueError: ``local_variables`` is something else.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        _warn_of_device(self, device)
        self.root_rank = root_rank
        self._done = False
        if local_variables is None:
            local_variables = []
        elif isinstance(underlying(local_variables), tf.Variable):
            local_variables = [local_variables]
        self._local = [underlying(variable) for variable in local_variables]
        if not all(isinstance(variable, tf.Variable) for variable in self._local):
            raise ValueError(f"local variables must be of tf.Variable type, not {local_variables!r}")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables that exist, if all ranks have the same ones.

        One rank may have loaded more than others have created.

        Args:
            logs: Ignored.
        """
        if not self._done and _are_same_on_all_ranks([(v.shape.as_list(), v.dtype.name) for v in self._variables()]):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast all variables after the first batch.

        Args:
            batch: Ignored.
            logs: Ignored.
        """
        if not self._done:
            self._broadcast()
            self._done = True

    def _broadcast(self) -> None:
        broadcast_variables(self._variables(), self.root_rank)

    def _variables(self) -> list[tf.Variable]:
        """Return the existing variables of the model and the optimizer, except local ones."""
        local = {id(variable) for variable in self._local}
        variables = [*variables_of(self.model), *variables_of(getattr(self.model, "optimizer", None))]
        return [variable for variable in variables if id(variable) not in local]


class MetricAverageCallback(_Callback):
    """Average the metrics of an epoch over the ranks, each with the same weight.

    It must precede callbacks that read metrics, such as checkpoints and schedules. Entries that are not numbers stay as
    they are.

    Args:
        device: Ignored with a warning: values are sent from the device on which they are.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        _warn_of_device(self, device)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average ``logs``, in place.

        Args:
            epoch: The epoch, for errors.
            logs: The metrics.

        Raises:
            MismatchError: Ranks have different metrics.
        """
        if logs is None:
            return
        names = sorted(name for name, value in logs.items() if is_number(value))
        # With different names, ranks would average different metrics, or wait for ranks that have none.
        if not _are_same_on_all_ranks(names):
            raise MismatchError(f"ranks have different metrics at the end of epoch {epoch}: rank {rank()} has {names}")
        if names:
            values = oob_allreduce(tf.constant([float(logs[name]) for name in names], tf.float64)).numpy()
            logs.update(zip(names, map(float, values), strict=True))


class LearningRateScheduleCallback(_Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` to ``end_epoch``.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch; or a number m, for m to the power of the epochs since ``start_epoch``.
        start_epoch: The first epoch.
        end_epoch: The first epoch after the schedule; ``None`` for a schedule without end.
        staircase: Whether the rate changes once in an epoch, or at every batch, where the epoch is fractional.
        momentum_correction: Whether momentum, which holds earlier learning rates, follows when the rate changes.
        steps_per_epoch: Batches of an epoch; needed if Keras does not know the number.

    Raises:
        ValueError: ``initial_lr`` is missing.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("`initial_lr` is None: expected the learning rate that the schedule multiplies")
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        if callable(multiplier):
            self._multiplier = multiplier
        else:
            self._multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find out how many batches an epoch has.

        Args:
            logs: Ignored.

        Raises:
            ValueError: Neither Keras nor ``steps_per_epoch`` says it.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("Could not autodetect the number of steps per epoch: pass `steps_per_epoch`")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch.

        Args:
            epoch: The epoch, from 0.
            logs: Ignored.
        """
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate.

        Args:
            batch: The batch of the epoch, from 0.
            logs: Ignored.
        """
        if not self._is_active:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None, "on_train_begin has set it"
            self._set(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to ``logs`` as ``lr``.

        Args:
            epoch: Ignored.
            logs: The metrics, changed in place.
        """
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    @property
    def _is_active(self) -> bool:
        return self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = _learning_rate(optimizer)
        now = self.initial_lr * self._multiplier(epoch)
        optimizer.learning_rate = now
        if self.momentum_correction and before > 0 and now != before:
            # v = momentum * v - lr * gradient: v contains steps with the previous rate.
            for velocity in velocities(optimizer):
                velocity.assign(velocity * tf.cast(now / before, velocity.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size()`` to ``initial_lr`` over the first epochs, batch by batch.

    Many ranks make a large batch, which needs a large learning rate. At the start of a training it would be too large.

    Args:
        initial_lr: The learning rate after the warm-up, such as ``0.001 * size()``.
        warmup_epochs: Length of the warm-up in epochs.
        momentum_correction: Whether momentum, which holds earlier learning rates, follows when the rate changes.
        steps_per_epoch: Batches of an epoch; needed if Keras does not know the number.
        verbose: 1: rank 0 prints a line at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None, "on_train_begin has set it"
            return warming_up(epoch, warmup_epochs, self.steps_per_epoch, size())

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to ``logs``, and print a line when the warm-up is over.

        Args:
            epoch: The epoch, from 0.
            logs: The metrics, changed in place.
        """
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = _learning_rate(self.model.optimizer)
            print(f"\nepoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}")


def _are_same_on_all_ranks(described: list[Any]) -> bool:
    mine = zlib.crc32(repr(described).encode())
    lowest, highest = oob_allreduce(tf.constant([mine, -mine], tf.int64), op=ReduceOp.MIN).numpy()
    return bool(lowest == -highest)


def variables_of(owner: Any) -> list[tf.Variable]:
    """Return the variables of a model or an optimizer that exist; a lazy layer may create more later.

    A model that is not built has none: tf_keras refuses to list those of its layers, and they are not complete.

    Args:
        owner: A model, an optimizer or ``None``.

    Returns:
        The variables.
    """
    if hasattr(owner, "layers") and not getattr(owner, "built", True):
        return []
    variables = getattr(owner, "variables", [])
    # A method in legacy optimizers.
    variables = variables() if callable(variables) else variables
    return [inner for inner in map(underlying, variables) if isinstance(inner, tf.Variable)]


def _learning_rate(optimizer: Any) -> float:
    return float(tf.convert_to_tensor(underlying(optimizer.learning_rate)))


def velocities(optimizer: Any) -> list[tf.Variable]:
    """Return the variables in which SGD and RMSprop with momentum keep the last step.

    Args:
        optimizer: Any optimizer.

    Returns:
        The variables; none before the first step.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # A legacy optimizer keeps a hyperparameter of this name, which may be a variable.
    momentum = getattr(inner, "momentum", None) or getattr(inner, "_momentum", None)
    if momentum is None:
        return []
    found = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None)
    if found is None and "momentum" in getattr(inner, "get_slot_names", list)():
        slots = getattr(inner, "_weights", [])
        found = [variable for variable in slots if variable.name.split(":")[0].endswith("/momentum")]
    return [underlying(variable) for variable in found or []]
