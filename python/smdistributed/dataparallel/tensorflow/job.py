"""Life cycle and ranks."""

from __future__ import annotations

from smdistributed import _core
from smdistributed._common import errors, lifecycle
from smdistributed.dataparallel.exceptions import CLASSES


def init() -> None:
    """Joins the job that the launcher's environment describes; returns when all ranks have joined.

    Raises:
        SMDDPAlreadyInitializedError: It was called before.
    """
    with errors.translated(CLASSES):
        lifecycle.init()
        # So that a rank which never calls a collective by name is missed by name.
        _core.start_negotiation()


def shutdown() -> None:
    """Leaves the job; does nothing if this process is in none. Happens by itself when the process ends."""
    with errors.translated(CLASSES):
        lifecycle.shutdown()


def rank() -> int:
    """Global rank, 0 to size - 1."""
    with errors.translated(CLASSES):
        return _core.rank()


def size() -> int:
    """Processes of the job."""
    with errors.translated(CLASSES):
        return _core.size()


def local_rank() -> int:
    """Rank on this host."""
    with errors.translated(CLASSES):
        return _core.local_rank()


def local_size() -> int:
    """Processes on this host."""
    with errors.translated(CLASSES):
        return _core.local_size()
