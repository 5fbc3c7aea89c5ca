"""Digests of recordings, which are equal on all ranks with equal recordings."""

from __future__ import annotations

import hashlib
import re
from typing import Any

_DEVICE_NUMBER = re.compile(r", index=\d+")


def digest_of(key: Any) -> int:
    """Return a digest that is equal on all ranks; the index of a device is ignored, because it may differ."""
    text = _DEVICE_NUMBER.sub("", repr(key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def chained_digest(before: int, digest: int) -> int:
    """Return the digest of a recording after one more call."""
    return (before * 1_000_003 + digest) & 0x7FFF_FFFF_FFFF_FFFF
