"""Digests of what a rank records, which are equal on all ranks that record the same."""

from __future__ import annotations

import hashlib
import re
from typing import Any

_DEVICE_NUMBER = re.compile(r", index=\d+")


def digest_of(key: Any) -> int:
    """A number that is the same on all ranks; each has a device of its own, so the device's number does not count."""
    text = _DEVICE_NUMBER.sub("", repr(key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def chained_digest(before: int, digest: int) -> int:
    """The digest of a recording with one more call."""
    return (before * 1_000_003 + digest) & 0x7FFF_FFFF_FFFF_FFFF
