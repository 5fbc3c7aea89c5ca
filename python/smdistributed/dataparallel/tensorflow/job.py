"""Life cycle and ranks."""

from __future__ import annotations

from smdistributed import _core
from smdistributed._common import errors, lifecycle
from smdistributed.dataparallel.exceptions import CLASSES


def init() -> None:
    """Join the job that the launcher's environment describes, and wait until all ranks have joined.

    Raises:
        SMDDPAlreadyInitializedError: This process is in a job already.
        ConfigError: The environment contradicts itself.
        PeerFailedError: A rank ended before all had joined.
        SMDDPTimeoutError: Not all ranks joined within the timeout.
    """
    with errors.translated(CLASSES):
        lifecycle.init()
        # Ranks that never call a collective by name can then be reported as missing.
        _core.start_negotiation()


def shutdown() -> None:
    """Leave the job; do nothing if this process is in none.

    The end of the process does the same.
    """
    with errors.translated(CLASSES):
        lifecycle.shutdown()


def rank() -> int:
    """Return the global rank of this process.

    Returns:
        The rank, from 0 to ``size() - 1``.

    Raises:
        SMDDPNotInitializedError: ``init()`` was not called.
    """
    with errors.translated(CLASSES):
        return _core.rank()


def size() -> int:
    """Return the number of processes of the job.

    Returns:
        The number.

    Raises:
        SMDDPNotInitializedError: ``init()`` was not called.
    """
    with errors.translated(CLASSES):
        return _core.size()


def local_rank() -> int:
    """Return the rank of this process on its host.

    Returns:
        The rank, from 0 to ``local_size() - 1``; usually the index of the GPU to use.

    Raises:
        SMDDPNotInitializedError: ``init()`` was not called.
    """
    with errors.translated(CLASSES):
        return _core.local_rank()


def local_size() -> int:
    """Return the number of processes on this host.

    Returns:
        The number.

    Raises:
        SMDDPNotInitializedError: ``init()`` was not called.
    """
    with errors.translated(CLASSES):
        return _core.local_size()
