"""How large a bucket of gradients may be; the same for both frameworks."""

from __future__ import annotations

_MIB = 1024 * 1024
_DEFAULT_BUCKET_CAP_MB = 25
# Collectives work on chunks of this size, so a bucket's size is a multiple.
_BUCKET_MULTIPLE_BYTES = 128


def bucket_bytes(bucket_cap_mb: float | None) -> int:
    """The size of a bucket in bytes.

    Args:
        bucket_cap_mb: In MiB; ``None`` means 25.

    Raises:
        ValueError: It is not positive, or not a multiple of 128 bytes.
    """
    if bucket_cap_mb is None:
        bucket_cap_mb = _DEFAULT_BUCKET_CAP_MB
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise ValueError(f"`bucket_cap_mb` is {bucket_cap_mb!r}: expected a positive number of MiB")
    size = bucket_cap_mb * _MIB
    if not 0 < size < 2**62:
        raise ValueError(f"`bucket_cap_mb` is {bucket_cap_mb!r}: expected a positive number of MiB")
    if size % _BUCKET_MULTIPLE_BYTES != 0:
        raise ValueError(
            f"`bucket_cap_mb` is {bucket_cap_mb!r}, which is {size:g} bytes: expected a multiple of "
            f"{_BUCKET_MULTIPLE_BYTES} bytes"
        )
    return int(size)
