"""Callbacks that keep the state of a Keras model in step with ``model.fit``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from horovod.common.keras_hooks import complete

Logs = dict[str, Any] | None


# Mixed into classes of a framework, which bring the other attributes. `Any` says so to the type checker.
_Base: Any = object


class CommitStateCallbackImpl(_Base):
    """Commits after every so many batches, and after each epoch.

    Args:
        backend: Not needed.
        state: The state.
        batches_per_commit: So many.
    """

    def __init__(self, backend: Any, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Counts anew: `fit` is called again after a reset."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commits if it is time to."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commits, and counts anew."""
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallbackImpl(_Base):
    """Keeps ``state.batch``, and after a reset tells callbacks through ``params["steps"]`` how many steps of the epoch are left.

    `fit` itself does not look there: it makes all steps of the epoch again.

    Args:
        backend: Not needed.
        state: Has ``batch``.
    """

    def __init__(self, backend: Any, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Asks for the steps anew."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Of the first epoch, the steps that are left."""
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Takes note."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """The next one begins at its start."""
        self.state.batch = 0


class UpdateEpochStateCallbackImpl(_Base):
    """Keeps ``state.epoch``, over all calls of `fit`.

    Args:
        backend: Not needed.
        state: Has ``epoch``.
    """

    def __init__(self, backend: Any, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """`fit` counts from 0, also after a reset."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Takes note."""
        self.state.epoch = self.initial_epoch + epoch + 1


_defined: dict[Any, SimpleNamespace] = {}


def define(keras: Any, module: str) -> SimpleNamespace:
    """The classes, for a Keras: one of each, as `keras` and `tf.keras` may be the same one.

    Args:
        keras: Its package.
        module: Where they are public, if they are not there yet.
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
