"""The tensors that a rank writes into a checkpoint of the core; replicas divide the rows of large ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smdistributed import _core

#: Number of saves in this process, of all managers together.
_SAVES = itertools.count(1)

#: The core's names of element types, by those of the frameworks.
ELEMENTS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
}

#: A slice for `_core.CheckpointSaver.save`.
ShardSlice = tuple[str, str, Sequence[int], Sequence[int], Sequence[int], int, bool]


@dataclass(frozen=True)
class Block:
    """A dense tensor in host memory.

    Attributes:
        element: One of ``ELEMENTS``' values.
        item_bytes: Bytes of one element.
        is_shared: Whether all replicas have it; otherwise this rank writes it.
        is_held: Whether its memory stays unchanged until the checkpoint is complete. The core then makes no copy.
        origin: For a slice of a larger tensor, the indices at which it begins.
        whole_shape: The shape of the larger tensor.
    """

    name: str
    element: str
    shape: list[int]
    item_bytes: int
    address: int
    is_shared: bool = True
    is_held: bool = False
    origin: Sequence[int] | None = None
    whole_shape: Sequence[int] | None = None


def shard_slices(blocks: Iterable[Block], replica: int, replicas: int) -> list[ShardSlice]:
    """Return the slices that this replica writes: its part of the rows of large tensors, and some of the small tensors.

    Args:
        blocks: Equal and in the same order on all replicas, except those that are not shared.
        replica: The number of this replica.
        replicas: How many replicas there are.
    """
    blocks = list(blocks)
    sizes = [
        (block.shape[0] if block.shape else None, math.prod(block.shape) * block.item_bytes, block.is_shared)
        for block in blocks
    ]
    found: list[ShardSlice] = []
    for index, rows in _core.checkpoint_shares(sizes, replica, replicas):
        block = blocks[index]
        start, lengths, offset = [0] * len(block.shape), list(block.shape), 0
        if rows is not None:
            start[0], lengths[0] = rows
            offset = start[0] * math.prod(block.shape[1:]) * block.item_bytes
        found.append(_shard_slice(block, start, lengths, block.address + offset))
    return found


def _shard_slice(block: Block, start: Sequence[int], lengths: Sequence[int], address: int) -> ShardSlice:
    if block.origin is not None:
        start = [first + own for first, own in zip(block.origin, start, strict=True)]
    return block.name, block.element, block.whole_shape or block.shape, start, lengths, address, block.is_held


def next_save_id() -> int:
    """Return the number of the next save: equal on all ranks, and never used twice."""
    return (_core.session_id() + next(_SAVES) * 0x9E3779B97F4A7C15) % (1 << 64)
