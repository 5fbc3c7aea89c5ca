"""An elastic job whose workers are calls of a function, for launchers that start processes by other means than ssh.

The core decides where each worker runs and when a session begins, as in ``smdrun elastic`` and ``horovodrun --min-np``.
"""

from __future__ import annotations

import collections
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, HostInfo, SlotInfo, get_host_assignments
from horovod.runner.common.util.network import Addresses
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic.constants import HostUpdateResult
from horovod.runner.elastic.discovery import HostDiscovery, HostManager
from horovod.runner.elastic.registration import WorkerStateRegistry
from horovod.runner.elastic.worker import WorkerNotificationClient
from horovod.runner.util.threads import in_thread
from smdistributed import _core

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
ELASTIC_TIMEOUT_SECS = 600

#: Seconds in which a worker without a rank must end by itself.
_EXIT_TIMEOUT_SECS = 30

#: A worker's host and slot.
SlotKey = tuple[str, int]


class Results:
    """The outcome of a job.

    Args:
        error_message: Reason of a failure; ``None`` if the job succeeded.
        worker_results: Exit code and time of the end of each worker of the last session, by ``host[slot]``.
    """

    def __init__(self, error_message: str | None, worker_results: dict[str, tuple[int, float]]) -> None:
        self.error_message = error_message
        self.worker_results = worker_results


class _Worker:
    def __init__(self, number: int, slot: SlotKey) -> None:
        self.number = number
        self.slot = slot
        self.stop = threading.Event()
        #: Number of the last session in which it had a rank.
        self.session = 0
        #: Whether it waits for a session.
        self.is_waiting = False
        #: Address at which it receives notices about hosts.
        self.server: tuple[Addresses, bytes] | None = None


class ElasticDriver:
    """Drives an elastic job.

    Args:
        rendezvous: A :class:`~horovod.runner.http.http_server.RendezvousServer`, which gets the ranks of each session.
        discovery: Finds hosts; called every second.
        min_num_proc: Least number of slots of a session.
        max_num_proc: Largest number of slots of a session; ``None`` means all.
        timeout: Longest wait for slots, for the first worker to call ``init()``, or for a worker to return, in seconds.
        reset_limit: Largest number of sessions after the first.
        cooldown_range: See :class:`~horovod.runner.elastic.discovery.HostManager`.
        verbose: 1 prints progress.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: HostDiscovery,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        verbose: int = 0,
    ) -> None:
        self._rendezvous = rendezvous
        self._min_num_proc = min_num_proc
        self._max_num_proc = max_num_proc
        self._timeout = ELASTIC_TIMEOUT_SECS if timeout is None else timeout
        self._reset_limit = reset_limit
        self._verbose = verbose
        self._host_manager = HostManager(discovery, cooldown_range)
        self._worker_registry = WorkerStateRegistry(self, self._host_manager, reset_limit, verbose)
        self._changed = threading.Condition(threading.RLock())
        self._core: Any = None
        self._create_worker: Callable[[SlotInfo, list[threading.Event]], tuple[int, float]] | None = None
        self._workers: dict[int, _Worker] = {}
        self._assignments: dict[SlotKey, SlotInfo] = {}
        # Number of sessions so far. Workers that start before the first session count as its workers.
        self._session = 0
        self._results: dict[SlotKey, tuple[int, float]] = {}
        self._error: str | None = None
        self._reported: set[str] = set()
        self._shutdown = threading.Event()
        self._finished = threading.Event()
        self._notices: queue.SimpleQueue[tuple[_Worker, float, HostUpdateResult] | None] = queue.SimpleQueue()
        in_thread(self._discover_hosts, name="horovod-discovery")
        in_thread(self._notify, name="horovod-notices")

    # Methods for users.

    def start(
        self, num_proc: int, create_worker_fn: Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]
    ) -> None:
        """Wait for slots and start workers.

        Args:
            num_proc: Number of slots that the first session waits for.
            create_worker_fn: Runs a worker to its end, in a thread of its own. It gets the worker's slot and events;
                when an event is set, the worker is to end. It returns the exit code and the time of the end in seconds
                since 1970.

        Raises:
            TimeoutException: There were not enough slots in time.
        """
        self.wait_for_available_slots(num_proc)
        most = sys.maxsize if self._max_num_proc is None else self._max_num_proc
        limits = (max(num_proc, self._min_num_proc), self._min_num_proc, most, self._reset_limit, self._timeout)
        with self._changed:
            self._create_worker = create_worker_fn
            self._core = self._host_manager.replace_core(lambda hosts: _core.ElasticDriver(hosts, *limits))
            self._act()
        in_thread(self._tick, name="horovod-elastic")

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> None:
        """Wait until enough slots are available.

        Args:
            min_num_proc: Least number of slots.
            min_hosts: Least number of hosts.

        Raises:
            TimeoutException: The wait took longer than the job's timeout.
            RuntimeError: The job has ended.
        """

        def enough() -> bool:
            hosts = self._host_manager.current_hosts
            are_enough = hosts.count_available_slots() >= min_num_proc and len(hosts.host_assignment_order) >= min_hosts
            return are_enough or self._shutdown.is_set()

        with self._changed:
            if not self._changed.wait_for(enough, self._timeout):
                current = self._host_manager.current_hosts
                num_slots, hosts = current.count_available_slots(), len(current.available_hosts)
                raise TimeoutException(
                    f"timed out after {self._timeout:.0f} s waiting for the minimum number of slots to become "
                    f"available: there are {num_slots} of {min_num_proc}, on {hosts} host(s)"
                )
            if self._shutdown.is_set():
                raise RuntimeError(f"the job has ended: {self._error or 'it was stopped'}")

    def get_results(self) -> Results:
        """Wait for the end of the job.

        Returns:
            How the job ended, and how the workers of its last session ended. Workers of earlier sessions do not count.
            If the job succeeded, neither do workers of a blacklisted host: the session continues or ends without
            that host.
        """
        self._finished.wait()
        with self._changed:
            results = self._results
            if self._error is None:
                banned = {slot for slot in results if self._host_manager.is_blacklisted(slot[0])}
                results = {slot: result for slot, result in results.items() if slot not in banned}
            return Results(self._error, {f"{host}[{slot}]": result for (host, slot), result in results.items()})

    def stop(self, error_message: str | None = None) -> None:
        """End the job and its workers.

        Args:
            error_message: Reason of a failure; ``None`` if the job succeeded.
        """
        with self._changed:
            if self._finished.is_set():
                return
            self._error = self._error or error_message
            self._shutdown.set()
            if self._core is None:
                self._finish()
            else:
                self._core.stop_all(error_message or "stopped")
                self._act()
            self._changed.notify_all()

    def finished(self) -> bool:
        """Return whether the job has ended.

        Returns:
            ``True`` after the last session.
        """
        return self._finished.is_set()

    # Methods for workers and for the code that starts them.

    def record_ready(self, host: str, slot: int) -> None:
        """Record that a worker requests a rank in the next session, and wait until the session begins.

        The call also returns when there is no rank for the worker any more.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.
        """
        self._worker_registry.record_ready(host, slot)
        with self._changed:
            worker = self._worker(host, slot)
            if worker is not None:
                self._changed.wait_for(lambda: not worker.is_waiting or worker.stop.is_set() or self._finished.is_set())

    def entered(self, host: str, slot: int) -> None:
        """Record that a worker requests a rank, as :meth:`record_ready`, without waiting.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.

        Raises:
            RuntimeError: There is no worker in this slot.
        """
        with self._changed:
            worker = self._worker(host, slot)
            if worker is None:
                raise RuntimeError(f"there is no worker {host}[{slot}]")
            worker.is_waiting = True
            self._assignments.pop(worker.slot, None)
            self._core.worker_ready(worker.number)
            self._acts()

    def register_worker_server(self, host: str, slot: int, addresses: Addresses, secret_key: bytes) -> None:
        """Register the service at which a worker receives notices of hosts.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.
            addresses: Addresses of the service, by interface.
            secret_key: Its secret.
        """
        with self._changed:
            worker = self._worker(host, slot)
            if worker is not None:
                worker.server = (addresses, secret_key)

    def get_worker_client(self, slot_info: SlotInfo) -> WorkerNotificationClient | None:
        """Return a client of the service at which a worker receives notices of hosts.

        Args:
            slot_info: The worker's slot.

        Returns:
            The client; ``None`` if the worker has registered no service.
        """
        with self._changed:
            worker = self._worker(slot_info.hostname, slot_info.local_rank)
            server = worker.server if worker is not None else None
        return WorkerNotificationClient(*server) if server is not None else None

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """Return a worker's rank in the current session.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.

        Returns:
            The slot with the ranks; with rank -1 if the worker has none.
        """
        with self._changed:
            return self._assignments.get((host, slot), INVALID_SLOT_INFO)

    @property
    def host_assignments(self) -> dict[str, list[SlotInfo]]:
        """The slots and ranks of the current session by host, those of a host in the order of local ranks."""
        found: dict[str, list[SlotInfo]] = {}
        with self._changed:
            for slot in sorted(self._assignments.values(), key=lambda slot: slot.rank):
                found.setdefault(slot.hostname, []).append(slot)
        return found

    def has_rank_assignment(self, host: str, slot: int) -> bool:
        """Return whether a worker has a rank in the current session.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.

        Returns:
            ``True`` if the worker has a rank in the session.
        """
        return self.get_slot_info(host, slot).rank != -1

    def get_coordinator_info(self) -> SlotInfo | None:
        """Return the slot of rank 0.

        Returns:
            The slot, or ``None`` before the first session.
        """
        with self._changed:
            return next((slot for slot in self._assignments.values() if slot.rank == 0), None)

    def world_size(self) -> int:
        """Return the number of workers of the current session.

        Returns:
            The number.
        """
        with self._changed:
            return len(self._assignments)

    def local_size(self, host: str) -> int:
        """Return the number of workers of a host in the current session.

        Args:
            host: Name of the host.

        Returns:
            The number.
        """
        with self._changed:
            return sum(name == host for name, _ in self._assignments)

    @property
    def host_manager(self) -> HostManager:
        """The job's hosts."""
        return self._host_manager

    # Methods of the driver's own threads.

    def _worker(self, host: str, slot: int) -> _Worker | None:
        """Return the living worker of a slot, which earlier workers may have had."""
        return next((worker for worker in reversed(self._workers.values()) if worker.slot == (host, slot)), None)

    def _discover_hosts(self) -> None:
        has_worked = False
        while not self._shutdown.is_set() and not self._finished.is_set():
            try:
                change = self._host_manager.update_available_hosts()
                has_worked = True
            except Exception as error:
                if not has_worked:
                    self.stop(f"the discovery of hosts failed: {error}")
                    return
                self._report(f"the discovery of hosts failed, the last ones are used: {error}")
            else:
                with self._changed:
                    if change != HostUpdateResult.no_update:
                        self._changed.notify_all()
                    if self._core is not None and not self._acts():
                        return
            self._shutdown.wait(DISCOVER_HOSTS_FREQUENCY_SECS)

    def _tick(self) -> None:
        with self._changed:
            while not self._finished.is_set():
                following = self._core.tick()
                if not self._acts():
                    return
                self._changed.wait(DISCOVER_HOSTS_FREQUENCY_SECS if following is None else min(following, 1.0))

    def _acts(self) -> bool:
        """Run `_act` in a thread; an exception ends the job. Return `False` in that case."""
        try:
            self._act()
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        """End a job that cannot continue, because actions of the core were lost. The caller holds the lock."""
        self._error = self._error or f"the driver of the job failed: {error!r}"
        for worker in self._workers.values():
            worker.stop.set()
        self._finish()
        self._changed.notify_all()

    def _act(self) -> None:
        """Execute the actions that the core requests. The caller holds the lock."""
        for kind, numbers, slot, kinds, text in self._core.take_actions():
            workers = [self._workers[number] for number in numbers if number in self._workers]
            if kind == "start":
                self._start_worker(_Worker(numbers[0], slot))
            elif kind == "stop":
                # A worker may have ended since the core decided that.
                for worker in workers:
                    worker.stop.set()
            elif kind == "remove":
                for worker in workers:
                    self._remove(worker)
            elif kind == "assign_ranks":
                self._assign_ranks(workers)
            elif kind == "notify":
                self._queue_notice(HostUpdateResult(kinds))
            else:
                self._log(text)
        self._host_manager.refresh()
        outcome = self._core.outcome()
        if outcome is not None and not self._finished.is_set():
            is_done, why = outcome
            if not is_done and not (self._shutdown.is_set() and self._error is None):
                self._error = self._error or why
            self._finish()
        self._changed.notify_all()

    def _finish(self) -> None:
        self._shutdown.set()
        self._finished.set()
        self._notices.put(None)

    def _start_worker(self, worker: _Worker) -> None:
        hosts = self._host_manager
        hosts.refresh()
        found = hosts.current_hosts
        listed = [HostInfo(name, found.get_slots(name)) for name in found.host_assignment_order]
        slots = get_host_assignments(listed, 0, self._max_num_proc)
        slot = next((slot for slot in slots if (slot.hostname, slot.local_rank) == worker.slot), INVALID_SLOT_INFO)
        self._workers[worker.number] = worker
        in_thread(self._run_worker, (worker, slot), name=f"horovod-worker-{worker.number}")

    def _run_worker(self, worker: _Worker, slot: SlotInfo) -> None:
        assert self._create_worker is not None
        why = None
        try:
            code, at = self._create_worker(slot, [self._shutdown, worker.stop])
        except SystemExit as error:
            code, at = error.code if isinstance(error.code, int) else int(error.code is not None), time.time()
        except BaseException as error:
            code, at, why = 1, time.time(), repr(error)
        host, number = worker.slot
        if code == 0:
            self._worker_registry.record_success(host, number)
        else:
            self._worker_registry.record_failure(host, number)
        with self._changed:
            del self._workers[worker.number]
            self._assignments.pop(worker.slot, None)
            if worker.session == self._session:
                self._results[worker.slot] = (code, at)
            failure = None if code == 0 else why or f"{host}[{number}] exit with status code {code}"
            self._core.worker_ended(worker.number, failure)
            self._acts()

    def _remove(self, worker: _Worker) -> None:
        self._assignments.pop(worker.slot, None)
        worker.is_waiting = False
        exit_timer = threading.Timer(_EXIT_TIMEOUT_SECS, worker.stop.set)
        exit_timer.daemon = True
        exit_timer.start()

    def _assign_ranks(self, workers: list[_Worker]) -> None:
        self._session += 1
        self._results.clear()
        local: dict[str, int] = collections.Counter()
        slots = []
        for rank, worker in enumerate(workers):
            host = worker.slot[0]
            slots.append(SlotInfo(host, rank, local[host], 0, len(workers)))
            local[host] += 1
            worker.is_waiting = False
            worker.session = self._session
        across: dict[int, int] = collections.Counter()
        for slot in slots:
            slot.local_size, slot.cross_rank = local[slot.hostname], across[slot.local_rank]
            across[slot.local_rank] += 1
        for slot in slots:
            slot.cross_size = across[slot.local_rank]
        self._assignments = {worker.slot: slot for worker, slot in zip(workers, slots, strict=True)}
        self._worker_registry.reset()
        self._rendezvous.init(slots)

    def _queue_notice(self, kinds: HostUpdateResult) -> None:
        coordinator = min(self._assignments, key=lambda slot: self._assignments[slot].rank, default=None)
        worker = self._worker(*coordinator) if coordinator is not None else None
        if worker is not None:
            self._notices.put((worker, time.time(), kinds))

    def _notify(self) -> None:
        """Send a notice without waiting for workers that do not answer."""
        while (notice := self._notices.get()) is not None:
            worker, at, kinds = notice
            server = worker.server
            if server is None:
                # The worker has not registered its address yet; the core repeats the notice.
                continue
            try:
                WorkerNotificationClient(*server).notify_hosts_updated(at, kinds)
            except Exception as error:
                self._report(
                    f"worker {worker.slot[0]}[{worker.slot[1]}] did not receive the notice of changed hosts: {error}"
                )

    def _report(self, text: str) -> None:
        """Print a failure after which the job goes on, once, whatever the verbosity."""
        if text not in self._reported:
            self._reported.add(text)
            print(f"horovod: {text}", file=sys.stderr, flush=True)

    def _log(self, text: str) -> None:
        if self._verbose:
            print(f"horovod: {text}", file=sys.stderr, flush=True)
