"""Process sets: groups of ranks that run collectives of their own."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from horovod.common.util import is_iterable

if TYPE_CHECKING:
    from horovod.common.basics import HorovodBasics

_basics: HorovodBasics | None = None


def _is_communicator(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "mpi4py"


class ProcessSet:
    """A set of ranks of the world that run collectives of their own.

    Args:
        ranks_or_comm: Ranks in any order, or a communicator of mpi4py.

    Attributes:
        process_set_id: Number of the set; ``None`` until it is registered.
        ranks: Ranks in order; ``None`` where only the core knows them.
        mpi_comm: The communicator that the set was made from.

    Examples:
        >>> even = hvd.add_process_set([0, 2])
        >>> if even.included():
        ...     hvd.allreduce(tensor, process_set=even)
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if _is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        if not is_iterable(ranks_or_comm):
            raise ValueError("a process set needs a list of process ranks or an mpi4py Comm object")
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, numbers.Integral) and not isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"{ranks} is not a list of process ranks or an mpi4py Comm object")
        self.ranks = sorted(int(rank) for rank in ranks)
        if self.ranks and self.ranks[0] < 0:
            raise ValueError(
                f"{ranks} is not a list of process ranks or an mpi4py Comm object: {self.ranks[0]} is negative"
            )

    def size(self) -> int | None:
        """Return the number of members.

        Returns:
            The number; ``None`` until the set is registered.
        """
        return None if self.process_set_id is None else _core_basics()._process_set_size(self.process_set_id)

    def rank(self) -> int | None:
        """Return this process's rank in the set.

        Returns:
            The rank; ``None`` until the set is registered.

        Raises:
            ValueError: This process is not a member.
        """
        return None if self.process_set_id is None else _core_basics()._process_set_rank(self.process_set_id)

    def included(self) -> bool | None:
        """Return whether this process is a member.

        Returns:
            Whether it is; ``None`` if the ranks are not known yet.
        """
        return None if self.ranks is None else _core_basics().rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def _core_basics() -> HorovodBasics:
    from horovod.common import basics

    return _basics or basics.shared()


def _temp_process_set_object(process_set_id: int) -> ProcessSet:
    """Return the object for a number."""
    process_set = ProcessSet.__new__(ProcessSet)
    process_set.process_set_id = process_set_id
    return process_set


#: All ranks; the same object for all frameworks.
global_process_set = _temp_process_set_object(0)


def _setup(basics: HorovodBasics) -> None:
    global _basics
    _basics = basics


def _init_process_sets(process_sets: list[ProcessSet]) -> None:
    """Set the numbers of process sets by their ranks.

    Raises:
        ValueError: Two have the same ranks, or one has those of the whole world.
    """
    known = {tuple(ranks): id for id, ranks in _core_basics()._get_process_set_ids_and_ranks().items()}
    taken = {0}
    for process_set in process_sets:
        id = known.get(tuple(process_set.ranks or ()))
        if id is None:
            raise ValueError(f"process set {process_set} has not been registered")
        if id in taken:
            raise ValueError(f"process set {process_set} is a duplicate: its ranks are those of process set {id}")
        taken.add(id)
        process_set.process_set_id = id


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. All ranks of the world call it, members or not, in the same order.

    Args:
        process_set: A set, or its ranks.

    Returns:
        The set.

    Raises:
        ValueError: A set with these ranks exists, ranks disagree, or sets may not be added
            (``HOROVOD_DYNAMIC_PROCESS_SETS``).
        NotImplementedError: The set was made from a communicator.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.mpi_comm is not None:
        raise NotImplementedError(
            "process sets from communicators are created by `init(comm=MPI.COMM_WORLD, process_sets=...)`: "
            "here, pass their ranks"
        )
    process_set.process_set_id = _core_basics()._add_process_set_impl(process_set.ranks or [])
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set. All ranks of the world call it.

    Args:
        process_set: The set.

    Returns:
        ``False`` if the set is the world, or not registered; else ``True``.
    """
    if process_set.process_set_id in (None, 0) or not _core_basics()._remove_process_set_impl(
        process_set.process_set_id
    ):
        return False
    process_set.process_set_id = None
    return True
