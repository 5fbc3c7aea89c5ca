"""A partitioned model in TensorFlow's checkpoints: all ranks write and read a ``tf.train.Checkpoint`` together.

- SAV-1: a checkpoint does not depend on the partition: its names are those of the model and the optimizer in one
  process. So plain TensorFlow reads it, and so does a job with another number of partitions.
- SAV-2: each rank of the first replica writes its variables into a shard. The first rank merges the shards and writes
  the index last. A checkpoint is named, and older ones are deleted, only after that, in every replica. So a checkpoint
  that has a name is complete.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as tf_checkpoint

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel import shares
from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.tensorflow.checkpoint.staging import RemoteStaging, StagingFolder
from smdistributed.modelparallel.tensorflow.communication import raise_on_all_ranks, read_on_all_ranks
from smdistributed.modelparallel.tensorflow.model import DistributedModel, register_post_partition_hook
from smdistributed.modelparallel.tensorflow.partitioning import optimizer_variables, remote_variables
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.state import state

#: Checkpoints of `smp.CheckpointManager`, whose methods all ranks call, whatever the checkpoints contain.
managed: weakref.WeakSet[tf.train.Checkpoint] = weakref.WeakSet()
#: Ids of variables that were restored before the rest of the checkpoint that is being read.
_have_been_read: dict[int, Any] = {}
#: Number of values of a variable that ranks compare.
_SAMPLED = 256
_COUNTER = "save_counter/.ATTRIBUTES/VARIABLE_VALUE"


@functools.cache
def install() -> None:
    """Make ``tf.train.Checkpoint`` write and read a distributed model; do nothing on a second call."""
    base = tf.train.Checkpoint
    plain_write, plain_read, plain_async = base._write, base.read, base._async_checkpointer

    @functools.wraps(plain_write)
    def _write(self: Any, file_prefix: str, options: Any = None) -> str:
        if not is_shared(self):
            return plain_write(self, file_prefix, options)
        write(self, str(file_prefix))
        return written(str(file_prefix), options)

    @functools.wraps(plain_read)
    def read(self: Any, save_path: str, options: Any = None) -> Any:
        if save_path is None or not is_partitioned(self):
            return plain_read(self, save_path, options)
        deferred = DeferredRestore(lambda: plain_read(self, save_path, options))
        path = os.fspath(save_path)
        has_counter: list[bool] = []
        read_on_all_ranks(lambda: has_counter.append(tf.train.load_checkpoint(path).has_tensor(_COUNTER)), path)
        if has_counter[0]:
            self._maybe_create_save_counter()
        rest = unpartitioned_objects(self)
        if rest is None:
            when_partitioned(self, deferred.read, path)
        else:
            read_on_all_ranks(lambda: plain_read(rest, save_path, options).expect_partial(), path)
            when_partitioned(self, lambda: deferred.read(rest), path)
        return deferred

    @functools.wraps(plain_async)
    def _async_checkpointer(self: Any) -> Any:
        if is_shared(self):
            raise SMPUnsupportedError(
                "a distributed model is saved synchronously: omit `experimental_enable_async_checkpoint`"
            )
        return plain_async(self)

    base._write, base.read, base._async_checkpointer = _write, read, _async_checkpointer
    coordinator = tf_checkpoint._CheckpointRestoreCoordinator
    plain_restore = coordinator.restore_saveables

    @functools.wraps(plain_restore)
    def restore_saveables(
        self: Any, tensor_saveables: Any, python_positions: Any, registered_savers: Any = None, reader: Any = None
    ) -> Any:
        here = _here(tensor_saveables, self.save_path_string)
        positions = [each for each in python_positions if id(each.trackable) not in _have_been_read]
        return plain_restore(self, here, positions, registered_savers, reader)

    coordinator.restore_saveables = restore_saveables
    _install_managers()


def _install_managers() -> None:
    """Make only the first rank name and delete files, because ranks may disagree about the files' ages."""
    manager = tf.train.CheckpointManager
    plain_record, plain_sweep = manager._record_state, manager._sweep

    @functools.wraps(plain_record)
    def _record_state(self: Any) -> None:
        if _is_first() or not is_shared(self._checkpoint):
            plain_record(self)

    @functools.wraps(plain_sweep)
    def _sweep(self: Any) -> None:
        if _is_first() or not is_shared(self._checkpoint):
            plain_sweep(self)
        elif self._max_to_keep:
            while len(self._maybe_delete) > self._max_to_keep:
                self._maybe_delete.popitem(last=False)

    manager._record_state, manager._sweep = _record_state, _sweep


def _is_first() -> bool:
    return not state.initialized or state.groups.rank == 0


def _here(saveables: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the saveables with a place on this rank; others are not read and take no memory.

    Raises:
        ValueError: A variable of another rank has a different shape in the checkpoint; raised on all ranks.
    """
    others = {name: remote_variables.as_remote(each.op) for name, each in saveables.items()}
    if any(each is not None for each in others.values()):
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        for name, variable in others.items():
            if variable is None:
                continue
            for spec in saveables[name].specs:
                if variable.shape.as_list() != shapes.get(spec.name):
                    raise ValueError(
                        f"`{spec.name}` of the checkpoint `{path}` has the shape {shapes.get(spec.name)}: "
                        f"`{variable.name}` has {variable.shape}"
                    )
    return {
        name: each for name, each in saveables.items() if others[name] is None and id(each.op) not in _have_been_read
    }


class DeferredRestore:
    """The status of a restore that may wait until the model is partitioned.

    It has the methods of TensorFlow's status. Their assertions run once the model is partitioned.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read, self._status = read, None
        self._requested: list[str] = []

    def read(self, rest: tf.train.Checkpoint | None = None) -> None:
        """Read the checkpoint, except ``rest``, which has been read."""
        _have_been_read.update((id(each), each) for each in ([] if rest is None else _objects(rest)))
        try:
            self._status = self._read()
        finally:
            _have_been_read.clear()
        for name in self._requested:
            getattr(self._status, name)()

    def _request(self, name: str) -> DeferredRestore:
        if self._status is None:
            self._requested.append(name)
        else:
            getattr(self._status, name)()
        return self

    def assert_consumed(self) -> DeferredRestore:
        """Check that every value was restored, as TensorFlow's method does."""
        return self._request("assert_consumed")

    def assert_existing_objects_matched(self) -> DeferredRestore:
        """Check that every existing object was restored, as TensorFlow's method does."""
        return self._request("assert_existing_objects_matched")

    def assert_nontrivial_match(self) -> DeferredRestore:
        """Check that any value was restored, as TensorFlow's method does."""
        return self._request("assert_nontrivial_match")

    def expect_partial(self) -> DeferredRestore:
        """Silence warnings about values that were not restored, as TensorFlow's method does."""
        return self._request("expect_partial")

    def run_restore_ops(self, session: Any = None) -> None:
        """Do nothing, as TensorFlow's method in eager mode."""

    def initialize_or_restore(self, session: Any = None) -> None:
        """Do nothing, as TensorFlow's method in eager mode."""


def _objects(checkpoint: tf.train.Checkpoint) -> list[Any]:
    return tf.train.TrackableView(checkpoint).descendants()


def holds_model(checkpoint: tf.train.Checkpoint) -> bool:
    """Return whether the job's distributed model is among the saved objects."""
    return state.initialized and any(isinstance(each, DistributedModel) for each in _objects(checkpoint))


def unpartitioned_objects(checkpoint: tf.train.Checkpoint) -> tf.train.Checkpoint | None:
    """Return the objects in ``checkpoint`` that belong to neither the model nor an optimizer.

    They can be restored before the model is partitioned. Returns ``None`` afterwards.
    """
    if _variable_partitions():
        return None
    roots = [
        each for each in _objects(checkpoint) if isinstance(each, DistributedModel) or hasattr(each, "apply_gradients")
    ]
    ours = {id(each) for root in roots for each in tf.train.TrackableView(root).descendants()}
    rest = tf.train.Checkpoint()
    for name, child in checkpoint._trackable_children().items():
        if ours.isdisjoint(map(id, tf.train.TrackableView(child).descendants())):
            # The save counter's name cannot be passed as a keyword argument.
            rest._track_trackable(child, name)
    return rest


def is_partitioned(checkpoint: tf.train.Checkpoint) -> bool:
    """Return whether a saved object is partitioned: the model, a layer, or an optimizer. Equal on all ranks."""
    if not state.initialized or (state.model is not None and state.model._smp_is_gathered):
        return False
    assignment = _variable_partitions()
    return any(isinstance(each, DistributedModel) or id(handle_of(each)) in assignment for each in _objects(checkpoint))


def is_shared(checkpoint: tf.train.Checkpoint) -> bool:
    """Return whether all ranks write it together."""
    return state.initialized and (checkpoint in managed or is_partitioned(checkpoint))


def _variable_partitions() -> dict[int, int]:
    """Return the partitions of variables, once the model is partitioned."""
    return state.model._smp_assignment.variables if state.model is not None and state.model.is_partitioned else {}


def when_partitioned(checkpoint: tf.train.Checkpoint, read: Callable[[], Any], path: str | None = None) -> None:
    """Call ``read`` once the model is partitioned and the optimizers are built; at once if they are.

    Args:
        checkpoint: The checkpoint object of the script, whose optimizers are built first.
        read: Reads the values.
        path: The path of the checkpoint, if a failure to read it on one rank must raise on all.
    """

    def whole() -> None:
        for optimizer in (each for each in _objects(checkpoint) if hasattr(each, "apply_gradients")):
            optimizer_variables.build(optimizer)
        with tf.init_scope():
            try:
                if path is None:
                    read()
                else:
                    read_on_all_ranks(read, path)
            except tf.errors.OpError as error:
                raise SMPCheckpointError(f"a checkpoint cannot be read: {error.message}") from error

    if state.model is not None and state.model.is_partitioned:
        whole()
    else:
        register_post_partition_hook(whole)


def written(file_prefix: str, options: Any) -> str:
    """Run the callbacks of a written checkpoint: TensorFlow's callback names it and deletes old ones.

    Raises:
        SMPCheckpointError: A callback failed, here or on another rank; raised on all ranks.
    """

    def call() -> None:
        for callback in getattr(options, "experimental_write_callbacks", None) or ():
            callback(*[file_prefix][: len(inspect.signature(callback).parameters)])

    # The other ranks run their callbacks after the first rank's, which names the checkpoint and deletes files.
    is_first = state.groups.rank == 0
    raise_on_all_ranks(call if is_first else _nothing, file_prefix)
    raise_on_all_ranks(_nothing if is_first else call, file_prefix)
    return file_prefix


def serialized(checkpoint: tf.train.Checkpoint) -> Iterator[tuple[str, str, Any, int | None, Any]]:
    """The entries to save.

    Each entry is a name, a slice, an object, the rank of its partition, and the tensor or a function that returns it.

    Raises:
        SMPUsageError: The model is not partitioned yet.
        SMPCheckpointError: A variable of the model is not among the entries.
    """
    check_partitioned(checkpoint)
    assignment = _variable_partitions()
    gathered, *_ = checkpoint._saver._gather_serialized_tensors(None)
    _check_known(checkpoint)
    if holds_model(checkpoint):
        _check_whole({id(handle_of(each)) for each in gathered})
    for trackable, values in gathered.items():
        home = assignment.get(id(handle_of(trackable)))
        for name, value in values.items():
            for piece, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                yield name, piece, trackable, home, getattr(tensor, "tensor", tensor)


def checked_entries(checkpoint: tf.train.Checkpoint, path: str) -> list[tuple[str, str, Any, int | None, Any]]:
    """Returns :func:`serialized`, checked on all ranks, which call it together.

    Raises:
        SMPUsageError: The model is not partitioned yet.
        SMPCheckpointError: Ranks have different entries, or an entry's partition is not known.
    """
    check_partitioned(checkpoint)
    entries: list[tuple[str, str, Any, int | None, Any]] = []

    def local_entries() -> tuple[list[str], dict[str, np.ndarray]]:
        entries.extend(serialized(checkpoint))
        writes = state.groups.rank_in("dp") == 0 and len(state.groups.members["pp"]) > 1
        names = [f"{name} {piece}".strip() for name, piece, *_ in entries]
        return names, _samples(checkpoint, entries) if writes else {}

    listed, samples = zip(*raise_on_all_ranks(local_entries, path), strict=True)
    # Each rank writes its part of the first rank's list.
    gathered = [set(each) for each in listed]
    for rank, theirs in enumerate(gathered):
        for one, has, other, lacks in ((0, gathered[0], rank, theirs), (rank, theirs, 0, gathered[0])):
            if has - lacks:
                raise SMPCheckpointError(
                    f"the checkpoint `{path}` could not be written: `{min(has - lacks)}` is there on rank {one} and "
                    f"not on rank {other}"
                )
    # An entry without a partition is written with the first rank's value.
    for rank, found in enumerate(samples):
        for name, sample in found.items():
            if not _are_alike(sample, samples[0][name]):
                raise SMPCheckpointError(
                    f"the checkpoint `{path}` could not be written: `{name}` has other values on rank {rank} than on "
                    "rank 0, and belongs to no partition: only variables of the model and of its optimizers do"
                )
    return entries


def _samples(
    checkpoint: tf.train.Checkpoint, entries: Iterable[tuple[str, str, Any, int | None, Any]]
) -> dict[str, np.ndarray]:
    """Samples a few numbers of each variable that belongs to no partition, and counts its elements.

    Metrics, random generators and the model's own variables are left out: the first two may differ between ranks.
    """
    variables: list[Any] = []
    for each in _objects(checkpoint):
        if isinstance(each, tf.random.Generator):
            variables.append(each.state)
        elif isinstance(each, tf.keras.metrics.Metric) or hasattr(each, "seed_generator"):
            variables += each.variables
    if state.model is not None:
        # Such as a layer that no step has called yet, whose variable has no value.
        with state.model._smp_all_variables():
            variables += state.model.variables
    own = {id(handle_of(each)) for each in variables}
    found = {}
    for name, _, trackable, home, _ in entries:
        variable = underlying(trackable)
        if (
            home is None
            and id(handle_of(variable)) not in own
            and isinstance(variable, tf.Variable)
            and (variable.dtype.is_floating or variable.dtype.is_integer)
        ):
            numbers = np.ravel(variable.numpy()).astype(np.float64)
            at = np.linspace(0, numbers.size - 1, min(numbers.size, _SAMPLED)).astype(int)
            found[name] = np.append(numbers[at], numbers.size)
    return found


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Compare arrays, except for rounding differences between kernels."""
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)


def check_partitioned(checkpoint: tf.train.Checkpoint) -> None:
    """Reject saving or reading a model that is not partitioned yet."""
    if holds_model(checkpoint) and (state.model is None or not state.model.is_partitioned):
        raise SMPUsageError("the model cannot be saved or read before its first step, which partitions it")


def _check_known(checkpoint: tf.train.Checkpoint) -> None:
    """Reject a variable of an optimizer whose partition is not known: only the first rank's value would be saved."""
    if state.model is None or not state.model.is_partitioned or len(state.groups.members["pp"]) == 1:
        return
    for optimizer in (each for each in _objects(checkpoint) if hasattr(each, "apply_gradients")):
        for variable in optimizer_variables.unknown(optimizer):
            raise SMPCheckpointError(
                f"the partition of `{getattr(variable, 'path', variable.name)}`, a variable of "
                f"`{type(optimizer).__name__}`, is not known: create it with `add_variable_from_reference`, or keep "
                "such variables in a list with one for each variable of the model"
            )


def _check_whole(handles: set[int]) -> None:
    """Reject a checkpoint that would silently omit a part of the model.

    TensorFlow does not find layers of Keras 3 that are in a list.
    """
    assert state.model is not None, "it is partitioned"
    with state.model._smp_all_variables():
        for variable in state.model.weights:
            if id(handle_of(variable)) not in handles:
                raise SMPCheckpointError(
                    f"`{getattr(variable, 'path', variable.name)}` is a variable of the model that "
                    f"`tf.train.Checkpoint` does not find: give "
                    "its layer an attribute of its own, or save the optimizer, too"
                )


def write(checkpoint: tf.train.Checkpoint, file_prefix: str) -> None:
    """Write a checkpoint; all ranks call it, and none returns before it is complete.

    Raises:
        SMPUsageError: The model is not partitioned yet.
        SMPCheckpointError: A rank could not write its part; raised on all ranks.
    """
    groups = state.groups
    rank, writes, is_first = groups.rank_in("pp"), groups.rank_in("dp") == 0, groups.rank == 0
    entries = checked_entries(checkpoint, file_prefix)
    # The core's attempt folders are on local file systems only, not on those that TensorFlow implements itself.
    number = shares.next_save_id()
    staging = RemoteStaging(file_prefix) if "://" in file_prefix else StagingFolder(file_prefix, number)
    try:
        folder = raise_on_all_ranks(staging.open if is_first else _nothing, file_prefix)[0]

        def part() -> str | None:
            # The first rank writes the entries that every rank has.
            mine = [(name, piece, tensor) for name, piece, _, home, tensor in entries if (home or 0) == rank]
            return _write_part(f"{folder}/part-{rank:05d}", mine)

        parts = raise_on_all_ranks(part if writes else _nothing, file_prefix)
        written_parts = [each for each in parts if each is not None]
        raise_on_all_ranks(lambda: staging.merge(written_parts) if is_first else None, file_prefix)
    finally:
        staging.close()


def _nothing() -> None:
    pass


def _write_part(prefix: str, entries: list[tuple[str, str, Any]]) -> str | None:
    if not entries:
        return None
    names, pieces, tensors = zip(*entries, strict=True)
    with tf.init_scope(), tf.device("/device:CPU:0"):
        values = [tf.convert_to_tensor(tensor() if callable(tensor) else tensor) for tensor in tensors]
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=pieces, tensors=values)
    return prefix
