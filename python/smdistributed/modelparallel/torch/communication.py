"""Objects between processes: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Anything that can be pickled. Tensors inside are not pickled: the rest travels as one message, then each tensor as its
own. None of this shares an order with the pipeline's transfers, and it works before the first step.
"""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any

import torch

from smdistributed._common import errors
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPValidationError
from smdistributed.modelparallel.torch.state import state

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
    """Leaves tensors out, and keeps them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> tuple[int, torch.Size, torch.dtype, str, bool] | None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return None
        if value.is_quantized or value.device.type not in ("cpu", "cuda"):
            return None
        self.tensors.append(value.detach().contiguous())
        is_parameter = isinstance(value, torch.nn.Parameter)
        return len(self.tensors) - 1, value.shape, value.dtype, value.device.type, is_parameter


class _Unpickler(pickle.Unpickler):
    """Puts tensors where they were; those of a device on the device that is current here."""

    def __init__(self, file: io.BytesIO, contents: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._contents = contents

    def persistent_load(self, key: tuple[int, torch.Size, torch.dtype, str, bool]) -> torch.Tensor:
        index, shape, dtype, device, is_parameter = key
        tensor = self._contents[index].view(dtype).view(shape) if shape.numel() else torch.empty(shape, dtype=dtype)
        tensor = tensor.to(device)
        return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) if is_parameter else tensor


def _packed(value: Any) -> list[torch.Tensor]:
    """Messages of bytes: what was pickled, then each tensor."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    whole = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return [whole, *(tensor.cpu().reshape(-1).view(torch.uint8) for tensor in pickler.tensors)]


def _unpacked(messages: list[torch.Tensor]) -> Any:
    return _Unpickler(io.BytesIO(messages[0].numpy().tobytes()), messages[1:]).load()


def _post(value: Any, ranks: list[int]) -> None:
    """Gives ``value`` to other global ranks; returns when they have it."""
    messages = _packed(value)
    sizes = torch.tensor([message.numel() for message in messages])
    works = []
    for rank in ranks:
        works.append(dist.isend(torch.tensor([len(messages)]), rank, _world(), _CONTENT))
        works += [dist.isend(message, rank, _world(), _CONTENT) for message in (sizes, *messages) if message.numel()]
    taken = [dist.irecv(torch.empty(1, dtype=torch.uint8), rank, _world(), _TAKEN) for rank in ranks]
    for work in (*works, *taken):
        work.wait()


def _take(rank: int) -> Any:
    count = torch.empty(1, dtype=torch.int64)
    dist.recv(count, rank, _world(), _CONTENT)
    sizes = torch.empty(int(count), dtype=torch.int64)
    dist.recv(sizes, rank, _world(), _CONTENT)
    messages = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
    for message in messages:
        if message.numel():
            dist.recv(message, rank, _world(), _CONTENT)
    dist.isend(torch.zeros(1, dtype=torch.uint8), rank, _world(), _TAKEN).wait()
    return _unpacked(messages)


def _world() -> dist.ProcessGroup | None:
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
        messages = _packed(obj)
        if len(members) == 1:
            return [_unpacked(messages)]
        counts = torch.empty(len(members), dtype=torch.int64)
        dist.all_gather_into_tensor(counts, torch.tensor([len(messages)]), ours)
        sizes = [torch.empty(count, dtype=torch.int64) for count in counts.tolist()]
        dist.all_gather(sizes, torch.tensor([message.numel() for message in messages]), ours)
        whole = [torch.empty(int(size.sum()), dtype=torch.uint8) for size in sizes]
        dist.all_gather(whole, torch.cat(messages), ours)
        pairs = zip(whole, sizes, strict=True)
        # Copies: a tensor's bytes begin anywhere in the whole.
        return [_unpacked([part.clone() for part in content.split(size.tolist())]) for content, size in pairs]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when every rank of ``group`` has called it."""
    with errors.translated(CLASSES):
        name = _name(group)
        if len(state.groups.members[name]) > 1:
            dist.barrier(state.groups.objects(name))


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
    """:func:`barrier` of the ranks that share the modules of one partition."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """:func:`barrier` of the ranks that hold the same parts of the same partition."""
    barrier(CommGroup.RDP_GROUP)
