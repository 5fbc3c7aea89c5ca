"""The staging folder in which the parts of a TensorFlow checkpoint are written before the checkpoint gets its name."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError

_CLASSES = {**CLASSES, "io": SMPCheckpointError, "invalid_argument": SMPCheckpointError}


class StagingFolder:
    """A hidden folder beside a checkpoint, in which the first rank collects all files before the rename.

    If the disk is full, an older checkpoint of the same name stays as it is.

    Args:
        file_prefix: The checkpoint's path.
        number: The id of the attempt, from ``shares.next_save_id``, equal on all ranks.
    """

    def __init__(self, file_prefix: str, number: int) -> None:
        self._number = number
        folder, self._name = os.path.split(file_prefix)
        self._folder = folder or "."
        self._attempt: Any = None

    def open(self) -> str:
        """Create the folder into which ranks write their parts."""
        with errors.translated(_CLASSES):
            self._attempt = _core.CheckpointAttempt(
                self._folder, "tensorflow", "tensorflow", self._number, 0, 1, False, 0.0
            )
        return self._attempt.folder

    def merge(self, parts: list[str]) -> None:
        """Merge the parts into one checkpoint, and rename it to its final name."""
        folder = self._attempt.folder
        _merge(parts, f"{folder}/merged", False)
        # The index is renamed last, because a checkpoint exists once its index does.
        for name in sorted(os.listdir(folder), key=lambda name: name.endswith(".index")):
            if name.startswith("merged."):
                os.replace(f"{folder}/{name}", os.path.join(self._folder, self._name + name.removeprefix("merged")))

    def close(self) -> None:
        """Remove the folder and the files in it."""
        if self._attempt is not None:
            self._attempt.leave()


class RemoteStaging:
    """The counterpart of :class:`StagingFolder` for file systems that only TensorFlow writes.

    TensorFlow moves the parts into place.
    """

    def __init__(self, file_prefix: str) -> None:
        self._prefix = file_prefix

    def open(self) -> str:
        """Create the folder into which ranks write their parts."""
        tf.io.gfile.makedirs(self._prefix.rpartition("/")[0])
        return f"{self._prefix}_temp"

    def merge(self, parts: list[str]) -> None:
        """Merge the parts into one checkpoint at its final name."""
        _merge(parts, self._prefix, True)

    def close(self) -> None:
        """Do nothing: TensorFlow has moved the parts."""


def _merge(parts: list[str], prefix: str, delete: bool) -> None:
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=delete)
