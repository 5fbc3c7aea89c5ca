"""Sharded tensors in checkpoints: ranks write whole rows of them, and read the elements of their shards.

A shard holds consecutive elements of a flattened parameter, which in general form no slice of it, whereas a
checkpoint stores slices. While saving, the ranks put together one tensor after the other, and each rank that has a
shard writes some of its rows. While loading, the elements of a shard are read as the few slices that they consist of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.communication import allgather, raise_on_all_ranks
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.nn.shard import Shard
from smdistributed.modelparallel.torch.sharding.piece import Piece
from smdistributed.modelparallel.torch.state import state

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer

_CLASSES = {**CLASSES, "io": SMPCheckpointError, "invalid_argument": SMPCheckpointError}


class Holders(NamedTuple):
    """The ranks that hold the shards of a parameter.

    Attributes:
        group: The group of these ranks.
        members: Global ranks.
        writes: Whether these ranks write the parameter. Other groups of ranks have the same shards and do not write
        it.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    writes: bool


class Rows(NamedTuple):
    """The rows of a tensor that a rank writes.

    Attributes:
        tensor: The rows, in host memory of their own.
        origin: The index of their first element in the whole tensor.
        shape: The shape of the whole tensor.
    """

    tensor: torch.Tensor
    origin: list[int]
    shape: list[int]


def holders(
    model: DistributedModel, optimizer: DistributedOptimizer | None, divided: Mapping[str, Shard]
) -> dict[str, Holders]:
    """Return the ranks that hold the shards of each sharded parameter, or of its state.

    Args:
        model: The model.
        optimizer: The optimizer, if there is one.
        divided: How tensor parallelism divides parameters, by name.

    Returns:
        The holders by parameter name.
    """
    groups, found = state.groups, {}
    if model.sharded is not None:
        for each in model.sharded.parameters():
            own, name = model.sharded.groups_of(each.parameter), each.piece.name
            assert own.sharding is not None
            is_ours = own.number == 0 and (own is groups.sharding or name in divided or groups.rank_in("tp") == 0)
            found[name] = Holders(own.sharding, tuple(own.members), is_ours)
    elif optimizer is not None and optimizer._shards is not None:
        for name, replicas in optimizer._shards.replicas.items():
            assert replicas.group is not None
            kind = "dp" if replicas.group is groups.dp_group else "rdp"
            is_ours = kind == "dp" or name in divided or groups.rank_in("tp") == 0
            found[name] = Holders(replicas.group, tuple(groups.members[kind]), is_ours)
    return found


class _Whole(NamedTuple):
    """A tensor that its holders put together.

    Attributes:
        name: Its name in the checkpoint.
        parameter: The name of its parameter.
        dtype: Its type.
        shape: Its shape.
        group: The holders.
        part: The first row that this rank writes, and the number of rows; ``None`` if it writes none.
    """

    name: str
    parameter: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    group: dist.ProcessGroup
    part: tuple[int, int] | None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def rows(
    shards: Mapping[str, tuple[torch.Tensor, Piece]], held: Mapping[str, Holders], divided: Mapping[str, Shard]
) -> dict[str, Rows]:
    """Put sharded tensors together, one after the other; all ranks of the job call it.

    Args:
        shards: By name in the checkpoint: the elements that this rank holds, and their place in the parameter.
        held: The result of :func:`holders`.
        divided: How tensor parallelism divides parameters, by name.

    Returns:
        By name in the checkpoint, the rows that this rank writes.

    Raises:
        SMPCheckpointError: A rank lacks the memory for the largest tensor; raised on all ranks.
        Exception: This rank failed otherwise; raised after its part in all collectives, so that the caller can
            report it to the other ranks.
    """
    about = {name: (piece.name, str(tensor.dtype), piece.shape) for name, (tensor, piece) in shards.items()}
    everywhere = allgather(about, CommGroup.WORLD)

    def prepare() -> tuple[list[_Whole], torch.Tensor]:
        wholes = _wholes(everywhere, held)
        largest = max((each.nbytes for each in wholes), default=0)
        return wholes, torch.empty(largest, dtype=torch.uint8, device=current_device())

    # Memory for the largest tensor. The all-reduces below need no other, so a rank that lacks it cannot leave the
    # other ranks waiting in one of them.
    wholes, memory = raise_on_all_ranks(prepare, CommGroup.WORLD, "the shards could not be put together")
    found: dict[str, Rows] = {}
    failure: Exception | None = None
    for each in wholes:
        content = memory[: each.nbytes]
        whole = content.view(each.dtype)
        try:
            content.zero_()
            if each.name in shards:
                tensor, piece = shards[each.name]
                whole[piece.start : piece.end].copy_(tensor.detach()[: piece.end - piece.start])
        except Exception as error:
            failure = failure or error
        with errors.translated(CLASSES):
            # Summed as bytes: a sum with zeros keeps every bit. A rank that has failed takes part as well.
            dist.all_reduce(content, ReduceOp.SUM, each.group)
        if each.part is None or failure is not None:
            continue
        first, count = each.part
        try:
            found[each.name] = _written(whole.view(each.shape), first, first + count, divided.get(each.parameter))
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return {name: each for name, each in found.items() if each.tensor.numel()}


def _wholes(everywhere: Sequence[Mapping[str, Any]], held: Mapping[str, Holders]) -> list[_Whole]:
    """Return the tensors that this rank helps to put together, in an order that is equal on all of their holders.

    ``everywhere`` has the shards of each rank: by name in the checkpoint, the name of the parameter, type and shape.
    """
    found: list[_Whole] = []
    for own in dict.fromkeys(each for each in held.values() if each.writes):
        # A rank without shards of some parameter still takes part in putting it together.
        known = {name: each for member in own.members for name, each in everywhere[member].items()}
        names = sorted(name for name, (parameter, *_) in known.items() if held.get(parameter) == own)
        wholes = []
        for name in names:
            parameter, dtype, shape = known[name]
            wholes.append(_Whole(name, parameter, getattr(torch, dtype.split(".")[1]), shape, own.group, None))
        sizes = [(each.shape[0] if each.shape else None, each.nbytes, True) for each in wholes]
        written = dict(_core.checkpoint_shares(sizes, own.members.index(state.groups.rank), len(own.members)))
        for number, each in enumerate(wholes):
            if number in written:
                all_rows = (0, each.shape[0] if each.shape else 1)
                each = each._replace(part=written[number] or all_rows)
            found.append(each)
    return found


def _written(whole: torch.Tensor, first: int, last: int, shard: Shard | None) -> Rows:
    part = whole[first:last] if whole.dim() else whole
    origin, shape = [first] + [0] * (whole.dim() - 1) if whole.dim() else [], list(whole.shape)
    if shard is not None:
        begin, end = shard.bounds(state.groups.rank_in("tp"))
        offset = origin[shard.dim]
        # Padding is not written.
        part = part.narrow(shard.dim, 0, max(0, min(part.shape[shard.dim], end - begin - offset)))
        origin[shard.dim] = begin + offset
        shape = list(shard.whole_shape(shape))
    return Rows(part.to("cpu", copy=True).contiguous(), origin, shape)


class _Read(NamedTuple):
    """A slice to read, and the position of its elements in the shard."""

    start: list[int]
    target: torch.Tensor
    place: torch.Tensor


@torch.no_grad()
def read(
    reader: Any,
    found: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    wanted: Mapping[str, tuple[torch.Tensor, Piece]],
    divided: Mapping[str, Shard],
    threads: int,
) -> None:
    """Read the elements of shards.

    Args:
        reader: The core's reader of the checkpoint.
        found: By name in the checkpoint, the types and shapes.
        wanted: By name in the checkpoint: the one-dimensional tensor to fill, and the place of its elements in the
            parameter.
        divided: How tensor parallelism divides parameters, by name.
        threads: Number of threads that read.

    Raises:
        SMPCheckpointError: A tensor has another shape in the checkpoint, or a file is damaged.
    """
    reads: list[tuple[str, _Read]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, (tensor, piece) in wanted.items():
        dtype, shape = found[name]
        shard = divided.get(piece.name)
        expected = shard.whole_shape(piece.shape) if shard is not None else piece.shape
        if tuple(shape) != tuple(expected):
            raise SMPCheckpointError(
                f"`{name}` has the shape {list(shape)} in checkpoint `{reader.tag}`, and {list(expected)} in the model"
            )
        own = tensor.detach()[: piece.end - piece.start]
        if own.device.type != "cpu" or own.dtype != dtype:
            buffer = torch.zeros(own.shape, dtype=dtype, device="cpu")
            copies.append((own, buffer))
            own = buffer
        reads += [(name, each) for each in _slices_of(own, piece, shard)]
    targets = [
        (name, each.start, list(each.target.shape), each.target.data_ptr(), each.target.nbytes) for name, each in reads
    ]
    with errors.translated(_CLASSES):
        reader.read(targets, threads)
    for _, each in reads:
        if each.target.data_ptr() != each.place.data_ptr():
            each.place.copy_(each.target)
    for target, buffer in copies:
        target.copy_(buffer)


def _slices_of(own: torch.Tensor, piece: Piece, shard: Shard | None) -> Iterator[_Read]:
    for start, lengths, offset in slices(piece.start, piece.end, piece.shape):
        place = own[offset : offset + math.prod(lengths)].view(lengths)
        if shard is not None:
            begin, end = shard.bounds(state.groups.rank_in("tp"))
            length = min(lengths[shard.dim], end - begin - start[shard.dim])
            if length <= 0:
                # Padding is filled with zeros.
                place.zero_()
                continue
            if length < lengths[shard.dim]:
                place.zero_()
                place = place.narrow(shard.dim, 0, length)
            start[shard.dim] += begin
        if place.numel():
            yield _Read(start, place if place.is_contiguous() else torch.empty_like(place).contiguous(), place)


def slices(start: int, end: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int], int]]:
    """Divide elements of a flattened tensor into slices of the tensor.

    Args:
        start: Index of the first element.
        end: Index after the last element.
        shape: The tensor's shape.

    Yields:
        For each slice: its first index and its length in each dimension, and the number of elements before it. The
        elements of a slice are consecutive.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield [start] * len(shape), [end - start] * len(shape), 0
        return
    row = math.prod(shape[1:])
    # The rest of a row that has begun, then whole rows, then the beginning of one.
    cuts = [start, min(end, -(-start // row) * row), max(start, end // row * row), end]
    for low, high in itertools.pairwise(sorted(cuts)):
        if low == high:
            continue
        if low % row == 0 and high % row == 0:
            yield [low // row] + [0] * (len(shape) - 1), [(high - low) // row, *shape[1:]], low - start
            continue
        first = low // row
        for inner, lengths, offset in slices(low - first * row, high - first * row, shape[1:]):
            yield [first, *inner], [1, *lengths], low - start + offset
