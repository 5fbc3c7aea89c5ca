"""Broadcast of a step's arguments: all ranks of a pipeline compute with those of its first rank.

- FEED-1: structure, tensors and plain data (numbers, strings, arrays) are those of the first rank. A rank's own
  arguments provide only objects that cannot be sent (FEED-2).
- FEED-2: modules, optimizers, lambdas and instances of other classes are each rank's own. The n-th such object of an
  argument replaces the n-th one of the first rank. If a rank has no object of that class, the first rank sends a
  copy, if it can be pickled.
- FEED-3: tensors that share a storage on the first rank share one on the others, and have equal strides. Only the
  memory that they cover is sent and allocated.
- FEED-4: ranks compare digests of everything except the tensors' values. If the digests are equal, only the values are
  sent. Values are always sent, because comparing them costs more.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed._common import unpickling
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPMismatchError, SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import communication
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.pytree import ATOMS
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter, RemoteTensor, offset_of
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages

#: Smaller tensors on CPUs are sent in one message.
_SMALL = 1 << 18
_ALIGNMENT = 16
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray, slice, range, Mapping, enum.Enum)
#: Packages whose classes hold plain data.
_DATA_MODULES = frozenset({"numpy", "datetime", "decimal", "fractions", "pathlib", "uuid", "collections", "copyreg"})


class _Own(NamedTuple):
    """An object that is not sent: its argument, its index among such objects of the argument, and its class."""

    argument: str
    place: int
    kind: str


class _Description(pickle.Pickler):
    """One argument without tensors and without objects that are each rank's own.

    Args:
        file: The output file of the pickle.
        argument: The argument's name.
        tensors: Collects the tensors with their numbers, by id; shared by all arguments, so that a tensor in two of
        them stays one tensor.
    """

    def __init__(self, file: io.BytesIO, argument: str, tensors: dict[int, tuple[int, torch.Tensor]]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._argument, self._tensors = argument, tensors
        self._places: dict[int, int] = {}
        self.own: list[Any] = []

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        kind = type(value)
        if kind in ATOMS:
            return None
        if isinstance(value, torch.Tensor):
            if kind is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
                if value.device.type in ("cpu", "cuda"):
                    return "tensor", self._tensors.setdefault(id(value), (len(self._tensors), value))[0]
            elif kind not in (RemoteTensor, MetaParameter, torch.nn.Parameter):
                return None
        elif isinstance(value, types.FunctionType | type):
            # Other classes cannot be imported by the receiver.
            if "<" not in value.__qualname__:
                return None
        elif isinstance(value, _CONTAINERS) or kind.__module__.split(".")[0] in _DATA_MODULES or _is_decomposed(value):
            return None
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.own)
            self.own.append(value)
        return "own", _Own(self._argument, place, _kind(value))


class _Reader(pickle.Unpickler):
    """Recreates an argument from its description."""

    def __init__(self, content: bytes, tensors: Sequence[torch.Tensor], own: Mapping[_Own, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors, self._own = tensors, own

    def persistent_load(self, key: tuple[str, Any]) -> Any:
        return _looked_up(self._tensors, self._own, key)


def _looked_up(tensors: Sequence[torch.Tensor], own: Mapping[_Own, Any], key: tuple[str, Any]) -> Any:
    what, which = key
    return tensors[which] if what == "tensor" else own[which]


class _Layout(NamedTuple):
    """The location of a tensor on the first rank: its segment, and its offset in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_conj: bool
    is_neg: bool
    segment: int
    offset: int


class _Segment(NamedTuple):
    """Memory that is sent as one message; ``is_dense``: the values of a single tensor, without gaps between them.

    Attributes:
        storage: Segments with the same number are in one storage.
        size: Bytes of the message.
        extent: Bytes in the storage.
    """

    device: str
    storage: int
    size: int
    extent: int
    is_dense: bool


class _Header(NamedTuple):
    """Everything except the tensors' values."""

    arguments: dict[str, bytes]
    own: tuple[_Own, ...]
    layouts: tuple[_Layout, ...]
    segments: tuple[_Segment, ...]


class _Arguments:
    """The arguments of one rank."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        found: dict[int, tuple[int, torch.Tensor]] = {}
        self.own: dict[_Own, Any] = {}
        contents = {}
        for name, value in arguments.items():
            file = io.BytesIO()
            description = _Description(file, name, found)
            description.dump(value)
            contents[name] = file.getvalue()
            for place, each in enumerate(description.own):
                self.own[_Own(name, place, _kind(each))] = each
        #: For each segment, a view of all its bytes; for a dense one, the tensor.
        self.memory: list[torch.Tensor] = []
        segments: list[_Segment] = []
        layouts = _layouts([tensor for _, tensor in found.values()], segments, self.memory)
        self.header = _Header(contents, tuple(self.own), layouts, tuple(segments))
        self._tensors = [tensor for _, tensor in found.values()]

    def check_not_stale(self, storages: StaleStorages) -> None:
        """Check that tasks of earlier steps have not written to the tensors.

        Raises:
            SMPUsageError: A task has written to one.
        """
        for tensor in self._tensors:
            storages.check(tensor)


def broadcast_arguments(
    signature: inspect.Signature, args: Any, kwargs: Any, compared: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """Return the first rank's arguments by name, and whether all ranks have equal digests of ``compared``.

    All ranks of the pipeline call it.

    Raises:
        SMPMismatchError: A rank lacks an object that is not sent, or cannot recreate one; raised on all ranks.
        SMPUsageError: The first rank cannot send its arguments; that rank raises the original error.
    """
    is_first, failure = state.groups.rank_in("pp") == 0, None
    bound: dict[str, Any] = {}
    passed = _Arguments({})
    try:
        # If a later rank lacks an object, the first rank sends it.
        bound = (signature.bind if is_first else signature.bind_partial)(*args, **kwargs).arguments
        passed = _Arguments(bound)
        if is_first and state.model is not None and state.model.pipeline is not None:
            passed.check_not_stale(state.model.pipeline.stale_storages)
    except Exception as error:
        # Only the first rank's failure matters, because other ranks' arguments are not used.
        failure = error if is_first else None
    _warn_of_own_tensors(passed.own)
    rng_state = state.require_model().rng_state
    generators = rng_state.states()
    gathered = _compared(failure is not None, passed.header, generators, list(compared))
    if gathered[0][0]:
        text = communication.allgather(f"{type(failure).__name__}: {failure}", CommGroup.PP_GROUP)[0]
        if failure is not None:
            raise failure
        raise SMPUsageError(f"the first rank of this pipeline cannot pass its arguments to the step: {text}")
    rng_state.follow_first(generators, all(each[3:5] == gathered[0][3:5] for each in gathered))
    are_equal = all(each[5:] == gathered[0][5:] for each in gathered)
    header = passed.header
    own = passed.own
    if any(each[:3] != gathered[0][:3] for each in gathered):
        header = _sent_header(passed.header)
        own = _completed(header, passed)
    memory = _sent_memory(header, passed.memory if is_first else None)
    if is_first:
        return bound, are_equal
    tensors = [_placed(layout, header.segments[layout.segment], memory) for layout in header.layouts]
    if header is passed.header:
        # This rank pickled the header itself.
        contents = {name: _Reader(content, tensors, own).load() for name, content in header.arguments.items()}
    else:
        look_up = functools.partial(_looked_up, tensors, own)
        contents = {name: unpickling.loads(content, _first(), look_up) for name, content in header.arguments.items()}
    return contents, are_equal


def _compared(has_failed: bool, *contents: Any) -> list[list[int]]:
    """Return for all ranks whether they failed, and a digest of each of ``contents`` as two numbers."""
    numbers = [int(has_failed)]
    for content in contents:
        digest = hashlib.blake2b(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL), digest_size=16).digest()
        numbers += [int.from_bytes(part, "little", signed=True) for part in (digest[:8], digest[8:])]
    size = len(state.groups.members["pp"])
    gathered = torch.empty(size * len(numbers), dtype=torch.int64, device="cpu")
    dist.all_gather_into_tensor(gathered, torch.tensor(numbers, device="cpu"), state.groups.pp_group)
    return gathered.view(size, -1).tolist()


def _sent_header(header: _Header) -> _Header:
    """Return the first rank's header."""
    content = torch.frombuffer(bytearray(pickle.dumps(header, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
    size = torch.tensor([content.numel()], device="cpu")
    _broadcast(size)
    if state.groups.rank_in("pp"):
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    _broadcast(content)
    return unpickling.loads(content.numpy().tobytes(), _first())


def _first() -> str:
    return f"rank {state.groups.members['pp'][0]}"


def _completed(header: _Header, passed: _Arguments) -> dict[_Own, Any]:
    """Return this rank's own objects; where it lacks one, a copy of the first rank's.

    Raises:
        SMPMismatchError: A missing object cannot be copied, or another rank cannot recreate an argument.
    """
    is_first = state.groups.rank_in("pp") == 0
    # The process has one model and one optimizer, which replace those of the first rank in any argument.
    known = {_kind(each): each for each in (state.model, state.optimizer)}
    own = passed.own | {key: known[key.kind] for key in header.own if key not in passed.own and key.kind in known}
    missing = [key for key in header.own if key not in own]
    stories = communication.allgather(missing, CommGroup.PP_GROUP)
    wanted = dict.fromkeys(key for story in stories for key in story)
    failures = []
    for key in wanted:
        copy, text = None, None
        if is_first:
            copy, text = _copied(passed.own[key])
        copy, text = communication.allgather((copy, text), CommGroup.PP_GROUP)[0]
        if text is not None:
            ranks = [rank for rank, story in enumerate(stories) if key in story]
            failures.append(
                f"the argument `{key.argument}` has a `{key.kind}` on partition 0, which is not sent ({text}), and "
                f"none on partition {ranks[0]}"
            )
        elif key in missing:
            own[key] = copy
    if failures:
        raise SMPMismatchError(f"{failures[0]}: pass it on all ranks")
    _check_readable(header, own)
    return own


def _copied(value: Any) -> tuple[Any, str | None]:
    """Return ``value`` if it can be sent, or the reason why not."""
    if isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer):
        return None, "modules and optimizers never are"
    try:
        pickle.dumps(value)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return value, None


def _check_readable(header: _Header, own: Mapping[_Own, Any]) -> None:
    """Check on all ranks that all can recreate the arguments, before any tensor is sent."""
    failure = None
    if state.groups.rank_in("pp"):
        memory = _new_memory(header, torch.zeros)
        blank = [_placed(layout, header.segments[layout.segment], memory) for layout in header.layouts]
        for name, content in header.arguments.items():
            try:
                unpickling.loads(content, _first(), functools.partial(_looked_up, blank, own))
            except Exception as error:
                failure = (
                    f"partition {state.groups.rank_in('pp')} cannot rebuild the argument `{name}`: "
                    f"{type(error).__name__}: {error}"
                )
                break
    failures = [each for each in communication.allgather(failure, CommGroup.PP_GROUP) if each is not None]
    if failures:
        raise SMPMismatchError(failures[0])


def _layouts(
    tensors: Sequence[torch.Tensor], segments: list[_Segment], memory: list[torch.Tensor]
) -> tuple[_Layout, ...]:
    """Divide the memory of tensors into segments; overlapping tensors are in one segment (FEED-3).

    Segments are in the order of their first tensors, because the order of addresses may differ between ranks
    (FEED-4).
    """
    first_uses: dict[int, int] = {}
    ranges = []
    for place, tensor in enumerate(tensors):
        storage, start, stop = _range(tensor)
        ranges.append(((first_uses.setdefault(storage, place), start, stop), place))
    ranges.sort()
    found: dict[int, _Layout] = {}
    begin = 0
    while begin < len(ranges):
        (storage, start, stop), _ = ranges[begin]
        end = begin + 1
        while end < len(ranges) and ranges[end][0][0] == storage and ranges[end][0][1] < stop:
            stop = max(stop, ranges[end][0][2])
            end += 1
        start -= start % _ALIGNMENT
        first = tensors[ranges[begin][1]]
        content = first.numel() * first.element_size()
        is_dense = end == begin + 1 and stop - start > 2 * content
        extent = stop - start
        segments.append(_Segment(first.device.type, storage, content if is_dense else extent, extent, is_dense))
        memory.append(
            _flipped(first.detach(), first.is_conj(), first.is_neg()) if is_dense else _bytes(first, start, extent)
        )
        for (_, at, _), place in ranges[begin:end]:
            tensor = tensors[place]
            found[place] = _Layout(
                tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_conj(),
                tensor.is_neg(), len(segments) - 1, at - start,
            )  # fmt: skip
        begin = end
    return tuple(found[place] for place in range(len(tensors)))


def _range(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor's storage, and the range of bytes from its first element to its last."""
    if not tensor.numel():
        return -id(tensor), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = offset_of(tensor) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start, start + (last + 1) * tensor.element_size()


def _bytes(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), start, (size,), (1,))


def _sent_memory(header: _Header, mine: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Send the memory of all segments; return it on the ranks that receive it, where ``mine`` is ``None``."""
    small = [place for place, each in enumerate(header.segments) if each.device == "cpu" and each.size < _SMALL]
    homes: list[torch.Tensor] = []
    if mine is None:
        homes = _new_memory(header, torch.empty)
        found = [home[: segment.size] for home, segment in zip(homes, header.segments, strict=True)]
    else:
        found = [
            _dense(each) if segment.is_dense else each for each, segment in zip(mine, header.segments, strict=True)
        ]
    if small:
        joined = torch.cat([found[place] for place in small])
        _broadcast(joined)
        if mine is None:
            sizes = [header.segments[place].size for place in small]
            for place, part in zip(small, joined.split(sizes), strict=True):
                found[place].copy_(part)
    for place in range(len(found)):
        if place not in small:
            _broadcast(found[place])
    return homes


def _new_memory(header: _Header, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for all segments; those of one storage are parts of one tensor (FEED-3)."""
    places: dict[int, list[int]] = {}
    for place, segment in enumerate(header.segments):
        places.setdefault(segment.storage, []).append(place)
    found: dict[int, torch.Tensor] = {}
    for group in places.values():
        segments = [header.segments[place] for place in group]
        sizes = [-(-segment.extent // _ALIGNMENT) * _ALIGNMENT for segment in segments]
        device = current_device() if segments[0].device == "cuda" else "cpu"
        whole = make(sum(sizes), dtype=torch.uint8, device=device)
        for place, segment, part in zip(group, segments, whole.split(sizes), strict=True):
            found[place] = part[: segment.extent]
    return [found[place] for place in range(len(header.segments))]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _placed(layout: _Layout, segment: _Segment, memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the first rank as a view of the received memory."""
    whole = memory[layout.segment]
    tensor = torch.empty(0, dtype=layout.dtype, device=whole.device)
    offset = (offset_of(whole) + layout.offset) // layout.dtype.itemsize
    values = whole[: segment.size].clone().view(layout.dtype).view(layout.shape) if segment.is_dense else None
    tensor.set_(whole.untyped_storage(), offset, layout.shape, layout.stride)
    if values is not None:
        tensor.copy_(values)
    return _flipped(tensor, layout.is_conj, layout.is_neg).requires_grad_(layout.requires_grad)


def _flipped(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """Return a view with the bits flipped with which PyTorch defers conjugation and negation."""
    tensor = tensor.conj() if conjugate else tensor
    return torch._neg_view(tensor) if negative else tensor


def _broadcast(tensor: torch.Tensor) -> None:
    if tensor.numel():
        dist.broadcast(tensor, state.groups.members["pp"][0], state.groups.pp_group)


def _is_decomposed(value: Any) -> bool:
    """Return whether pickle decomposes this object, although it is not a container."""
    if isinstance(value, types.BuiltinFunctionType):
        return not isinstance(value.__self__, torch.Tensor)
    return hasattr(value, "smp_slice") or (dataclasses.is_dataclass(value) and _holds_tensors(value))


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _holds_tensors(value: Any) -> bool:
    """Return whether an attribute of ``value``, or an item of one, is a tensor, and none is a module."""
    items = list(getattr(value, "__dict__", {}).values())
    if dataclasses.is_dataclass(value):
        items = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    items += [item for each in items if isinstance(each, list | tuple) for item in each]
    items += [item for each in items if isinstance(each, dict) for item in each.values()]
    return any(isinstance(each, torch.Tensor) for each in items) and not any(
        isinstance(each, torch.nn.Module) for each in items
    )


_warned: set[str] = set()


def _warn_of_own_tensors(own: Mapping[_Own, Any]) -> None:
    for key, value in own.items():
        if isinstance(value, torch.Tensor | torch.nn.Module) or key.kind in _warned or not _holds_tensors(value):
            continue
        _warned.add(key.kind)
        warnings.warn(
            f"the argument `{key.argument}` of a `smp.step` function holds a `{key.kind}` with tensors, which is not "
            "broadcast: each rank uses its own. Only lists, tuples, dictionaries, dataclasses and classes with "
            "`smp_slice` are taken from the pipeline's first rank",
            stacklevel=2,
        )
