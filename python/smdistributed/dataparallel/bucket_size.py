"""The size of a gradient bucket; the same for both frameworks."""

from __future__ import annotations

from smdistributed import _core
from smdistributed._common import errors


def bucket_bytes(bucket_cap_mb: float | None, on_device: bool = False) -> int:
    """Return the size of a bucket in bytes.

    Args:
        bucket_cap_mb: Size in MiB; ``None`` means 25, or 100 on a device.
        on_device: Whether the gradients are on a device.

    Returns:
        The size.

    Raises:
        ValueError: The size is not positive, or not a multiple of 128 bytes.
    """
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float, type(None))):
        raise ValueError(f"`bucket_cap_mb` is {bucket_cap_mb!r}: expected a positive number of MiB")
    try:
        return _core.bucket_bytes(bucket_cap_mb, on_device)
    except errors.InvalidArgumentError as error:
        raise ValueError(str(error)) from None
