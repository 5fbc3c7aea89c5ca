"""The errors of data-parallel training."""

from __future__ import annotations

from smdistributed._common import errors
from smdistributed._common.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    RendezvousError,
    SmdistributedError,
    SystemCallError,
    UnsupportedError,
    WaitInterruptedError,
)


class SMDDPAlreadyInitializedError(errors.AlreadyInitializedError):
    """``init()`` or ``init_process_group()`` was called a second time."""


class SMDDPNotInitializedError(errors.NotInitializedError):
    """A call needs ``init()`` or ``init_process_group()`` first."""


class SMDDPTimeoutError(errors.WaitTimeoutError):
    """A collective waited for other ranks until its deadline."""


CLASSES: dict[str, type[SmdistributedError]] = errors.CLASSES | {
    cls.code: cls for cls in (SMDDPAlreadyInitializedError, SMDDPNotInitializedError, SMDDPTimeoutError)
}
"""The class that this package raises for each error code of the core."""

__all__ = [
    "CLASSES",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "InternalError",
    "InvalidArgumentError",
    "MismatchError",
    "PeerFailedError",
    "RendezvousError",
    "SMDDPAlreadyInitializedError",
    "SMDDPNotInitializedError",
    "SMDDPTimeoutError",
    "SmdistributedError",
    "SystemCallError",
    "UnsupportedError",
    "WaitInterruptedError",
]
