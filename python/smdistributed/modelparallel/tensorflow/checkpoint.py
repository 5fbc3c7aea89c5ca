"""``smp.CheckpointManager``: numbered checkpoints of the whole model, written by all ranks together.

Which form they have is a choice: TensorFlow's (``saving.py``) or the core's shards (``shards.py``). Either is read
whatever this manager writes.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPValidationError
from smdistributed.modelparallel.tensorflow import saving
from smdistributed.modelparallel.tensorflow.shards import Shards
from smdistributed.modelparallel.tensorflow.state import state


class CheckpointManager(tf.train.CheckpointManager):
    """As TensorFlow's, for a model that is divided. All ranks make it and call its methods.

    Args:
        checkpoint: What to save: the model, the optimizer.
        directory: Where; the same for all ranks.
        max_to_keep: How many are kept; ``None`` for all.
        checkpoint_name: What their names begin with.
        format: ``"tensorflow"``, or ``"sharded"`` for folders of safetensors in which replicas share the work.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
        *,
        format: str = "tensorflow",
    ) -> None:
        if format not in ("tensorflow", "sharded"):
            raise SMPValidationError(f"`format` is {format!r}: expected 'tensorflow' or 'sharded'")
        self._is_first = state.groups.rank == 0
        saving.managed.add(checkpoint)
        super().__init__(checkpoint, directory, max_to_keep, checkpoint_name=checkpoint_name)
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
        """Writes a checkpoint; returns its path, on all ranks.

        Raises:
            SMPUsageError: the model has not been divided yet: there has been no step.
            SMPCheckpointError: a rank could not write its part; the same on all ranks.
        """
        if self._shards is None:
            return super().save(checkpoint_number, check_interval, options)
        counter = self._checkpoint.save_counter
        counter.assign_add(1)
        number = int(counter if checkpoint_number is None else checkpoint_number)
        path = f"{self._prefix}-{number}"
        self._shards.save(self._checkpoint, os.path.basename(path), number)
        return saving.written(path, options)

    def restore(self, save_path: str | None = None) -> str | None:
        """Reads a checkpoint; before the first step, it is read when that has divided the model.

        Args:
            save_path: Which, of either format; by default the latest.

        Returns:
            Its path, or ``None`` if there is none.

        Raises:
            SMPCheckpointError: there is none at ``save_path``.
        """
        path = save_path or (
            tf.train.latest_checkpoint(self.directory) if self._shards is None else self.latest_checkpoint
        )
        if path is None:
            return None
        if os.path.isdir(path):
            folder, tag = os.path.split(path.rstrip("/"))
            shards = self._shards if folder == self.directory else None
            shards = shards or Shards(folder, None)
            saving.when_divided(self._checkpoint, lambda: shards.load(self._checkpoint, tag))
        elif tf.io.gfile.exists(f"{path}.index"):
            saving.when_divided(self._checkpoint, lambda: self._read(path))
        else:
            raise SMPCheckpointError(f"there is no checkpoint `{path}`: `{path}.index` is missing")
        return path

    def _read(self, path: str) -> None:
        try:
            self._checkpoint.restore(path)
        except tf.errors.OpError as error:
            raise SMPCheckpointError(f"the checkpoint `{path}` cannot be read: {error.message}") from error

    def restore_or_initialize(self) -> str | None:
        """As TensorFlow's."""
        path = self.restore()
        if path is None and self._init_fn is not None:
            self._init_fn()
        return path

    # The first rank names and deletes files; the others know of them.

    def _record_state(self) -> None:
        if self._is_first:
            super()._record_state()

    def _sweep(self) -> None:
        if self._is_first:
            super()._sweep()
        elif self._max_to_keep:
            while len(self._maybe_delete) > self._max_to_keep:
                self._maybe_delete.popitem(last=False)
