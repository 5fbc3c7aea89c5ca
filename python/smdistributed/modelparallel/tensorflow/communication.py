"""Objects between processes: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Anything that can be pickled; tensors of TensorFlow travel as arrays and come as tensors. None of this shares an order
with the pipeline's transfers, and it works before the first step.
"""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import CLASSES, SMPValidationError
from smdistributed.modelparallel.tensorflow.state import state

#: Tags in the group of all ranks: what a message holds, and that it has been taken.
_CONTENT, _TAKEN = 1, 2


class CommGroup(enum.Enum):
    """Groups of ranks."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """In which group a rank is meant."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


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
    call(core_ops.smd_send, tensor=tf.constant(values), peer=rank, tag=tag, group=_world())


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


def _global_rank(rank: int, rank_type: RankType) -> int:
    if not isinstance(rank_type, RankType):
        raise SMPValidationError(f"the kind of rank is {rank_type!r}: expected one of `smp.RankType`")
    members = state.groups.members[rank_type.value]
    if not 0 <= rank < len(members):
        raise SMPValidationError(f"{rank_type.name} {rank} does not exist: there are {len(members)}")
    if members[rank] == state.groups.rank:
        raise SMPValidationError(f"{rank_type.name} {rank} is this process itself")
    return members[rank]


def _name(group: CommGroup) -> str:
    if not isinstance(group, CommGroup):
        raise SMPValidationError(f"the group is {group!r}: expected one of `smp.CommGroup`")
    return group.value


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Gives ``obj`` to one rank, which calls :func:`recv_from`; returns when it has it."""
    with errors.translated(CLASSES):
        _post(obj, [_global_rank(dest_rank, rank_type)])


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """What ``src_rank`` sends or broadcasts."""
    with errors.translated(CLASSES):
        return _take(_global_rank(src_rank, rank_type))


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Gives ``obj`` to all others of ``group``, each of which calls :func:`recv_from`; returns when they have it."""
    with errors.translated(CLASSES):
        _post(obj, [rank for rank in state.groups.members[_name(group)] if rank != state.groups.rank])


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """The objects of all ranks of ``group``, in the order of their ranks inside it. All of them call it."""
    with errors.translated(CLASSES):
        members, ours = state.groups.members[_name(group)], state.groups.objects(_name(group))
        message = _packed(obj)
        if len(members) == 1:
            return [_unpacked(message)]
        with tf.init_scope(), tf.device("/device:CPU:0"):
            whole = call(core_ops.smd_all_gather, tensor=tf.constant(message), group=ours)
        parts = np.split(whole.output.numpy(), np.cumsum(whole.rows.numpy())[:-1])
        return [_unpacked(part) for part in parts]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when every rank of ``group`` has called it."""
    with errors.translated(CLASSES):
        name = _name(group)
        if len(state.groups.members[name]) > 1:
            _core.barrier(state.groups.objects(name))


def mp_barrier() -> None:
    """:func:`barrier` of the ranks that hold one model together."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """:func:`barrier` of the ranks that hold the same partition."""
    barrier(CommGroup.DP_GROUP)


def pp_barrier() -> None:
    """:func:`barrier` of the ranks of one pipeline."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """:func:`barrier` of the ranks that share the layers of one partition."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """:func:`barrier` of the ranks that hold the same parts of the same partition."""
    barrier(CommGroup.RDP_GROUP)
