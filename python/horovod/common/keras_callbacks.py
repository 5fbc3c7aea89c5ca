"""Implementations of the callbacks for ``model.fit``, for both Keras packages and all frameworks.

:func:`define` combines them with a package's base class, and with an ``engine`` of the framework's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from horovod.common.basics import warn_once
from horovod.common.keras_hooks import complete
from smdistributed._common.training import is_number, warming_up

Logs = dict[str, Any] | None


# A mixin for classes of a framework, which have the other attributes; `Any` tells the type checker so.
_Base: Any = object


class _Callback(_Base):
    #: The framework's functions for variables and collectives.
    engine: Any = None

    def _use_device(self, device: str) -> None:
        self.device = device
        if device and not self.engine.HAS_DEVICES:
            warn_once(
                f"`device` of {type(self).__name__} has no effect: Keras on PyTorch keeps tensors on their device"
            )


class BroadcastGlobalVariablesCallbackImpl(_Callback):
    """Broadcast the model's and the optimizer's variables of one rank to all ranks, once.

    Args:
        backend: Ignored.
        root_rank: Rank in the world whose values are sent.
        device: Device from which values are sent; by default TensorFlow chooses.
        local_variables: A variable or a list of variables that keep each rank's own values.

    Raises:
        ValueError: ``local_variables`` is something else.
    """

    def __init__(self, backend: Any, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._use_device(device)
        self.broadcast_done = False
        if local_variables is None:
            local_variables = []
        elif self.engine.is_variable(local_variables):
            local_variables = [local_variables]
        if not all(self.engine.is_variable(variable) for variable in local_variables):
            raise ValueError(f"All local variables must be of {self.engine.VARIABLE} type, not {local_variables!r}")
        self._local_variables = {self.engine.key(variable) for variable in local_variables}

    def register_local_variable(self, variable: Any) -> None:
        """Let a variable keep each rank's value.

        Args:
            variable: The variable.
        """
        self._local_variables.add(self.engine.key(variable))

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast variables that exist on all ranks. A rank may have loaded variables that others have not created.

        Args:
            logs: Ignored.
        """
        if self.broadcast_done or self.engine.size() == 1:
            return
        for variables in self._variables():
            described = [self.engine.describe(variable) for variable in variables]
            if all(others == described for others in self.engine.gather(described, "broadcast_callback")):
                self.engine.broadcast(variables, self.root_rank, self.device)

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast all variables after the first batch: layers and optimizers create variables in it.

        Args:
            batch: Ignored.
            logs: Ignored.
        """
        if not self.broadcast_done:
            for variables in self._variables():
                self.engine.broadcast(variables, self.root_rank, self.device)
            self.broadcast_done = True

    def _variables(self) -> list[list[Any]]:
        """Return the variables of the model and of the optimizer, without local ones."""
        lists = []
        for owner in (self.model, getattr(self.model, "optimizer", None)):
            distinct = {self.engine.key(variable): variable for variable in self.engine.variables_of(owner)}
            lists.append([variable for key, variable in distinct.items() if key not in self._local_variables])
        return lists


class MetricAverageCallbackImpl(_Callback):
    """Average the metrics of an epoch over the ranks, each with the same weight.

    Args:
        backend: Ignored.
        device: Device on which metrics are averaged; by default TensorFlow chooses.
    """

    def __init__(self, backend: Any, device: str = "") -> None:
        super().__init__()
        self._use_device(device)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average ``logs``, in place; entries that are not numbers are unchanged.

        Args:
            epoch: The epoch, for errors.
            logs: The metrics.

        Raises:
            ValueError: Ranks have different metrics.
        """
        if logs is None or self.engine.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if is_number(value))
        names_by_rank = self.engine.gather(names, "metric_average.names")
        if any(others != names for others in names_by_rank):
            listed = ", ".join(f"rank {rank}: {others}" for rank, others in enumerate(names_by_rank))
            raise ValueError(f"ranks have different metrics at the end of epoch {epoch}: {listed}")
        if names:
            averages = self.engine.average([float(logs[name]) for name in names], "metric_average", self.device)
            logs.update(zip(names, map(float, averages), strict=True))


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


class _Hyperparameter:
    """A number in an optimizer: a variable, a plain attribute, or an attribute with a setter."""

    def __init__(self, engine: Any, optimizer: Any, *names: str) -> None:
        optimizer = _inner(optimizer)
        self._engine, self._optimizer = engine, optimizer
        name = next((name for name in names if getattr(optimizer, name, None) is not None), None)
        if name is None:
            raise ValueError(f"{type(optimizer).__name__} has none of the attributes {', '.join(names)}")
        self.name = name

    def get(self) -> float:
        return self._engine.number(getattr(self._optimizer, self.name))

    def set(self, value: float) -> None:
        current = getattr(self._optimizer, self.name)
        if self._engine.is_variable(current):
            current.assign(value)
        else:
            setattr(self._optimizer, self.name, value)


class LearningRateScheduleCallbackImpl(_Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` for some epochs.

    Args:
        backend: Ignored.
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
        backend: Any,
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
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.restore_momentum: float | None = None
        self.current_epoch: int | None = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - self.start_epoch)

    def _autodetect_steps_per_epoch(self) -> int:
        params = self.params or {}
        if params.get("steps"):
            return params["steps"]
        if params.get("samples") and params.get("batch_size"):
            return params["samples"] // params["batch_size"]
        raise ValueError(
            "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to the "
            f"{type(self).__name__}() or upgrade to the latest version of Keras."
        )

    def _adjust_learning_rate(self, epoch: float) -> None:
        rate = self._rate()
        before = rate.get()
        now = self.initial_lr * self.multiplier(epoch)
        rate.set(now)
        if self.momentum_correction and before > 0 and now != before:
            self._correct_momentum(now / before)

    def _rate(self) -> _Hyperparameter:
        return _Hyperparameter(self.engine, self.model.optimizer, "learning_rate", "lr")

    def _correct_momentum(self, ratio: float) -> None:
        """Scale momentum sums, which were computed with the previous learning rate, to the new one."""
        optimizer = _inner(self.model.optimizer)
        if self.engine.is_variable(getattr(optimizer, "momentum", None)):
            momentum = _Hyperparameter(self.engine, optimizer, "momentum")
            # The momentum is scaled for one batch.
            self.restore_momentum = momentum.get()
            momentum.set(self.restore_momentum * ratio)
            return
        # A compiled step contains the momentum as a constant, so the sums are scaled instead, once.
        self.engine.scale_velocities(optimizer, ratio)

    def _restore_momentum_if_needed(self) -> None:
        if self.restore_momentum is not None:
            _Hyperparameter(self.engine, self.model.optimizer, "momentum").set(self.restore_momentum)
            self.restore_momentum = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how many batches an epoch has.

        Args:
            logs: Ignored.

        Raises:
            ValueError: Neither Keras nor ``steps_per_epoch`` gives the number.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._autodetect_steps_per_epoch()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch.

        Args:
            epoch: The epoch, from 0.
            logs: Ignored.
        """
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate.

        Args:
            batch: The batch of the epoch, from 0.
            logs: Ignored.
        """
        epoch = self.current_epoch
        assert epoch is not None, "Keras calls on_epoch_begin before the first batch"
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust_learning_rate(epoch)
            return
        assert self.steps_per_epoch is not None, "on_train_begin has set it"
        self._adjust_learning_rate(epoch + float(batch) / self.steps_per_epoch)

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Restore the momentum that a correction has changed for one batch.

        Args:
            batch: Ignored.
            logs: Ignored.
        """
        self._restore_momentum_if_needed()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to ``logs`` as ``lr``.

        Args:
            epoch: Ignored.
            logs: The metrics, changed in place.
        """
        if logs is not None:
            logs["lr"] = self._rate().get()


class LearningRateWarmupCallbackImpl(LearningRateScheduleCallbackImpl):
    """Raise the learning rate from ``initial_lr / size()`` to ``initial_lr`` over the first epochs, batch by batch.

    Args:
        backend: Ignored.
        initial_lr: The learning rate after the warm-up, such as ``0.001 * size()``.
        warmup_epochs: Length of the warm-up in epochs.
        momentum_correction: Whether momentum, which holds earlier learning rates, follows when the rate changes.
        steps_per_epoch: Batches of an epoch; needed if Keras does not know the number.
        verbose: 1: rank 0 prints a line at the end.
    """

    def __init__(
        self,
        backend: Any,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None, "on_train_begin has set it"
            return warming_up(epoch, warmup_epochs, self.steps_per_epoch, self.engine.size())

        super().__init__(
            backend,
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to ``logs``, and print a line when the warm-up is over.

        Args:
            epoch: The epoch, from 0.
            logs: The metrics, changed in place.
        """
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and self.engine.rank() == 0:
            rate = self._rate().get()
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class _Batches(_Base):
    """Make callbacks that do not use the newer names of batch hooks run in order with batches, not concurrently."""

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """As ``on_batch_begin``."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """As ``on_batch_end``."""
        self.on_batch_end(batch, logs)


_defined: dict[Any, SimpleNamespace] = {}


def define(keras: Any, module: str, engine: Any) -> SimpleNamespace:
    """Define the callbacks for a Keras package: one class of each, as `keras` and `tf.keras` may be the same one.

    Args:
        keras: The package.
        module: ``__module__`` of the classes; ignored if the classes were defined before.
        engine: The framework's functions for variables and collectives.

    Returns:
        The classes.
    """
    base = keras.callbacks.Callback
    if base not in _defined:
        _defined[base] = _define(keras, base, module, engine)
    return _defined[base]


def _define(keras: Any, base: Any, module: str, engine: Any) -> SimpleNamespace:
    class BroadcastGlobalVariablesCallback(_Batches, BroadcastGlobalVariablesCallbackImpl, base):
        """Broadcast the model's and the optimizer's variables of one rank to all ranks, once.

        Variables that exist before the first batch are broadcast then. All variables are broadcast at the end of the
        first batch, because layers and optimizers create variables in it.

        Args:
            root_rank: The rank whose values are broadcast.
            device: Device from which values are sent; by default TensorFlow chooses.
            local_variables: A variable or a list of variables that keep each rank's own values.

        Raises:
            ValueError: `local_variables` is something else.
        """

        def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
            super().__init__(keras.backend, root_rank, device, local_variables)

    class MetricAverageCallback(MetricAverageCallbackImpl, base):
        """Averages the metrics of an epoch over the ranks. It must precede callbacks that read metrics.

        Args:
            device: Device on which metrics are averaged; by default TensorFlow chooses.
        """

        def __init__(self, device: str = "") -> None:
            super().__init__(keras.backend, device)

    class LearningRateScheduleCallback(_Batches, LearningRateScheduleCallbackImpl, base):
        """Set the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` to ``end_epoch``.

        Args:
            initial_lr: The learning rate that is multiplied.
            multiplier: A function of the epoch; or a number m, for m to the power of the epochs since `start_epoch`.
            start_epoch: The first epoch.
            end_epoch: The first epoch after the schedule; ``None`` for a schedule without end.
            staircase: Whether the rate changes once in an epoch, or at every batch, where the epoch is fractional.
            momentum_correction: Whether momentum, which holds earlier learning rates, follows when the rate changes.
            steps_per_epoch: Batches of an epoch; needed if Keras does not know the number.

        Raises:
            ValueError: `initial_lr` is missing.
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
            options = (start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch)
            super().__init__(keras.backend, initial_lr, multiplier, *options)

    class LearningRateWarmupCallback(_Batches, LearningRateWarmupCallbackImpl, base):
        """Raises the learning rate from ``initial_lr / size()`` to `initial_lr` over the first epochs, batch by batch.

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
            options = (warmup_epochs, momentum_correction, steps_per_epoch, verbose)
            super().__init__(keras.backend, initial_lr, *options)

    class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
        """``ModelCheckpoint`` of the best model so far, whose attribute ``filepath`` is set before training.

        Args:
            monitor: The metric that is compared.
            verbose: 1: prints a line at each save.
            save_weights_only: Whether only weights are saved.
            mode: ``min``, ``max``, or ``auto``, which derives it from the metric's name.
            save_freq: When to save; see ``ModelCheckpoint``.
        """

        def __init__(
            self,
            monitor: str = "val_loss",
            verbose: int = 0,
            save_weights_only: bool = False,
            mode: str = "auto",
            save_freq: Any = "epoch",
        ) -> None:
            # Keras requires a path.
            super().__init__(
                "best.weights.h5" if save_weights_only else "best.keras",
                monitor=monitor,
                verbose=verbose,
                save_best_only=True,
                save_weights_only=save_weights_only,
                mode=mode,
                save_freq=save_freq,
            )
            self.filepath = None

        def on_train_begin(self, logs: Logs = None) -> None:
            """Check that ``filepath`` is set.

            Raises:
                ValueError: ``filepath`` is not set.
            """
            if self.filepath is None:
                raise ValueError("BestModelCheckpoint: set `filepath` before training")
            super().on_train_begin(logs)

    classes = (
        BroadcastGlobalVariablesCallback,
        MetricAverageCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        BestModelCheckpoint,
    )
    for cls in classes:
        cls.__module__, cls.__qualname__ = module, cls.__name__
        cls.engine = engine
        complete(cls)
    return SimpleNamespace(**{cls.__name__: cls for cls in classes})
