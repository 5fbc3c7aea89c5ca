"""Reports a checksum of the initial variables of each rank, once, to detect replicas that start from different values.

Each rank writes a checksum to the job's store without waiting for other ranks. Rank 0 compares the checksums and warns
(``rust-core/src/session/replicas.rs``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from smdistributed import _core

#: Number of elements of each variable in the checksum. Randomly initialized values differ from the first one on.
SAMPLE = 1 << 18


def report(
    described: Sequence[Any], values: Iterable[bytes], ranks: Sequence[int], remedy: str, is_final: bool = False
) -> None:
    """Write a checksum of variables to the job's store.

    Args:
        described: Shape and dtype of each variable; only ranks with equal ones are compared.
        values: The bytes of each variable, or of its first :data:`SAMPLE` elements.
        ranks: Ranks that reduce the gradients together, in ascending order.
        remedy: The call that makes replicas equal, for the warning.
        is_final: Whether no broadcast can follow. Otherwise the warning waits for the second step.
    """
    checksum = 0
    for value in values:
        checksum = zlib.crc32(value, checksum)
    variables = f"{zlib.crc32(repr(list(described)).encode()):08x}"
    _core.report_replica_checksum(variables, checksum, list(ranks), remedy, is_final)


def note_broadcast() -> None:
    """Record that variables are broadcast: replicas are equal from now on, whatever their checksums were."""
    if _core.is_initialized():
        _core.note_broadcast()
