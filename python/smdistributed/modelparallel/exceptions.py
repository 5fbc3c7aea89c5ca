"""Errors of model parallelism, for both frameworks.

Errors of the core that concern other ranks (a rank died, ranks disagree) have classes of their own in
``smdistributed._common.errors``. The ones that scripts may want to catch are among the names here.
"""

from __future__ import annotations

from smdistributed._common import errors

__all__ = [
    "SMPCheckpointError",
    "SMPConfigError",
    "SMPError",
    "SMPMismatchError",
    "SMPNotInitializedError",
    "SMPPartitionError",
    "SMPPeerFailedError",
    "SMPTimeoutError",
    "SMPUnsupportedError",
    "SMPUsageError",
    "SMPValidationError",
]


class SMPError(RuntimeError):
    """Base of the errors of this package."""


class SMPConfigError(SMPError, ValueError):
    """A value of the configuration is not acceptable, or two contradict each other."""


class SMPValidationError(SMPError, ValueError):
    """An argument of a call is not acceptable."""


class SMPNotInitializedError(SMPError):
    """A call needs ``smp.init()`` first."""


class SMPUsageError(SMPError):
    """A call at a place where it has no meaning: a forward outside of ``smp.step``, a second model."""


class SMPUnsupportedError(SMPError, NotImplementedError):
    """A feature is not supported, or not yet."""


class SMPPartitionError(SMPError):
    """A partition that does not exist, or shared parameters on two of them."""


class SMPCheckpointError(SMPError):
    """Files of a checkpoint are missing or do not fit."""


class SMPTimeoutError(SMPError, errors.WaitTimeoutError):
    """Other ranks did not come in time."""


class SMPPeerFailedError(SMPError, errors.PeerFailedError):
    """Another rank died, left, or reported that it failed."""


class SMPMismatchError(SMPError, errors.MismatchError):
    """Ranks run different steps."""


#: Class of each code of the core.
CLASSES: dict[str, type[errors.SmdistributedError]] = {
    **errors.CLASSES,
    "timeout": SMPTimeoutError,
    "peer_failed": SMPPeerFailedError,
    "mismatch": SMPMismatchError,
}
