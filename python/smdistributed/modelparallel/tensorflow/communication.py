"""Objects between processes: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Anything that can be pickled; tensors of TensorFlow travel as arrays and come as tensors. None of this shares an order
with the pipeline's transfers, and it works before the first step.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from smdistributed import _core
from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.objects import Objects
from smdistributed.modelparallel.tensorflow.state import state

_T = TypeVar("_T")
#: Tags in the group of all ranks: what a message holds, and that it has been taken.
_CONTENT, _TAKEN = 1, 2


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
            return tf.convert_to_tensor, (value.numpy(),)
        return NotImplemented


def _packed(value: Any) -> np.ndarray:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return np.frombuffer(file.getvalue(), np.uint8)


def _unpacked(message: np.ndarray) -> Any:
    return pickle.loads(message.tobytes())


def _send(values: np.ndarray, rank: int, tag: int) -> None:
    message = call(core_ops.smd_send, tensor=tf.constant(values), peer=rank, tag=tag, group=_world())
    call(core_ops.smd_sent, messages=[message])


def _recv(size: int, kind: tf.DType, rank: int, tag: int) -> np.ndarray:
    return call(core_ops.smd_recv, shape=[size], T=kind, peer=rank, tag=tag, group=_world()).numpy()


def _post(value: Any, ranks: list[int]) -> None:
    """Gives ``value`` to other global ranks; returns when they have it."""
    message = _packed(value)
    with tf.init_scope(), tf.device("/device:CPU:0"):
        for rank in ranks:
            _send(np.array([message.size], np.int64), rank, _CONTENT)
            _send(message, rank, _CONTENT)
        for rank in ranks:
            _recv(1, tf.uint8, rank, _TAKEN)


def _take(rank: int) -> Any:
    with tf.init_scope(), tf.device("/device:CPU:0"):
        size = int(_recv(1, tf.int64, rank, _CONTENT)[0])
        message = _recv(size, tf.uint8, rank, _CONTENT)
        _send(np.zeros(1, np.uint8), rank, _TAKEN)
    return _unpacked(message)


def _world() -> int | None:
    return state.groups.objects("world")


def _gather(value: Any, name: str) -> list[Any]:
    members, ours = state.groups.members[name], state.groups.objects(name)
    message = _packed(value)
    if len(members) == 1:
        return [_unpacked(message)]
    with tf.init_scope(), tf.device("/device:CPU:0"):
        whole = call(core_ops.smd_all_gather, tensor=tf.constant(message), group=ours)
    parts = np.split(whole.output.numpy(), np.cumsum(whole.rows.numpy())[:-1])
    return [_unpacked(part) for part in parts]


def _meet(name: str) -> None:
    _core.barrier(state.groups.objects(name))


objects = Objects(lambda: state.groups, _post, _take, _gather, _meet)
send, recv_from, broadcast, allgather = objects.send, objects.recv_from, objects.broadcast, objects.allgather
barrier, mp_barrier, dp_barrier, pp_barrier = (
    objects.barrier,
    objects.mp_barrier,
    objects.dp_barrier,
    objects.pp_barrier,
)
tp_barrier, rdp_barrier = objects.tp_barrier, objects.rdp_barrier


def together(do: Callable[[], _T], path: str) -> list[_T]:
    """What ``do``, which writes ``path``, returns on each rank. All ranks call it, and none returns before all have ended; what
    goes wrong on any is raised on all.

    Raises:
        SMPCheckpointError: that.
    """
    result, failure, cause = None, None, None
    try:
        result = do()
    except Exception as error:
        failure, cause = f"rank {state.groups.rank}: {type(error).__name__}: {error}", error
    results, failures = zip(*allgather((result, failure)), strict=True)
    if any(failures):
        what = "; ".join(each for each in failures if each)
        raise SMPCheckpointError(f"the checkpoint `{path}` could not be written: {what}") from cause
    return list(results)
