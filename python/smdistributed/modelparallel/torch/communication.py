"""Objects between processes: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Anything that can be pickled. Tensors inside are not pickled: the rest travels as one message, then each tensor as its
own. None of this shares an order with the pipeline's transfers, and it works before the first step.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.objects import Objects
from smdistributed.modelparallel.torch.state import state

#: Tags in the group of all ranks: what a message holds, and that it has been taken.
_CONTENT, _TAKEN = 1, 2


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


def _gather(value: Any, name: str) -> list[Any]:
    members, ours = state.groups.members[name], state.groups.objects(name)
    messages = _packed(value)
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


def _meet(name: str) -> None:
    dist.barrier(state.groups.objects(name))


objects = Objects(lambda: state.groups, _post, _take, _gather, _meet)
send, recv_from, broadcast, allgather = objects.send, objects.recv_from, objects.broadcast, objects.allgather
barrier, mp_barrier, dp_barrier, pp_barrier = (
    objects.barrier,
    objects.mp_barrier,
    objects.dp_barrier,
    objects.pp_barrier,
)
tp_barrier, rdp_barrier = objects.tp_barrier, objects.rdp_barrier
