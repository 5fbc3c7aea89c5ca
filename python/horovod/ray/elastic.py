"""Elastic jobs on a Ray cluster, whose nodes are the hosts."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from horovod.common.basics import warn_once
from horovod.ray.actor import RankActor
from horovod.ray.reservations import Reservations, available_resources
from horovod.ray.results import callbacks_called
from horovod.runner.common.util import secret, timeout
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.places import ElasticPlaces

#: Seconds between checks of the events that end a worker.
_POLL_SECONDS = 0.2
#: Settings of jobs that other launchers start.
_UNUSED_SETTINGS = (
    "ssh_identity_file",
    "ssh_port",
    "extra_mpi_args",
    "tcp_flag",
    "binding_args",
    "output_filename",
    "prefix_output_with_timestamp",
)


class ClusterNodes:
    """Names of a cluster's nodes as hosts of a job.

    The first node at an address has the address as its name. Any further node there, at the same time or later, gets
    another name, so that it is not blacklisted for failures of the first one.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def alive(self) -> dict[str, dict[str, Any]]:
        """Return the nodes that are alive.

        Returns:
            Ray's descriptions by name.
        """
        found = {}
        for node in ray.nodes():
            with self._lock:
                name = self._name(node["NodeID"], node["NodeManagerAddress"])
            if node["Alive"]:
                found[name] = node
        return found

    def _name(self, node_id: str, address: str) -> str:
        if node_id not in self._names:
            is_taken = address in self._names.values()
            self._names[node_id] = f"{address}-{node_id[:8]}" if is_taken else address
        return self._names[node_id]

    def find(self, host: str) -> dict[str, Any]:
        """Return the node that is a host.

        Args:
            host: Name of the host: that of this object, or the node's own.

        Returns:
            Ray's description.

        Raises:
            RuntimeError: No node that is alive has this name.
        """
        nodes = self.alive()
        for name, node in nodes.items():
            if host in (name, node["NodeManagerAddress"], node["NodeManagerHostname"]):
                return node
        raise RuntimeError(f"host {host} is not a node of the cluster: there are {sorted(nodes)}")


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster, with as many slots as their available resources are enough for.

    Resources that a job of this object has reserved count as available.

    Args:
        use_gpu: Whether slots have GPUs.
        cpus_per_slot: CPUs of each slot.
        gpus_per_slot: GPUs of each slot.

    Raises:
        ValueError: A slot has neither CPUs nor GPUs.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot
        if not self.resources_of_a_slot():
            raise ValueError("a slot needs CPUs or GPUs, but `cpus_per_slot` is 0 and it has no GPUs")
        if gpus_per_slot > 1 and not use_gpu:
            warn_once("`gpus_per_slot` has no effect without `use_gpu`: slots have no GPUs")
        self.nodes = ClusterNodes()
        #: Slots that the job has reserved, by id of the node.
        self.held: dict[str, int] = {}

    def resources_of_a_slot(self) -> dict[str, float]:
        """Return what a worker needs.

        Returns:
            Amounts by Ray's name of the resource.
        """
        amounts = {"CPU": float(self.cpus_per_slot), "GPU": float(self.gpus_per_slot if self.use_gpu else 0)}
        return {name: amount for name, amount in amounts.items() if amount}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the nodes.

        Returns:
            Slots by name; nodes without a slot are left out.
        """
        free = available_resources()
        found = {}
        for name, node in self.nodes.alive().items():
            held = self.held.get(node["NodeID"], 0)
            # The report of free resources is late: it may still have those that the job has just reserved.
            slots = min(held + self.slots_in(free.get(node["NodeID"], {})), self.slots_in(node["Resources"]))
            if slots:
                found[name] = slots
        return found

    def slots_in(self, resources: dict[str, float]) -> int:
        """Return how many slots resources are enough for.

        Args:
            resources: Amounts by Ray's name of the resource.

        Returns:
            The number.
        """
        needs = self.resources_of_a_slot()
        return min(int(resources.get(name, 0) // amount) for name, amount in needs.items())


def choose_discovery(given: Any, is_overridden: bool, use_gpu: bool, cpus_per_slot: int, gpus_per_slot: int) -> Any:
    """Choose what finds the hosts of a job.

    Args:
        given: The discovery of the settings.
        is_overridden: Whether the nodes of the cluster are the hosts.
        use_gpu: Whether slots have GPUs.
        cpus_per_slot: CPUs of each slot.
        gpus_per_slot: GPUs of each slot.

    Returns:
        A discovery.

    Raises:
        ValueError: There is none.
    """
    if is_overridden:
        # An earlier executor may have put a `RayHostDiscovery` into the settings.
        if given is not None and type(given) is not RayHostDiscovery:
            warn_once("`discovery` of the settings has no effect without `override_discovery=False`")
        return RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot)
    if given is None:
        raise ValueError("override_discovery is False, but the settings have no discovery")
    return given


class ElasticJob:
    """One run of a function by workers that join and leave.

    Args:
        settings: An :class:`ElasticSettings`.
        use_gpu: Whether workers get GPUs.
        cpus_per_slot: CPUs of each worker.
        gpus_per_slot: GPUs of each worker.
        env_vars: Variables of the workers.
        creation: Arguments of :meth:`RankActor.make_executable`.
    """

    def __init__(
        self,
        settings: Any,
        use_gpu: bool,
        cpus_per_slot: int,
        gpus_per_slot: int,
        env_vars: dict[str, str] | None = None,
        creation: tuple[Any, ...] = (),
    ) -> None:
        self.settings = settings
        self._use_gpu = use_gpu
        self._options = {"num_cpus": cpus_per_slot, "num_gpus": gpus_per_slot if use_gpu else 0}
        self._creation = creation
        found = settings.discovery
        self._nodes = ClusterNodes()
        self._reservations: Reservations | None = None
        if isinstance(found, RayHostDiscovery):
            first = settings.num_proc or settings.min_num_proc
            self._nodes = found.nodes
            self._reservations = Reservations(found, first, settings.max_num_proc)
            settings = copy.copy(settings)
            settings.discovery = self._reservations
        self._places = ElasticPlaces(settings, ray.util.get_node_ip_address())
        self.driver = self._places.driver
        if self._reservations is not None:
            self._reservations.is_banned = self.driver.host_manager.is_blacklisted
        self._env = {**self._places.variables, **(env_vars or {})}
        self._values: dict[tuple[str, int], tuple[int, Any]] = {}
        self._failures: list[tuple[str, RayError]] = []

    def run(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Run a function to the end of the job.

        Args:
            fn: The function.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results of the workers of the last session by rank.

        Raises:
            RuntimeError: The job could not continue.
            TimeoutException: There were not enough slots in time.
            Exception: The exception of a callback.
        """
        first = self.settings.num_proc or self.settings.min_num_proc
        # `fn` goes with each call. Ray fetches an object that was put once from any node that has it, and retries for
        # minutes if that node was lost.
        with callbacks_called(callbacks) as queue:
            self.driver.start(first, lambda slot, events: self._run_worker(slot, events, fn, queue))
            results = self.driver.get_results()
        if results.error_message is not None:
            last = self._failures[-1] if self._failures else None
            text = f"the elastic job has ended with a failure: {results.error_message}"
            if last is None:
                raise RuntimeError(text)
            raise RuntimeError(f"{text}. The last failure was that of {last[0]}: {last[1]}") from last[1]
        ended = [place for place, (code, _) in results.worker_results.items() if code == 0]
        values = [self._values[place] for place in self._values if f"{place[0]}[{place[1]}]" in ended]
        return [value for _, value in sorted(values, key=lambda pair: pair[0])]

    def stop(self) -> None:
        """End the job and its workers."""
        self._places.stop()
        if self._reservations is not None:
            self._reservations.release_all()

    def _run_worker(
        self, slot: SlotInfo, events: list[threading.Event], function: Any, queue: Any
    ) -> tuple[int, float]:
        """Run a worker to its end. Return its exit code and the time of its end."""
        place = (slot.hostname, slot.local_rank)
        name = f"{slot.hostname}[{slot.local_rank}]"
        node = self._nodes.find(slot.hostname)
        strategy: Any = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        group = None
        if self._reservations is not None:
            group = self._reservations.take(node["NodeID"])
            strategy = PlacementGroupSchedulingStrategy(group)
        actor = ray.remote(RankActor).options(**self._options, scheduling_strategy=strategy).remote()
        try:
            code = self._drive(actor, slot, node, events, function, queue)
        except RayError as error:
            # The message of an actor's death is long, and Ray has logged it.
            kind = "has died" if isinstance(error, RayActorError) else f"failed: {error}"
            print(f"horovod: worker {name} {kind}", file=sys.stderr, flush=True)
            self._failures.append((name, error))
            self._values.pop(place, None)
            code = 1
        finally:
            ray.kill(actor)
            if self._reservations is not None and group is not None:
                self._reservations.give_back(node["NodeID"], group)
        return code, time.time()

    def _drive(
        self, actor: Any, slot: SlotInfo, node: dict[str, Any], events: list[threading.Event], function: Any, queue: Any
    ) -> int:
        def outcome(reference: Any) -> Any:
            while not ray.wait([reference], timeout=_POLL_SECONDS)[0]:
                if any(event.is_set() for event in events):
                    return None
            return ray.get(reference)

        gpus = outcome(actor.get_gpu_ids.remote())
        if gpus is None:
            return 1
        devices = _visible(gpus, slot.local_rank, int(node["Resources"].get("GPU", 0))) if self._use_gpu else {}
        variables = {**self._env, **create_slot_env_vars(slot), **devices}
        references = [
            actor.set_variables.remote(variables),
            actor.set_queue.remote(queue),
            actor.make_executable.remote(*self._creation),
        ]
        for reference in references:
            # The last one calls the script's code, so it may take long.
            outcome(reference)
            if any(event.is_set() for event in events):
                return 1
        result = outcome(actor.execute_elastic.remote(function))
        if result is None:
            return 1
        rank, value, is_done = result
        if is_done:
            self._values[slot.hostname, slot.local_rank] = rank, value
        return 0


def _visible(own: list[str], slot: int, count: int) -> dict[str, str]:
    """Return the variable that lists a node's GPUs with those of this worker where its slot finds them."""
    others = [str(index) for index in range(count) if str(index) not in own]
    first = slot * len(own)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*others[:first], *own, *others[first:]])}


class ElasticRayExecutor:
    """Runs a function as an elastic job of Horovod on a Ray cluster.

    Args:
        settings: The result of :meth:`create_settings`.
        use_gpu: Whether workers get GPUs.
        cpus_per_slot: CPUs of each worker.
        gpus_per_slot: GPUs of each worker; 1 by default with ``use_gpu``.
        env_vars: Variables of the workers.
        override_discovery: Whether the nodes of the cluster are the hosts; otherwise ``settings.discovery`` finds them.

    Raises:
        ValueError: Arguments exclude each other.

    Examples:
        >>> executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=4))
        >>> executor.start()
        >>> executor.run(train)
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: set[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Create the settings of an elastic job.

        Args:
            min_num_proc: Least number of workers.
            max_num_proc: Largest number of workers; all slots of the cluster by default.
            reset_limit: Largest number of sessions after the first.
            elastic_timeout: Longest wait for slots, and for workers to call ``init()``, in seconds.
            timeout_s: Longest wait of ``hvd.init()`` for the other ranks, in seconds.
            ssh_identity_file: Accepted for compatibility, without effect: Ray starts the workers.
            nics: Interfaces that workers use; by default the core chooses.
            min_np: Deprecated: use ``min_num_proc``.
            max_np: Deprecated: use ``max_num_proc``.
            **kwargs: More arguments of :class:`ElasticSettings`, such as ``cooldown_range``. Those of launchers that
                use ``ssh`` or MPI, and those of the output of processes, have no effect.

        Returns:
            The settings.
        """
        from horovod.runner import renamed

        given = {"ssh_identity_file": ssh_identity_file, **kwargs}
        unused = [name for name in _UNUSED_SETTINGS if given.get(name)]
        if unused:
            names = ", ".join(f"`{name}`" for name in unused)
            warn_once(f"without effect: {names}. Ray starts the workers and writes their output")
        limit = timeout.Timeout(timeout_s, "{activity} took longer than {timeout} seconds")
        kwargs = {"discovery": None, "verbose": 1, "key": secret.make_secret_key(), **kwargs}
        return ElasticSettings(
            min_num_proc=renamed("min_np", min_np, "min_num_proc", min_num_proc),
            max_num_proc=renamed("max_np", max_np, "max_num_proc", max_num_proc),
            elastic_timeout=elastic_timeout,
            reset_limit=reset_limit,
            start_timeout=limit,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            **kwargs,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: dict[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot is not None and not use_gpu:
            raise ValueError("`gpus_per_slot` is set, and `use_gpu` is not")
        if gpus_per_slot is not None and gpus_per_slot < 1:
            raise ValueError(f"`gpus_per_slot` is {gpus_per_slot}: a slot has at least 1")
        self.settings = settings
        self._slots = (use_gpu, cpus_per_slot, gpus_per_slot or 1)
        self._env_vars = env_vars
        settings.discovery = choose_discovery(settings.discovery, override_discovery, *self._slots)
        self._job: ElasticJob | None = None

    def start(self) -> None:
        """Start the driver, and wait until there are enough slots.

        Raises:
            TimeoutException: There were not enough slots in time.
        """
        limit = self.settings.start_timeout
        variables = {} if limit is None else {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(limit.seconds)}
        self._job = ElasticJob(self.settings, *self._slots, env_vars={**variables, **(self._env_vars or {})})
        try:
            self._job.driver.wait_for_available_slots(self.settings.num_proc or self.settings.min_num_proc)
        except BaseException:
            self._end()
            raise

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Run a function on all workers to the end of the job, which also ends this object's driver.

        Args:
            worker_fn: The function, which uses ``hvd.elastic.run``.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results of the workers of the last session by rank.

        Raises:
            RuntimeError: The job could not continue, or :meth:`start` was not called.
        """
        if self._job is None:
            raise RuntimeError("call `start()` before `run()`")
        try:
            return self._job.run(lambda _: worker_fn(), callbacks)
        finally:
            self._end()

    def _end(self) -> None:
        if self._job is not None:
            self._job.stop()
            self._job = None
