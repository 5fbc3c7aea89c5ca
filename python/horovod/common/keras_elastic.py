"""Callbacks that keep the state of a Keras model in step with ``model.fit``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from horovod.common.keras_hooks import complete

Logs = dict[str, Any] | None


# A mixin for classes of a framework, which have the other attributes; `Any` tells the type checker so.
_Base: Any = object


class CommitStateCallbackImpl(_Base):
    """Commit a state after a number of batches, and after each epoch.

    Args:
        backend: Ignored.
        state: The state.
        batches_per_commit: Number of batches between commits.
    """

    def __init__(self, backend: Any, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restart the count: `fit` is called again after a reset.

        Args:
            logs: Ignored.
        """
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit if enough batches have passed.

        Args:
            batch: Ignored.
            logs: Ignored.
        """
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit, and restart the count.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallbackImpl(_Base):
    """Keep ``state.batch``, and after a reset tell callbacks how many steps of the epoch are left.

    Callbacks find the number in ``params["steps"]``. `fit` itself ignores it and runs all steps of the epoch again.

    Args:
        backend: Ignored.
        state: A state with ``batch``.
    """

    def __init__(self, backend: Any, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Forget the number of steps.

        Args:
            logs: Ignored.
        """
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Set the number of steps to those that are left in the first epoch.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Record the batch in the state.

        Args:
            batch: The batch of the epoch, from 0.
            logs: Ignored.
        """
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Set the state's batch to 0 for the next epoch.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        self.state.batch = 0


class UpdateEpochStateCallbackImpl(_Base):
    """Keep ``state.epoch`` over all calls of `fit`.

    Args:
        backend: Ignored.
        state: A state with ``epoch``.
    """

    def __init__(self, backend: Any, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Remember the state's epoch: `fit` counts from 0, also after a reset.

        Args:
            logs: Ignored.
        """
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Record the epoch in the state.

        Args:
            epoch: The epoch of this `fit`, from 0.
            logs: Ignored.
        """
        self.state.epoch = self.initial_epoch + epoch + 1


_defined: dict[Any, SimpleNamespace] = {}


def define(keras: Any, module: str) -> SimpleNamespace:
    """Define the callbacks for a Keras package: one class of each, as `keras` and `tf.keras` may be the same one.

    Args:
        keras: The package.
        module: Module that the classes belong to, unless they were defined for another one before.

    Returns:
        The classes.
    """
    base = keras.callbacks.Callback
    if base not in _defined:
        _defined[base] = _define(base, module)
    return _defined[base]


def _define(base: Any, module: str) -> SimpleNamespace:
    class Batches(_Base):
        """Keras runs callbacks beside the next batch that do not ask for batches under this name."""

        def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
            """As ``on_batch_end``."""
            self.on_batch_end(batch, logs)

    class CommitStateCallback(Batches, CommitStateCallbackImpl, base):
        __doc__ = CommitStateCallbackImpl.__doc__

        def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
            super().__init__(None, state, batches_per_commit)

    class UpdateBatchStateCallback(Batches, UpdateBatchStateCallbackImpl, base):
        __doc__ = UpdateBatchStateCallbackImpl.__doc__

        def __init__(self, state: Any) -> None:
            super().__init__(None, state)

    class UpdateEpochStateCallback(UpdateEpochStateCallbackImpl, base):
        __doc__ = UpdateEpochStateCallbackImpl.__doc__

        def __init__(self, state: Any) -> None:
            super().__init__(None, state)

    classes = (CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback)
    for cls in classes:
        cls.__module__, cls.__qualname__ = module, cls.__name__
        complete(cls)
    return SimpleNamespace(**{cls.__name__: cls for cls in classes})
