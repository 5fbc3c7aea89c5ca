"""Sends pickled objects between processes; TensorFlow tensors are sent as arrays and arrive as tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed._common import unpickling
from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.tensorflow.state import state

#: Tags in the group of all ranks: for a message, and for its acknowledgement.
_CONTENT, _TAKEN = 1, 2


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.numpy() if isinstance(value, tf.Tensor) and hasattr(value, "numpy") else None


def _packed(value: Any) -> np.ndarray:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return np.frombuffer(file.getvalue(), np.uint8)


def _unpacked(message: np.ndarray, rank: int) -> Any:
    """Unpickle a message of global rank ``rank``."""
    return unpickling.loads(message.tobytes(), f"rank {rank}", tf.convert_to_tensor)


def _send(values: np.ndarray, rank: int, tag: int) -> None:
    message = call(core_ops.smd_send, tensor=tf.constant(values), peer=rank, tag=tag, group=_world())
    call(core_ops.smd_sent, messages=[message])


def _recv(size: int, kind: tf.DType, rank: int, tag: int) -> np.ndarray:
    return call(core_ops.smd_recv, shape=[size], T=kind, peer=rank, tag=tag, group=_world()).numpy()


def send_object(value: Any, ranks: list[int]) -> None:
    """Send ``value`` to other global ranks; return when they have received it."""
    message = _packed(value)
    with tf.init_scope(), tf.device("/device:CPU:0"):
        for rank in ranks:
            _send(np.array([message.size], np.int64), rank, _CONTENT)
            _send(message, rank, _CONTENT)
        for rank in ranks:
            _recv(1, tf.uint8, rank, _TAKEN)


def receive_object(rank: int) -> Any:
    """Receive an object from another global rank."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        size = int(_recv(1, tf.int64, rank, _CONTENT)[0])
        message = _recv(size, tf.uint8, rank, _CONTENT)
        _send(np.zeros(1, np.uint8), rank, _TAKEN)
    return _unpacked(message, rank)


def _world() -> int | None:
    return state.groups.objects("world")


def gather(value: Any, name: str) -> list[Any]:
    """Gather the values of all ranks of a group, in their order."""
    members, ours = state.groups.members[name], state.groups.objects(name)
    message = _packed(value)
    if len(members) == 1:
        return [_unpacked(message, members[0])]
    with tf.init_scope(), tf.device("/device:CPU:0"):
        whole = call(core_ops.smd_all_gather, tensor=tf.constant(message), group=ours)
    parts = np.split(whole.output.numpy(), np.cumsum(whole.rows.numpy())[:-1])
    return [_unpacked(part, rank) for rank, part in zip(members, parts, strict=True)]
