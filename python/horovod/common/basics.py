"""Starts and ends sessions, and returns ranks, sizes and capabilities of this process."""

from __future__ import annotations

import functools
import numbers
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.common import driven, environment, process_sets
from horovod.common.exceptions import may_pass, of_control
from horovod.common.process_sets import ProcessSet, global_process_set
from smdistributed import _core
from smdistributed._common import lifecycle
from smdistributed._common.errors import RemovedError, UnsupportedError

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _control(call: _Call) -> _Call:
    """Convert errors of the core to Horovod's."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            # All errors of the core are of this class.
            raise of_control(error) from None

    return wrapped  # type: ignore[return-value]


class HorovodBasics:
    """Life cycle and ranks, as every framework's module exports them. All objects of this class use the same session.

    Args:
        pkg_path: Ignored.
        *args: Ignored.
    """

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:
        process_sets._setup(self)

    def init(self, comm: Any = None, process_sets: list[ProcessSet] | str | None = None) -> None:
        """Join the job, and wait until all ranks have joined. The second call does nothing.

        Args:
            comm: The world: ``None`` for all ranks, a list of ranks, or a communicator of mpi4py. Ranks that are not in
                it get a world of their own.
            process_sets: Process sets to register, or ``"dynamic"``: sets may be added later.

        Raises:
            ValueError: The job cannot start, ranks disagree about the process sets, or a set is given twice.
            NotImplementedError: Process sets come from communicators, and the world does not.
        """
        sets = process_sets
        if isinstance(sets, str):
            if sets.lower() != "dynamic":
                raise ValueError(
                    f'Horovod initialization failed: `process_sets` is {sets!r}: expected a list or "dynamic"'
                )
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
            sets = None
        ranks = _world_ranks(comm)
        environment.check()
        sets = list(sets or [])
        if not all(isinstance(one, ProcessSet) for one in sets):
            raise ValueError(
                f"Horovod initialization failed: `process_sets` is {sets}: expected a list of ProcessSet objects"
            )
        from_communicators = [one for one in sets if one.mpi_comm is not None]
        if from_communicators and not _is_communicator(comm):
            raise NotImplementedError(
                "process sets from communicators need a world from a communicator: `init(comm=MPI.COMM_WORLD, "
                "process_sets=...)`"
            )
        try:
            start, timeout = time.monotonic(), float(_core.setting("SMD_ELASTIC_TIMEOUT_SECONDS"))
            while True:
                joins = not _core.is_initialized()
                if joins and driven.is_driven():
                    driven.join(timeout)
                elif joins:
                    driven.set_rendezvous()
                    lifecycle.init()
                    _start_mpi()
                try:
                    self._start_world(ranks, sets, comm)
                    break
                except RuntimeError as error:
                    others = joins and driven.is_elastic() and may_pass(error)
                    if not others or time.monotonic() - start > timeout:
                        raise
                    # Another worker died early. This worker joins the next session.
                    self.shutdown()
        except RemovedError as error:
            # The host was removed from the job, which is not a failure of this process.
            print(error, file=sys.stderr)
            sys.exit(0)
        except RuntimeError as error:
            raise ValueError(f"Horovod initialization failed: {of_control(error)}") from None
        global last_rank
        last_rank = self.rank()
        global_process_set.ranks = list(range(self.size()))
        global_process_set.mpi_comm = comm if _is_communicator(comm) else None
        _register(sets)

    def _start_world(self, ranks: list[int] | None, sets: list[ProcessSet], comm: Any) -> None:
        first = not _has_world()
        _core.start_world(ranks)
        # At first, all ranks compare their process sets, also ranks without any.
        if sets or first:
            lists = [one.ranks or [] for one in sets if one.mpi_comm is None]
            from_communicators = [one for one in sets if one.mpi_comm is not None]
            _core.register_process_sets(lists + _all_groups(from_communicators, comm))
        # A rank that never calls a collective can then be reported as missing by name.
        _core.start_negotiation()

    @_control
    def shutdown(self) -> None:
        """Leave the job. Operations that other ranks wait for end with an error. :meth:`init` may be called again."""
        lifecycle.shutdown()
        global_process_set.ranks = None
        for cleanup in _cleanups:
            cleanup()

    def is_initialized(self) -> bool:
        """Return whether this process is in a job.

        Returns:
            ``True`` between :meth:`init` and :meth:`shutdown`.
        """
        return _core.is_initialized() and _has_world()

    @_control
    def rank(self) -> int:
        """Return this process's rank in the world.

        Returns:
            The rank, from 0 to ``size() - 1``.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[0][0]

    @_control
    def size(self) -> int:
        """Return the number of processes of the world.

        Returns:
            The number.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[0][1]

    @_control
    def local_rank(self) -> int:
        """Return this process's rank on its host.

        Returns:
            The rank, from 0 to ``local_size() - 1``; usually the index of the GPU to use.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[1][0]

    @_control
    def local_size(self) -> int:
        """Return the number of processes on this host.

        Returns:
            The number.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[1][1]

    @_control
    def cross_rank(self) -> int:
        """Return this host's place among the hosts that have a process with this local rank.

        Returns:
            The place, from 0 to ``cross_size() - 1``.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[2][0]

    @_control
    def cross_size(self) -> int:
        """Return the number of hosts that have a process with this local rank.

        Returns:
            The number.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[2][1]

    @_control
    def is_homogeneous(self) -> bool:
        """Return whether every host has the same number of processes.

        Returns:
            ``True`` if every host has the same number of processes.

        Raises:
            ValueError: ``init()`` was not called.
        """
        return _core.ranks_and_sizes()[3]

    def mpi_threads_supported(self) -> bool:
        """Return whether any thread may call MPI.

        Returns:
            ``True`` if any thread may call MPI.

        Raises:
            ValueError: The job does not run under MPI, or ``init()`` was not called.
        """
        self.rank()
        if not self.mpi_enabled():
            raise ValueError("MPI is not enabled: no launcher of MPI started the job, or MPI cannot be used")
        return bool(_any_thread)

    def mpi_enabled(self) -> bool:
        """Return whether a launcher of MPI (``mpirun``) started the job and MPI is initialized.

        MPI moves tensors between hosts; the core does the rest itself.

        Returns:
            ``True`` if both conditions hold.
        """
        return self.is_initialized() and _any_thread is not None

    def mpi_built(self) -> bool:
        """Return whether jobs can run under MPI.

        The first call compiles a plug-in for the installed MPI.

        Returns:
            ``True`` if there is an MPI and a plug-in for it.
        """
        return environment.has_mpi()

    def gloo_enabled(self) -> bool:
        """Return whether the job runs without MPI.

        Returns:
            The opposite of :meth:`mpi_enabled`.
        """
        return not self.mpi_enabled()

    def gloo_built(self) -> bool:
        """Return whether jobs can run without MPI, over the core's own transports.

        Returns:
            ``True``.
        """
        return True

    def nccl_built(self) -> int:
        """Return the version of the NCCL that was found.

        Returns:
            The version, such as 22703; 0 if there is none.
        """
        return environment.nccl_version()

    def ddl_built(self) -> bool:
        """Return whether IBM's DDL is supported.

        Returns:
            ``False``.
        """
        return False

    def ccl_built(self) -> bool:
        """Return whether Intel's oneCCL is supported.

        Returns:
            ``False``.
        """
        return False

    def cuda_built(self) -> bool:
        """Return whether there is a CUDA driver with a device.

        Returns:
            ``True`` if there is one.
        """
        return environment.has_cuda()

    def rocm_built(self) -> bool:
        """Return whether AMD's ROCm is supported.

        Returns:
            ``False``.
        """
        return False

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Begin a timeline, in place of one that is being written. Rank 0 writes it; all ranks may call this.

        If the file cannot be written, rank 0 logs the error and continues without a timeline.

        Args:
            file_path: The file, which opens in Perfetto and Chrome. The same file as before changes nothing.
            mark_cycles: Whether to mark each answer of the negotiation, which corresponds to a cycle of Horovod.

        Raises:
            ValueError: ``init()`` was not called.
        """
        if not self.is_initialized():
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        try:
            _core.start_horovod_timeline(os.fspath(file_path), mark_cycles)
        except RuntimeError as error:
            raise of_control(error) from None

    def stop_timeline(self) -> None:
        """End the timeline; do nothing if there is none. The file is complete when this returns.

        Raises:
            ValueError: ``init()`` was not called.
        """
        if not self.is_initialized():
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        _core.stop_horovod_timeline()

    @_control
    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return dict(_core.process_sets())

    @_control
    def _add_process_set_impl(self, ranks: list[int]) -> int:
        return _core.add_process_set(ranks)

    @_control
    def _remove_process_set_impl(self, process_set_id: int) -> bool:
        if not _core.is_initialized():
            raise ValueError("Horovod is shutting down.")
        return _core.remove_process_set(process_set_id)

    def _process_set_ranks(self, process_set_id: int) -> list[int]:
        ranks = self._get_process_set_ids_and_ranks().get(process_set_id)
        if ranks is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return ranks

    def _process_set_rank(self, process_set_id: int) -> int:
        ranks = self._process_set_ranks(process_set_id)
        if self.rank() not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(self.rank())

    def _process_set_size(self, process_set_id: int) -> int:
        return len(self._process_set_ranks(process_set_id))

    def _comm_process_set_id(self, comm: Any) -> int:
        ranks = _communicator_ranks(comm)
        for id, members in self._get_process_set_ids_and_ranks().items():
            if members == sorted(ranks):
                return id
        raise ValueError("Process set does not exist or has not been registered.")


#: This process's rank in the last session that it was in.
last_rank: int | None = None

#: Whether any thread may call MPI; ``None`` while `init` has not found MPI.
_any_thread: bool | None = None


def _start_mpi() -> None:
    """Initialize MPI where a launcher of MPI started the job: scripts call it after `init`, through mpi4py."""
    global _any_thread
    if _any_thread is not None or not _core.is_started_by_mpi():
        return
    try:
        _any_thread = _core.start_mpi()
    except UnsupportedError as error:
        # All ranks get the same result, so all of them continue without MPI.
        warn_once(f"MPI is not initialised: {error}")


#: Functions of the frameworks' modules to call when the session ends.
_cleanups: list[Callable[[], None]] = []


@functools.cache
def shared() -> HorovodBasics:
    """Return an object for callers without a framework.

    Returns:
        The same object in each call.
    """
    return HorovodBasics()


def _has_world() -> bool:
    try:
        _core.ranks_and_sizes()
    except RuntimeError:
        return False
    return True


def _register(sets: list[ProcessSet]) -> None:
    if sets:
        process_sets._init_process_sets(sets)


def _is_communicator(comm: object) -> bool:
    return process_sets._is_communicator(comm)


def _communicator_ranks(comm: Any) -> list[int]:
    """Return the ranks of a communicator in MPI's world."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError("Horovod has not been built with MPI support: mpi4py cannot be imported") from None
    group = comm.Get_group()
    return list(group.Translate_ranks(list(range(group.Get_size())), MPI.COMM_WORLD.Get_group()))


def _all_groups(sets: list[ProcessSet], world: Any) -> list[list[int]]:
    """Return the groups of all ranks' communicators, each once, in order; set the ranks of the process sets."""
    if not _is_communicator(world):
        return []
    for one in sets:
        group = one.mpi_comm.Get_group()
        one.ranks = sorted(group.Translate_ranks(list(range(group.Get_size())), world.Get_group()))
    # The ranks may be members of different process sets.
    groups = {tuple(ranks) for own in world.allgather([one.ranks for one in sets]) for ranks in own}
    return [list(ranks) for ranks in sorted(groups)]


def _world_ranks(comm: Any) -> list[int] | None:
    if comm is None:
        return None
    if _is_communicator(comm):
        return _communicator_ranks(comm)
    if isinstance(comm, (list, tuple, range)):
        if not all(isinstance(rank, numbers.Integral) and int(rank) >= 0 for rank in comm):
            raise ValueError(f"Invalid type of argument comm: {comm!r} is not a list of ranks")
        return [int(rank) for rank in comm] or None
    if hasattr(comm, "Get_rank"):
        raise ValueError("Horovod has not been built with MPI support for communicators that are not mpi4py's")
    raise ValueError(f"Invalid type of argument comm: {type(comm).__name__}")


def warn_once(text: str) -> None:
    """Warn once in a process.

    Args:
        text: The text; another text is another warning.
    """
    if text not in _warned_texts:
        _warned_texts.add(text)
        warnings.warn(text, stacklevel=3)


_warned_texts: set[str] = set()
