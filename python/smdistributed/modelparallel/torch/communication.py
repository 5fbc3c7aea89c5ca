"""Communication of Python objects: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Objects are pickled; receivers accept the types that :mod:`smdistributed._common.unpickling` allows. Tensors inside an
object are not pickled: each is sent as a message of its own, after the message with the rest. These operations use
separate process groups, so they are not ordered with the pipeline's transfers, and work before the first step.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from smdistributed._common import errors, unpickling
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel import failures
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.objects import CommGroup, Objects
from smdistributed.modelparallel.torch.state import state

_T = TypeVar("_T")
#: Tags in the group of all ranks: for a message, and for its acknowledgement.
_CONTENT, _ACK = 1, 2


#: A tensor's index among the messages, its shape, type and kind of device, and whether it is a parameter that
#: requires a gradient. Plain data, which :mod:`smdistributed._common.unpickling` accepts without allowing any name.
_Key = tuple[int, tuple[int, ...], str, str, bool | None]
#: Element types by name.
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Pickler(pickle.Pickler):
    """Leaves tensors out of the pickle, and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> _Key | None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return None
        if value.is_quantized or value.device.type not in ("cpu", "cuda"):
            return None
        self.tensors.append(value.detach().contiguous())
        learns = value.requires_grad if isinstance(value, torch.nn.Parameter) else None
        return len(self.tensors) - 1, tuple(value.shape), str(value.dtype), value.device.type, learns


def _tensor(contents: list[torch.Tensor], on_host: bool, key: _Key) -> torch.Tensor:
    """Recreate a tensor: on the host, or if it was on a device and not ``on_host``, on the current device."""
    index, sizes, dtype_name, device, learns = key
    shape = torch.Size(sizes)
    dtype = _DTYPES[dtype_name]
    tensor = contents[index].view(dtype).view(shape) if shape.numel() else torch.empty(shape, dtype=dtype, device="cpu")
    if not on_host:
        tensor = tensor.to(device)
    return tensor if learns is None else torch.nn.Parameter(tensor, requires_grad=learns)


def _packed(value: Any) -> list[torch.Tensor]:
    """Convert an object to byte messages: the pickle, then each tensor."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    whole = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return [whole, *(tensor.cpu().reshape(-1).view(torch.uint8) for tensor in pickler.tensors)]


def _unpacked(messages: list[torch.Tensor], on_host: bool, rank: int) -> Any:
    """Unpickle the messages of global rank ``rank``."""
    whole, *contents = messages
    return unpickling.loads(whole.numpy().tobytes(), f"rank {rank}", functools.partial(_tensor, contents, on_host))


def _send_value(value: Any, ranks: list[int]) -> None:
    """Send ``value`` to other global ranks; return when they have received it."""
    _send(_packed(value), ranks)


def _send(messages: list[torch.Tensor], ranks: list[int]) -> None:
    sizes = torch.tensor([message.numel() for message in messages], device="cpu")
    works = []
    for rank in ranks:
        works.append(dist.isend(torch.tensor([len(messages)], device="cpu"), rank, _world(), _CONTENT))
        works += [dist.isend(message, rank, _world(), _CONTENT) for message in (sizes, *messages) if message.numel()]
    acks = [dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), rank, _world(), _ACK) for rank in ranks]
    for work in (*works, *acks):
        work.wait()


def _receive_value(rank: int, on_host: bool = False) -> Any:
    count = torch.empty(1, dtype=torch.int64, device="cpu")
    dist.recv(count, rank, _world(), _CONTENT)
    sizes = torch.empty(int(count), dtype=torch.int64, device="cpu")
    dist.recv(sizes, rank, _world(), _CONTENT)
    messages = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes.tolist()]
    for message in messages:
        if message.numel():
            dist.recv(message, rank, _world(), _CONTENT)
    dist.isend(torch.zeros(1, dtype=torch.uint8, device="cpu"), rank, _world(), _ACK).wait()
    return _unpacked(messages, on_host, rank)


def _world() -> dist.ProcessGroup | None:
    return state.groups.objects("world")


def _gather(value: Any, name: str) -> list[Any]:
    return _exchanged(_packed(value), name, on_host=False)


def _exchanged(messages: list[torch.Tensor], name: str, on_host: bool) -> list[Any]:
    members, ours = state.groups.members[name], state.groups.objects(name)
    if len(members) == 1:
        return [_unpacked(messages, on_host, members[0])]
    counts = torch.empty(len(members), dtype=torch.int64, device="cpu")
    dist.all_gather_into_tensor(counts, torch.tensor([len(messages)], device="cpu"), ours)
    sizes = [torch.empty(count, dtype=torch.int64, device="cpu") for count in counts.tolist()]
    dist.all_gather(sizes, torch.tensor([message.numel() for message in messages], device="cpu"), ours)
    whole = [torch.empty(int(size.sum()), dtype=torch.uint8, device="cpu") for size in sizes]
    dist.all_gather(whole, torch.cat(messages), ours)
    # Copied, because a tensor's bytes may begin at an unaligned offset of the gathered buffer.
    return [
        _unpacked([part.clone() for part in content.split(size.tolist())], on_host, rank)
        for rank, content, size in zip(members, whole, sizes, strict=True)
    ]


def raise_on_all_ranks(
    do: Callable[[], _T], group: CommGroup, what: str, same: Callable[[_T], Any] | None = None
) -> _T:
    """Return the result of ``do`` after all ranks of ``group`` have run it; a failure on one raises on all.

    All ranks of the group call it. ``do`` itself may only use operations that fail on all their ranks.

    Args:
        do: The function, which every rank calls.
        group: The ranks that call it.
        what: The beginning of the error, such as "the state could not be gathered".
        same: Returns the part of the result that must be equal on all ranks.

    Raises:
        SMPCheckpointError: ``do`` failed, here or on another rank, or ranks disagree.
    """
    return failures.raise_on_all_ranks(do, state.groups.rank, lambda value: allgather(value, group), what, same)


def gather_on_host(
    make: Callable[[], Any],
    group: CommGroup,
    *,
    first_only: bool = False,
    what: str = "the state could not be gathered",
) -> list[Any]:
    """Return the results of ``make`` of all ranks of ``group``, with tensors in host memory.

    Every rank gets them, or only the first one, and the others get an empty list.

    Raises:
        SMPCheckpointError: ``make`` failed, here or on another rank, or its value cannot be pickled.
    """
    messages = raise_on_all_ranks(lambda: _packed(make()), group, what)
    with errors.translated(CLASSES):
        members = state.groups.members[group.value]
        if not first_only or len(members) == 1:
            return _exchanged(messages, group.value, on_host=True)
        if state.groups.rank != members[0]:
            _send(messages, members[:1])
            return []
        mine = [message.clone() for message in messages]
        return [_unpacked(mine, True, members[0]), *(_receive_value(rank, on_host=True) for rank in members[1:])]


def _barrier(name: str) -> None:
    dist.barrier(state.groups.objects(name))


objects = Objects(lambda: state.groups, _send_value, _receive_value, _gather, _barrier)
send, recv_from, broadcast, allgather = objects.send, objects.recv_from, objects.broadcast, objects.allgather
barrier, mp_barrier, dp_barrier, pp_barrier = (
    objects.barrier,
    objects.mp_barrier,
    objects.dp_barrier,
    objects.pp_barrier,
)
tp_barrier, rdp_barrier = objects.tp_barrier, objects.rdp_barrier
