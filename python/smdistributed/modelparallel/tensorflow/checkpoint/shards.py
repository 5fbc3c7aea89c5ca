"""A partitioned model in the core's checkpoints: safetensors shards and a manifest, as PyTorch's manager writes them.

A tensor has the name that it has in TensorFlow's checkpoint. Each rank reads the tensors that it holds, whatever the
numbers of partitions and replicas were when the checkpoint was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel import shares
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError
from smdistributed.modelparallel.saver import Content, Saver
from smdistributed.modelparallel.tensorflow import communication
from smdistributed.modelparallel.tensorflow.checkpoint import saving
from smdistributed.modelparallel.tensorflow.state import state

#: How long a rank waits for others.
_TIMEOUT_SECONDS = 1800.0
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_CLASSES = {**CLASSES, "io": SMPCheckpointError, "invalid_argument": SMPCheckpointError}


class Shards:
    """A directory of such checkpoints. All ranks create it and call its methods.

    Args:
        directory: The path, equal on all ranks, on a file system that all ranks share.
        keep: Number of newest checkpoints to keep; ``None`` for all.
    """

    def __init__(self, directory: str, keep: int | None) -> None:
        groups = state.groups
        self.directory = directory
        cores = len(os.sched_getaffinity(0)) // _core.local_size()
        self._threads = max(1, min(8, cores))
        self._saver = Saver(
            directory,
            groups.rank,
            groups.topology.size,
            lambda value: communication.gather_for("saves or loads", value),
            self._threads,
            True,
            keep,
            _TIMEOUT_SECONDS,
        )

    def tags(self) -> list[str]:
        """Return the complete checkpoints, the newest last."""
        with errors.translated(_CLASSES):
            return [tag for _, tag in _core.checkpoint_list(self.directory)]

    def latest(self) -> str | None:
        """Return the newest complete checkpoint, if there is one."""
        with errors.translated(_CLASSES):
            return _core.checkpoint_newest(self.directory)

    def save(self, checkpoint: tf.train.Checkpoint, tag: str, number: int) -> None:
        """Write a checkpoint, which is complete when this returns.

        Raises:
            SMPCheckpointError: The checkpoint could not be written, here or on another rank; raised on all ranks.
        """
        groups = state.groups
        entries = saving.checked_entries(checkpoint, tag)

        def make() -> Content:
            # Referenced until they are written.
            arrays = dict(_arrays(entries, groups.rank_in("pp")))
            blocks = [
                shares.Block(name, shares.ELEMENTS[_kind(array)], list(array.shape), array.itemsize, array.ctypes.data)
                for name, array in arrays.items()
            ]
            slices = shares.shard_slices(blocks, groups.rank_in("dp"), len(groups.members["dp"]))
            layout = {"pp": len(groups.members["pp"]), "rdp": len(groups.members["dp"])}
            return Content(slices, json.dumps(layout), "{}", arrays)

        self._saver.save(tag, number, make, lambda content: content, asynchronous=False)

    def load(self, checkpoint: tf.train.Checkpoint, tag: str, but_for: Collection[str] = frozenset()) -> frozenset[str]:
        """Load the values of a checkpoint into this rank's variables; a model among them must be partitioned.

        Args:
            checkpoint: The objects to read.
            tag: The checkpoint's tag.
            but_for: Names of values that are not read.

        Returns:
            The names of the values that were read.

        Raises:
            SMPCheckpointError: A value does not fit, or a file is missing or damaged; raised on all ranks.
        """
        path = os.path.join(self.directory, tag)
        read = communication.raise_on_all_ranks(lambda: self._read(checkpoint, tag, but_for), path, "read")
        return read[state.groups.rank]

    def _read(self, checkpoint: tf.train.Checkpoint, tag: str, but_for: Collection[str]) -> frozenset[str]:
        with errors.translated(_CLASSES):
            reader = _core.CheckpointReader(self.directory, tag)
            found = {name: (element, shape) for name, element, shape in reader.tensors()}
        rank, wanted = state.groups.rank_in("pp"), []
        for name, _, trackable, home, _ in saving.serialized(checkpoint):
            if name == _GRAPH or name in but_for:
                continue
            variable = underlying(trackable)
            # Checks the variables of all partitions, so that all ranks get the same result.
            expected = shares.ELEMENTS.get(variable.dtype.name), variable.shape.as_list()
            if found.get(name) != expected:
                has = "nothing" if name not in found else "{} {}".format(*found[name])
                raise SMPCheckpointError(
                    f"checkpoint `{tag}` has {has} as `{name}`: expected {expected[0]} {expected[1]}"
                )
            if home in (None, rank):
                wanted.append((name, variable, np.empty(expected[1], variable.dtype.as_numpy_dtype)))
        targets = [
            (name, [0] * array.ndim, list(array.shape), array.ctypes.data, array.nbytes) for name, _, array in wanted
        ]
        with errors.translated(_CLASSES):
            reader.read(targets, self._threads)
        for _, variable, array in wanted:
            variable.assign(array)
        return frozenset(name for name, _, _ in wanted)


def _arrays(entries: Iterable[Any], rank: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays that the ranks of a partition write."""
    for name, piece, trackable, home, tensor in entries:
        # Only the first rank writes variables that every rank has.
        if name == _GRAPH or (home or 0) != rank:
            continue
        variable = underlying(trackable)
        if piece or not isinstance(variable, tf.Variable) or variable.dtype.name not in shares.ELEMENTS:
            raise SMPCheckpointError(
                f"`{name}`, a {type(trackable).__name__}, cannot be saved in shards: it is not a variable of a dtype "
                "that they can hold"
            )
        with tf.init_scope(), tf.device("/device:CPU:0"):
            array = np.asarray(tf.convert_to_tensor(tensor() if callable(tensor) else tensor))
        yield name, np.ascontiguousarray(array).reshape(array.shape)


def _kind(array: np.ndarray) -> str:
    return tf.as_dtype(array.dtype).name
