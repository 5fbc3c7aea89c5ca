"""``smp.CheckpointManager``: numbered checkpoints of the whole model, written by all ranks together.

It writes TensorFlow's format (``checkpoint/saving.py``) or the core's shards (``checkpoint/shards.py``), and reads
both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPValidationError
from smdistributed.modelparallel.tensorflow.checkpoint import saving
from smdistributed.modelparallel.tensorflow.checkpoint.shards import Shards
from smdistributed.modelparallel.tensorflow.communication import gather_for


class CheckpointManager(tf.train.CheckpointManager):
    """TensorFlow's checkpoint manager for a partitioned model. All ranks make one and call its methods.

    Args:
        checkpoint: The objects to save: the model, the optimizer.
        directory: The directory; the same on all ranks.
        max_to_keep: Number of checkpoints to keep; ``None`` for all.
        checkpoint_name: Prefix of their names.
        format: ``"tensorflow"``, or ``"sharded"`` for folders of safetensors in which replicas share the work.
        keep_checkpoint_every_n_hours, step_counter, checkpoint_interval, init_fn: As TensorFlow's; the first not with
            shards.

    Raises:
        SMPValidationError: there is no such format, it does not go with another argument, or ``checkpoint_name`` leads
            out of ``directory``.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
        *,
        format: str = "tensorflow",
        keep_checkpoint_every_n_hours: float | None = None,
        step_counter: tf.Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if format not in ("tensorflow", "sharded"):
            raise SMPValidationError(f"`format` is {format!r}: expected 'tensorflow' or 'sharded'")
        if format == "sharded" and keep_checkpoint_every_n_hours is not None:
            raise SMPValidationError("`keep_checkpoint_every_n_hours` is not supported with `format='sharded'`")
        _check_name(checkpoint_name, format)
        saving.managed.add(checkpoint)
        super().__init__(
            checkpoint,
            directory,
            max_to_keep,
            keep_checkpoint_every_n_hours,
            checkpoint_name,
            step_counter,
            checkpoint_interval,
            init_fn,
        )
        self._shards = Shards(self.directory, max_to_keep) if format == "sharded" else None

    @property
    def checkpoints(self) -> list[str]:
        """The paths of those that are kept, the newest last."""
        if self._shards is None:
            return super().checkpoints
        return [os.path.join(self.directory, tag) for tag in self._shards.tags()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest, or ``None``."""
        if self._shards is None:
            return super().latest_checkpoint
        tag = self._shards.latest()
        return None if tag is None else os.path.join(self.directory, tag)

    def save(self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None) -> str | None:
        """Write a checkpoint. All ranks call it.

        Args:
            checkpoint_number: Number of the checkpoint; by default the next one.
            check_interval: Whether ``checkpoint_interval`` may skip the checkpoint.
            options: As TensorFlow's.

        Returns:
            The path, the same on all ranks; ``None`` if the checkpoint was skipped.

        Raises:
            SMPUsageError: The model has not been partitioned yet, because there was no step.
            SMPCheckpointError: A rank could not write its part; the same on all ranks.
        """
        self._last_checkpoint_step: int | None
        if self._shards is None:
            return super().save(checkpoint_number, check_interval, options)
        if self._checkpoint_interval is not None:
            step, last = int(self._step_counter), self._last_checkpoint_step
            if last is not None and (step == last or (check_interval and step < last + self._checkpoint_interval)):
                return None
            self._last_checkpoint_step = step
        counter = self._checkpoint.save_counter
        counter.assign_add(1)
        number = int(counter if checkpoint_number is None else checkpoint_number)
        path = f"{self._prefix}-{number}"
        self._shards.save(self._checkpoint, os.path.basename(path), number)
        return saving.written(path, options)

    def restore(self, save_path: str | os.PathLike[str] | None = None) -> str | None:
        """Read a checkpoint. All ranks call it.

        Before the first step, the values of the model and of its optimizers are read once the step has partitioned the
        model.

        Args:
            save_path: The checkpoint, of either format; by default the latest one.

        Returns:
            The path, or ``None`` if there is no checkpoint.

        Raises:
            SMPCheckpointError: There is no checkpoint at ``save_path``, or ranks find different ones.
        """
        path = save_path or (
            tf.train.latest_checkpoint(self.directory) if self._shards is None else self.latest_checkpoint
        )
        path = None if path is None else os.fspath(path)
        _check_same(path)
        if path is None:
            return None
        if os.path.isdir(path):
            self._read_shards(*os.path.split(path.rstrip("/")))
        elif tf.io.gfile.exists(f"{path}.index"):
            self._read(path)
        else:
            raise SMPCheckpointError(f"there is no checkpoint `{path}`: `{path}.index` is missing")
        if self._checkpoint_interval is not None:
            # The step counter, which may belong to an optimizer.
            saving.when_partitioned(self._checkpoint, self._note_step)
            self._note_step()
        return path

    def _note_step(self) -> None:
        self._last_checkpoint_step = int(self._step_counter)

    def _read_shards(self, folder: str, tag: str) -> None:
        shards = self._shards if self._shards is not None and folder == self.directory else Shards(folder, None)
        checkpoint = self._checkpoint
        checkpoint.save_counter  # noqa: B018 - creates it
        rest = saving.unpartitioned_objects(checkpoint)
        before = frozenset() if rest is None else shards.load(rest, tag)
        saving.when_partitioned(checkpoint, lambda: shards.load(checkpoint, tag, before))

    def _read(self, path: str) -> None:
        try:
            self._checkpoint.restore(path)
        except tf.errors.OpError as error:
            raise SMPCheckpointError(f"the checkpoint `{path}` cannot be read: {error.message}") from error

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint or initialize, as TensorFlow's method does."""
        path = self.restore()
        if path is None and self._init_fn is not None:
            self._init_fn()
        return path


def _check_same(path: str | None) -> None:
    """Check that all ranks restore a checkpoint of one name, or none; all ranks call it.

    Raises:
        SMPCheckpointError: They differ, as folders of different hosts may.
    """
    names = gather_for("saves or loads", None if path is None else os.path.basename(path.rstrip("/")))
    for rank, name in enumerate(names):
        if name != names[0]:
            both = [f"rank {each} finds {names[each]!r}" for each in (0, rank)]
            raise SMPCheckpointError(
                f"ranks would restore different checkpoints: {' and '.join(both)}. Give all ranks a folder that their "
                "hosts share, or the same `save_path`"
            )


def _check_name(name: str, form: str) -> None:
    """Reject names of checkpoints that lead out of the checkpoint folder.

    In TensorFlow's format, a name may contain subfolders.
    """
    parts = [name] if form == "sharded" else name.split("/")
    try:
        for part in parts:
            _core.checkpoint_check_tag(part)
    except errors.InvalidArgumentError as error:
        raise SMPValidationError(f"`checkpoint_name` is {name!r}: {error}") from error
