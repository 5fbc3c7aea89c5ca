"""``smp.CheckpointManager``: checkpoints of the whole model in TensorFlow's own form, written by all ranks together.

- CKP-1: a checkpoint says nothing of partitions: its names are those of the model and the optimizer in one process. So
  plain TensorFlow reads it, and any number of partitions does.
- CKP-2: each rank writes the variables that it holds into a shard; the first one merges the shards, which writes the
  index last, and then names the checkpoint in the file ``checkpoint``, which TensorFlow replaces at once. A checkpoint
  that is named is complete, whenever processes are killed.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication, slots
from smdistributed.modelparallel.tensorflow.model import register_post_partition_hook
from smdistributed.modelparallel.tensorflow.state import state


class CheckpointManager(tf.train.CheckpointManager):
    """As TensorFlow's, for a model that is divided. All ranks make it and call its methods.

    Args:
        checkpoint: What to save: the model, the optimizer.
        directory: Where; the same for all ranks.
        max_to_keep: How many are kept; ``None`` for all.
        checkpoint_name: What their files' names begin with.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        self._writes = state.groups.rank == 0
        super().__init__(checkpoint, directory, max_to_keep, checkpoint_name=checkpoint_name)

    def save(self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None) -> str | None:
        """Writes a checkpoint; returns its path, on all ranks.

        Raises:
            SMPUsageError: the model has not been divided yet: there has been no step.
            SMPCheckpointError: a rank could not write its part; the same on all ranks.
        """
        if state.model is None or not state.model.is_partitioned:
            raise SMPUsageError("`save` comes after the first step, which builds and divides the model")
        checkpoint = self._checkpoint
        vars(checkpoint)["_write"] = self._write
        try:
            return super().save(checkpoint_number, check_interval, options)
        finally:
            del vars(checkpoint)["_write"]
            # Nobody reads what the first rank is still naming.
            communication.barrier()

    def restore(self, save_path: str | None = None) -> str | None:
        """Reads a checkpoint; before the first step, it is read when that has divided the model.

        Args:
            save_path: Which; by default the latest.

        Returns:
            Its path, or ``None`` if there is none.

        Raises:
            SMPCheckpointError: there is none at ``save_path``.
        """
        path = save_path or tf.train.latest_checkpoint(self.directory)
        if path is None:
            return None
        if not tf.io.gfile.exists(f"{path}.index"):
            raise SMPCheckpointError(f"there is no checkpoint `{path}`: `{path}.index` is missing")
        model = state.model
        if model is None or not model.is_partitioned:
            register_post_partition_hook(lambda: self._read(path))
        else:
            self._read(path)
        return path

    def restore_or_initialize(self) -> str | None:
        """As TensorFlow's."""
        path = self.restore()
        if path is None and self._init_fn is not None:
            self._init_fn()
        return path

    def _read(self, path: str) -> None:
        children = self._checkpoint._trackable_children().values()
        for optimizer in (child for child in children if hasattr(child, "apply_gradients")):
            slots.build(optimizer)
        try:
            self._checkpoint.restore(path)
        except tf.errors.OpError as error:
            raise SMPCheckpointError(f"the checkpoint `{path}` cannot be read: {error.message}") from error
        # Others' variables have been read as well.
        model = state.model
        assert model is not None, "it was divided"
        model._smp_free()

    def _write(self, file_prefix: str, options: Any = None) -> str:
        """What a checkpoint is written by: all ranks of the first replica, each its part."""
        if state.groups.rank_in("dp") == 0:
            self._write_shards(file_prefix)
        # TensorFlow's, which names the checkpoint and deletes old ones, and the caller's.
        for callback in getattr(options, "experimental_write_callbacks", None) or ():
            callback(*[file_prefix][: len(inspect.signature(callback).parameters)])
        return file_prefix

    def _write_shards(self, file_prefix: str) -> None:
        groups = state.groups
        rank, part, failure = groups.rank_in("pp"), None, None
        try:
            tf.io.gfile.makedirs(self.directory)
            part = self._write_part(f"{file_prefix}_temp/part-{rank:05d}", rank)
        except Exception as error:
            failure = f"partition {rank}: {type(error).__name__}: {error}"
        self._agree(failure, file_prefix)
        parts = communication.allgather(part, CommGroup.MP_GROUP)
        failure = None
        if rank == 0:
            try:
                tf.raw_ops.MergeV2Checkpoints(
                    checkpoint_prefixes=[each for each in parts if each is not None],
                    destination_prefix=file_prefix,
                    delete_old_dirs=True,
                )
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        self._agree(failure, file_prefix)

    @staticmethod
    def _agree(failure: str | None, file_prefix: str) -> None:
        failures = [each for each in communication.allgather(failure, CommGroup.MP_GROUP) if each]
        if failures:
            raise SMPCheckpointError(f"the checkpoint `{file_prefix}` could not be written: {'; '.join(failures)}")

    def _write_part(self, prefix: str, rank: int) -> str | None:
        model = state.model
        assert model is not None, "it was divided"
        homes = model._smp_homes.variables
        gathered, *_ = self._checkpoint._saver._gather_serialized_tensors(None)
        names, pieces, tensors = [], [], []
        for trackable, values in gathered.items():
            handle = getattr(underlying(trackable), "handle", None) if trackable is not None else None
            # What every rank has is the first one's to write.
            if homes.get(id(handle), 0) != rank:
                continue
            for name, value in values.items():
                for piece, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                    names.append(name)
                    pieces.append(piece)
                    # A variable's is read when it is asked for.
                    tensors.append(tf.convert_to_tensor(getattr(tensor, "tensor", tensor)))
        if not names:
            return None
        with tf.device("/device:CPU:0"):
            tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=pieces, tensors=tensors)
        return prefix

    # The first rank names and deletes files; the others know of them.

    def _record_state(self) -> None:
        if self._writes:
            super()._record_state()

    def _sweep(self) -> None:
        if self._writes:
            super()._sweep()
        elif self._max_to_keep:
            while len(self._maybe_delete) > self._max_to_keep:
                self._maybe_delete.popitem(last=False)
