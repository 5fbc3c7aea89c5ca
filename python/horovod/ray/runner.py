"""Jobs on a Ray cluster: a fixed number of workers here, elastic ones by :mod:`horovod.ray.elastic_workers`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from horovod.common.basics import warn_once
from horovod.ray.coordinator import Coordinator as Coordinator
from horovod.ray.elastic_workers import ElasticSize, ElasticWorkers
from horovod.ray.placement import PackedPlacement, Placement, SpreadPlacement, warn_of_unused_group
from horovod.ray.results import call_all, callbacks_called, gather
from horovod.ray.workers import WorkerResources, Workers
from horovod.runner.common.util import secret
from horovod.runner.places import Places, rank_order


@dataclass
class RaySettings:
    """Settings of a job on Ray, as :meth:`RayExecutor.create_settings` returns them.

    Attributes:
        nics: Interfaces that workers use; by default the core chooses.
        verbose: 2 prints more lines.
        key: The job's secret.
        timeout_s: Longest wait of ``hvd.init()`` for the other ranks, in seconds.
        placement_group_timeout_s: Longest wait for resources, in seconds.
    """

    nics: set[str] | None = None
    verbose: int = 1
    key: bytes = field(default_factory=secret.make_secret_key, repr=False)
    timeout_s: int = 300
    placement_group_timeout_s: int = 100


@dataclass
class FixedSize(WorkerResources):
    """Number and resources of the workers of a job that is not elastic.

    Attributes:
        num_workers: Number of workers.
        num_hosts: Number of nodes, with ``num_workers_per_host`` workers on each.
        num_workers_per_host: Workers of each node.
        use_current_placement_group: Whether workers run in the placement group of the caller, if it is a task of Ray.
    """

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers and self.num_hosts:
            raise ValueError("`num_workers` and `num_hosts` exclude each other")
        if not self.num_workers and not self.num_hosts:
            raise ValueError("set `num_workers` or `num_hosts`, or `min_workers` for an elastic job")

    def create_placement(self, settings: Any) -> Placement:
        """Choose where workers are placed.

        Args:
            settings: A :class:`RaySettings`.

        Returns:
            The strategy.
        """
        resources: dict[str, Any] = {
            "settings": settings,
            "cpus_per_worker": self.cpus_per_worker,
            "use_gpu": self.use_gpu,
            "gpus_per_worker": self.gpus_per_worker,
        }
        if self.num_hosts:
            return SpreadPlacement(
                num_hosts=self.num_hosts, num_workers_per_host=self.num_workers_per_host, **resources
            )
        is_own = not self.use_current_placement_group
        assert self.num_workers is not None, "one of both is set"
        return PackedPlacement(num_workers=self.num_workers, always_reserves=is_own, **resources)


class FixedWorkers(Workers):
    """Workers whose number is fixed.

    Args:
        settings: A :class:`RaySettings`.
        params: Number and resources of the workers.
    """

    def __init__(self, settings: Any, params: FixedSize) -> None:
        self.settings = settings
        self.params = params
        self.workers: list[Any] = []
        self._hosts: list[str] = []
        self._places: Places | None = None
        self._placement: Placement | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: dict[str, str] | None = None,
    ) -> None:
        """Start the workers and assign their ranks.

        Args:
            executable_cls: Class of the object that :meth:`execute` passes to functions.
            executable_args: Arguments of the class.
            executable_kwargs: Keyword arguments of the class.
            extra_env_vars: Variables of the workers.

        Raises:
            TimeoutError: The cluster did not offer the resources in time.
            RuntimeError: The workers run already.
        """
        if self.workers:
            raise RuntimeError("the workers run already: call `shutdown()` before another `start()`")
        self._placement = self.params.create_placement(self.settings)
        try:
            self._start(extra_env_vars or {})
            creation = (executable_cls, executable_args, executable_kwargs)
            call_all(lambda worker: worker.make_executable.remote(*creation), self.workers)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, extra_env_vars: dict[str, str]) -> None:
        assert self._placement is not None, "it was chosen before"
        self.workers = self._placement.create_workers()
        self._wait_for_workers()
        hosts = call_all(lambda worker: worker.hostname.remote(), self.workers)
        nodes = call_all(lambda worker: worker.node_id.remote(), self.workers)
        gpus = call_all(lambda worker: worker.get_gpu_ids.remote(), self.workers)
        order = rank_order(hosts)
        self.workers = [self.workers[worker] for worker in order]
        self._hosts = [hosts[worker] for worker in order]
        places_of_job = self._places = Places(self.settings)
        visible: dict[str, list[str]] = defaultdict(list)
        for rank, worker in enumerate(order):
            places_of_job.add(hosts[worker], rank)
            visible[nodes[worker]] += gpus[worker]
        places = places_of_job.variables_by_rank()
        common = places_of_job.start_store(ray.util.get_node_ip_address())
        common |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.settings.timeout_s), **extra_env_vars}
        variables = []
        for rank, worker in enumerate(order):
            # Scripts choose the device with the number of their local rank.
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible[nodes[worker]])} if self.params.use_gpu else {}
            variables.append({**common, **places[rank], **devices})
        ray.get([worker.set_variables.remote(own) for worker, own in zip(self.workers, variables, strict=True)])

    def _wait_for_workers(self) -> None:
        """Wait until all workers run. Those in the caller's group may wait for its resources."""
        assert self._placement is not None, "it was chosen before"
        if self._placement.has_own_group:
            return
        timeout = self.settings.placement_group_timeout_s
        started = [worker.node_id.remote() for worker in self.workers]
        _, late = ray.wait(started, num_returns=len(started), timeout=timeout)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(started)} workers found no resources in the current placement group within "
                f"{timeout} s: {self._placement.describe_group()}. Make the group larger, or pass "
                "`use_current_placement_group=False`"
            )

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function on all workers with their objects of ``executable_cls``.

        Args:
            fn: The function.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            RuntimeError: A worker has died, or there are none.
            Exception: The exception of a worker.
        """
        with callbacks_called(callbacks) as queue:
            call_all(lambda worker: worker.set_queue.remote(queue), self._started())
            return gather(self._call(fn), self._hosts)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call a function on all workers.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            RuntimeError: A worker has died, or there are none.
            Exception: The exception of a worker.
        """
        return self.execute(_without_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a function on all workers without waiting.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            References of the results by rank, for ``ray.get``.

        Raises:
            RuntimeError: There are no workers.
        """
        return self._call(_without_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function on rank 0 with its object of ``executable_cls``.

        Args:
            fn: The function.

        Returns:
            The result.

        Raises:
            RuntimeError: The worker has died, or there is none.
            Exception: The exception of the worker.
        """
        worker = self._started()[0]
        return gather([worker.execute.remote(fn)], self._hosts)[0]

    def shutdown(self) -> None:
        """End the workers and release their resources."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self._places is not None:
            self._places.shutdown()
            self._places = None
        if self._placement is not None:
            self._placement.shutdown()
            self._placement = None

    def _started(self) -> list[Any]:
        if not self.workers:
            raise RuntimeError("there are no workers: call `start()` first")
        return self.workers

    def _call(self, fn: Callable[[Any], Any]) -> list[Any]:
        workers, function = self._started(), ray.put(fn)
        # Not before, as another process may take the port. An actor executes its calls in their order.
        address = workers[0].find_address.remote()
        for worker in workers:
            worker.offer_address.remote(address)
        return [worker.execute.remote(function) for worker in workers]


def _without_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> Callable[[Any], Any]:
    return lambda _: fn(*(args or ()), **(kwargs or {}))


class RayExecutor:
    """Runs functions as the ranks of a job of Horovod on a Ray cluster.

    Args:
        settings: The result of :meth:`create_settings`.
        num_workers: Number of workers, on as few nodes as possible.
        num_hosts: Number of nodes, with ``num_workers_per_host`` workers on each.
        num_workers_per_host: Workers of each node of ``num_hosts``.
        cpus_per_worker: CPUs of each worker.
        use_gpu: Whether workers get GPUs. ``CUDA_VISIBLE_DEVICES`` lists those of all workers of a node by local rank.
        gpus_per_worker: GPUs of each worker; 1 by default with ``use_gpu``.
        use_current_placement_group: Whether workers run in the placement group of the caller, if it is a task of Ray.
            Only those of ``num_workers`` do.
        min_workers: Least number of workers of an elastic job; without it, the job is not elastic.
        max_workers: Largest number of workers of an elastic job; all slots of the cluster by default.
        reset_limit: Largest number of sessions of an elastic job after the first.
        cooldown_range: Least and largest time that a node is not used after a worker failed there, in seconds.
        elastic_timeout: Longest wait of an elastic job for slots, in seconds.
        override_discovery: Whether the nodes of the cluster are the hosts of an elastic job; otherwise
            ``settings.discovery`` finds them.

    Raises:
        ValueError: Arguments exclude each other.

    Examples:
        >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
        >>> executor.start()
        >>> executor.run(train, kwargs={"epochs": 5})
        >>> executor.shutdown()
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: set[str] | None = None,
    ) -> RaySettings:
        """Create the settings of a job.

        Args:
            timeout_s: Longest wait of ``hvd.init()`` for the other ranks, in seconds.
            ssh_identity_file: Accepted for compatibility, without effect.
            ssh_str: Accepted for compatibility, without effect.
            placement_group_timeout_s: Longest wait for resources, in seconds.
            nics: Interfaces that workers use; by default the core chooses.

        Returns:
            The settings.
        """
        if ssh_identity_file or ssh_str:
            warn_once("`ssh_identity_file` and `ssh_str` have no effect: Ray starts the workers")
        return RaySettings(
            nics=nics,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        resources: dict[str, Any] = {
            "cpus_per_worker": cpus_per_worker,
            "use_gpu": use_gpu,
            "gpus_per_worker": gpus_per_worker,
        }
        self.workers: Workers
        self._uses_group = use_current_placement_group
        #: The argument that makes workers reserve resources outside the caller's placement group.
        self._reserving = "min_workers" if min_workers is not None else "num_hosts" if num_hosts else None
        if num_workers_per_host != 1 and not num_hosts:
            warn_once("`num_workers_per_host` has no effect without `num_hosts`")
        if min_workers is not None:
            if num_workers is not None:
                raise ValueError("`min_workers` and `num_workers` exclude each other")
            if num_hosts is not None:
                raise ValueError("`min_workers` and `num_hosts` exclude each other")
            elastic = ElasticSize(
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
                **resources,
            )
            self.workers = ElasticWorkers(settings, elastic)
            default = RaySettings.placement_group_timeout_s
            if getattr(settings, "placement_group_timeout_s", default) != default:
                warn_once("`placement_group_timeout_s` has no effect with `min_workers`: set `elastic_timeout`")
        else:
            elastic_arguments = {
                "max_workers": max_workers is not None,
                "reset_limit": reset_limit is not None,
                "cooldown_range": cooldown_range is not None,
                "elastic_timeout": elastic_timeout != ElasticSize.elastic_timeout,
                "override_discovery": not override_discovery,
            }
            given = [f"`{name}`" for name, is_given in elastic_arguments.items() if is_given]
            if given:
                warn_once(f"without effect: {', '.join(given)}. Only a job with `min_workers` is elastic")
            static = FixedSize(
                num_workers=num_workers,
                num_hosts=num_hosts,
                num_workers_per_host=num_workers_per_host,
                use_current_placement_group=use_current_placement_group,
                **resources,
            )
            self.workers = FixedWorkers(settings, static)

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: dict[str, str] | None = None,
    ) -> None:
        """Start the workers. Those of an elastic job start with each function.

        Args:
            executable_cls: Class of the object that :meth:`execute` passes to functions.
            executable_args: Arguments of the class.
            executable_kwargs: Keyword arguments of the class.
            extra_env_vars: Variables of the workers.

        Raises:
            TimeoutError: The cluster did not offer the resources in time.
        """
        if executable_cls is None and (executable_args or executable_kwargs):
            warn_once("`executable_args` and `executable_kwargs` have no effect without `executable_cls`")
        if self._uses_group and self._reserving:
            warn_of_unused_group(self._reserving)
        self.workers.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function on all workers with their objects of ``executable_cls``.

        Args:
            fn: The function.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            RuntimeError: A worker has died.
            Exception: The exception of a worker.
        """
        return self.workers.execute(fn, callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call a function on all workers.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            RuntimeError: A worker has died.
            Exception: The exception of a worker.
        """
        return self.workers.run(fn, args, kwargs, callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a function on all workers without waiting.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            References of the results by rank, for ``ray.get``.

        Raises:
            NotImplementedError: The job is elastic.
        """
        return self.workers.run_remote(fn, args, kwargs)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function on rank 0 with its object of ``executable_cls``.

        Args:
            fn: The function.

        Returns:
            The result.

        Raises:
            NotImplementedError: The job is elastic.
        """
        return self.workers.execute_single(fn)

    def shutdown(self) -> None:
        """End the workers and release their resources."""
        self.workers.shutdown()
