"""Broadcasts of variables and objects."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.mpi_ops import allgather, broadcast, broadcast_, rank
from smdistributed._common import unpickling
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.replicas import note_broadcast


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> tf.Operation | None:
    """Assign the root's values to variables on all ranks.

    Args:
        variables: ``tf.Variable`` and Keras variables, the same on all ranks.
        root_rank: Rank in the world whose values are sent.
        process_set: The ranks that take part.
        inplace: Whether to write to the memory of the variables, all at once.

    Returns:
        In a graph of TensorFlow 1, the operation to run; else ``None``.

    Examples:
        >>> hvd.broadcast_variables(model.variables, root_rank=0)
    """
    note_broadcast()
    variables = [underlying(variable) for variable in variables]
    is_tf1 = not tf.executing_eagerly() and not tf.inside_function()
    if inplace:
        by_device: dict[str, list[Any]] = {}
        for variable in variables:
            by_device.setdefault(variable.device or "", []).append(variable)
        values = []
        for device, together in by_device.items():
            with tf.device(device):
                values += broadcast_(together, root_rank, process_set=process_set)
        return tf.group(*values) if is_tf1 else None
    assigned = [variable.assign(broadcast(variable, root_rank, process_set=process_set)) for variable in variables]
    return tf.group(*assigned) if is_tf1 else None


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return the operation that assigns the root's values to all global variables of a graph of TensorFlow 1.

    Args:
        root_rank: Rank in the world whose values are sent.

    Returns:
        The operation to run.

    Raises:
        RuntimeError: In eager mode, which has no such collection.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcast all global variables from one rank when a ``MonitoredTrainingSession`` is created.

    Args:
        root_rank: Rank in the world whose values are sent.
        device: Device from which values are sent; by default TensorFlow chooses.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: tf.Operation | None = None
        self.device = device

    def begin(self) -> None:
        """Add the operation to the graph before it is finalized."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcast once the variables have their initial values.

        Args:
            session: The session.
            coord: Ignored.
        """
        session.run(self.bcast_op)


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(unpickling.dumps(obj), dtype=np.uint8)


class _Sender:
    """Runs a collective on arrays.

    It runs at once in eager mode. Otherwise it runs in a session of a graph, for which the operation is created once.
    """

    def __init__(self, session: tf.compat.v1.Session | None, call: Callable[[Any, str], tf.Tensor]) -> None:
        self._session = session
        self._call = call
        self._made: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}

    def make(self, name: str, dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Create the placeholders and the operation; return both."""
        if name not in self._made:
            placeholder = tf.compat.v1.placeholder(dtype, [None])
            self._made[name] = placeholder, self._call(placeholder, name)
        return self._made[name]

    def run(self, values: np.ndarray, name: str) -> np.ndarray:
        if tf.executing_eagerly():
            return self._call(tf.constant(values), name).numpy()
        placeholder, result = self.make(name, values.dtype)
        session = self._session or tf.compat.v1.get_default_session()
        if session is not None:
            return session.run(result, {placeholder: values})
        with tf.compat.v1.Session(graph=placeholder.graph) as once:
            return once.run(result, {placeholder: values})


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank; it is pickled on the way.

    Args:
        obj: The object on the root; ignored on other ranks.
        root_rank: Rank in the world whose object is sent.
        session: Session for a graph of TensorFlow 1; by default the current one.
        name: Matches the ranks' calls: the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        The root's object.
    """
    return broadcast_object_fn(root_rank, session, name or "broadcast_object", process_set)(obj)


def broadcast_object_fn(
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts its argument as :func:`broadcast_object` does.

    In a graph of TensorFlow 1, its operations are created once.

    Args:
        root_rank: Rank in the world whose object is sent.
        session: Session for a graph of TensorFlow 1; by default the current one.
        name: Matches the ranks' calls: the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        A function of the object.
    """
    name = name or "broadcast_object_fn"
    sender = _Sender(session, lambda tensor, full: broadcast(tensor, root_rank, full, process_set=process_set))
    if not tf.executing_eagerly():
        # Created now, because a session may finalize the graph.
        sender.make(f"{name}.sz", np.int64)
        sender.make(f"{name}.t", np.uint8)

    def function(obj: Any) -> Any:
        is_root = rank() == root_rank
        pickled = _pickled(obj) if is_root else np.empty(0, np.uint8)
        length = int(sender.run(np.array([pickled.size], np.int64), f"{name}.sz")[0])
        values = sender.run(pickled if is_root else np.zeros(length, np.uint8), f"{name}.t")
        return obj if is_root else unpickling.loads(values.tobytes(), f"rank {root_rank}")

    return function


def allgather_object(
    obj: Any,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks; they are pickled on the way.

    Args:
        obj: This rank's object.
        session: Session for a graph of TensorFlow 1; by default the current one.
        name: Matches the ranks' calls: the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        The objects in the order of ranks.
    """
    name = name or "allgather_object"
    sender = _Sender(session, lambda tensor, full: allgather(tensor, full, process_set=process_set))
    pickled = _pickled(obj)
    lengths = sender.run(np.array([pickled.size], np.int64), f"{name}.sz")
    gathered = io.BytesIO(sender.run(pickled, f"{name}.t").tobytes())
    return [
        unpickling.loads(gathered.read(length), f"rank {rank} of the process set")
        for rank, length in enumerate(lengths.tolist())
    ]
