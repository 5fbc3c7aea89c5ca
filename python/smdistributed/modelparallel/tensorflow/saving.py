"""A divided model in TensorFlow's own checkpoints: ``tf.train.Checkpoint`` writes and reads them with all ranks.

- SAV-1: a checkpoint says nothing of partitions: its names are those of the model and the optimizer in one process. So
  plain TensorFlow reads it, and any number of partitions does.
- SAV-2: each rank of the first replica writes the variables that it holds into a shard; the first rank merges the shards,
  which writes the index last. Whoever names the checkpoint does so afterwards, so one that is named is complete.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication, slots
from smdistributed.modelparallel.tensorflow.model import DistributedModel, register_post_partition_hook
from smdistributed.modelparallel.tensorflow.state import state


@functools.cache
def install() -> None:
    """Has ``tf.train.Checkpoint`` treat a distributed model as what it is; does nothing the second time."""
    base = tf.train.Checkpoint
    plain_write, plain_read, plain_async = base._write, base.read, base._async_checkpointer

    @functools.wraps(plain_write)
    def _write(self: Any, file_prefix: str, options: Any = None) -> str:
        if not holds_model(self):
            return plain_write(self, file_prefix, options)
        write(self, str(file_prefix))
        return written(str(file_prefix), options)

    @functools.wraps(plain_read)
    def read(self: Any, save_path: str, options: Any = None) -> Any:
        if not holds_model(self):
            return plain_read(self, save_path, options)
        later = Later(lambda: plain_read(self, save_path, options))
        when_divided(self, later.read)
        return later

    @functools.wraps(plain_async)
    def _async_checkpointer(self: Any) -> Any:
        if holds_model(self):
            raise SMPUnsupportedError(
                "a distributed model is saved at once: leave `experimental_enable_async_checkpoint` out"
            )
        return plain_async(self)

    base._write, base.read, base._async_checkpointer = _write, read, _async_checkpointer


class Later:
    """What reading a checkpoint returns, which may happen only when the model has been divided: its methods are those of
    TensorFlow's object, and what they assert is asserted then."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read, self._status = read, None
        self._asked: list[str] = []

    def read(self) -> None:
        """Reads it."""
        self._status = self._read()
        for name in self._asked:
            getattr(self._status, name)()

    def _ask(self, name: str) -> Later:
        if self._status is None:
            self._asked.append(name)
        else:
            getattr(self._status, name)()
        return self

    def assert_consumed(self) -> Later:
        """As TensorFlow's."""
        return self._ask("assert_consumed")

    def assert_existing_objects_matched(self) -> Later:
        """As TensorFlow's."""
        return self._ask("assert_existing_objects_matched")

    def assert_nontrivial_match(self) -> Later:
        """As TensorFlow's."""
        return self._ask("assert_nontrivial_match")

    def expect_partial(self) -> Later:
        """As TensorFlow's."""
        return self._ask("expect_partial")


def _objects(checkpoint: tf.train.Checkpoint) -> list[Any]:
    return tf.train.TrackableView(checkpoint).descendants()


def holds_model(checkpoint: tf.train.Checkpoint) -> bool:
    """Whether the job's distributed model is among what is saved."""
    return state.initialized and any(isinstance(each, DistributedModel) for each in _objects(checkpoint))


def when_divided(checkpoint: tf.train.Checkpoint, read: Callable[[], Any]) -> None:
    """Has ``read`` called once the model is divided and the optimizers are built, at once if it is; then frees what belongs
    to others, which has been read as well."""

    def whole() -> None:
        for optimizer in (each for each in _objects(checkpoint) if hasattr(each, "apply_gradients")):
            slots.build(optimizer)
        with tf.init_scope():
            read()
        assert state.model is not None, "it was divided"
        state.model._smp_free()

    if state.model is not None and state.model.is_partitioned:
        whole()
    else:
        register_post_partition_hook(whole)


def written(file_prefix: str, options: Any) -> str:
    """Calls those who wait for a checkpoint: TensorFlow's callback names it and deletes old ones."""
    for callback in getattr(options, "experimental_write_callbacks", None) or ():
        callback(*[file_prefix][: len(inspect.signature(callback).parameters)])
    # Nobody reads what the first rank is still naming.
    communication.barrier()
    return file_prefix


def serialized(checkpoint: tf.train.Checkpoint) -> Iterator[tuple[str, str, Any, int | None, Any]]:
    """What there is to save: name, slice, the object, the rank of the partition that has it, and the tensor, which may be a
    call that gives it.

    Raises:
        SMPUsageError: the model has not been divided yet.
        SMPCheckpointError: a variable of the model is not among it.
    """
    if state.model is None or not state.model.is_partitioned:
        raise SMPUsageError("a model is saved after its first step, which builds and divides it")
    homes = state.model._smp_homes.variables
    gathered, *_ = checkpoint._saver._gather_serialized_tensors(None)
    if holds_model(checkpoint):
        _check_whole({id(getattr(underlying(each), "handle", None)) for each in gathered})
    for trackable, values in gathered.items():
        handle = getattr(underlying(trackable), "handle", None) if trackable is not None else None
        for name, value in values.items():
            for piece, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                yield name, piece, trackable, homes.get(id(handle)), getattr(tensor, "tensor", tensor)


def _check_whole(handles: set[int]) -> None:
    """Refuses what would leave a part of the model out without a word: TensorFlow does not find layers of Keras 3 that are in a list."""
    assert state.model is not None, "it was divided"
    with state.model._smp_as_whole():
        for variable in state.model.weights:
            if id(underlying(variable).handle) not in handles:
                raise SMPCheckpointError(
                    f"`{getattr(variable, 'path', variable.name)}` is a variable of the model that `tf.train.Checkpoint` does not find: give "
                    "its layer an attribute of its own, or save the optimizer, too"
                )


def write(checkpoint: tf.train.Checkpoint, file_prefix: str) -> None:
    """Writes a checkpoint; all ranks call it.

    Raises:
        SMPUsageError: the model has not been divided yet.
        SMPCheckpointError: a rank could not write its part; the same on all ranks of a replica.
    """
    groups = state.groups
    rank, part, failure = groups.rank_in("pp"), None, None
    entries = list(serialized(checkpoint))
    if groups.rank_in("dp") != 0:
        return
    try:
        tf.io.gfile.makedirs(file_prefix.rpartition("/")[0] or ".")
        # What every rank has is the first one's to write.
        mine = [(name, piece, tensor) for name, piece, _, home, tensor in entries if (home or 0) == rank]
        part = _write_part(f"{file_prefix}_temp/part-{rank:05d}", mine)
    except Exception as error:
        failure = f"partition {rank}: {type(error).__name__}: {error}"
    agree(failure, file_prefix)
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
    agree(failure, file_prefix)


def agree(failure: str | None, path: str) -> None:
    """Raises on all ranks of a replica what went wrong on any."""
    failures = [each for each in communication.allgather(failure, CommGroup.MP_GROUP) if each]
    if failures:
        raise SMPCheckpointError(f"the checkpoint `{path}` could not be written: {'; '.join(failures)}")


def _write_part(prefix: str, entries: list[tuple[str, str, Any]]) -> str | None:
    if not entries:
        return None
    names, pieces, tensors = zip(*entries, strict=True)
    with tf.init_scope(), tf.device("/device:CPU:0"):
        values = [tf.convert_to_tensor(tensor() if callable(tensor) else tensor) for tensor in tensors]
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=pieces, tensors=values)
    return prefix
