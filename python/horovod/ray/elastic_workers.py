"""Elastic jobs of :class:`horovod.ray.RayExecutor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.ray.elastic import ElasticJob, choose_discovery
from horovod.ray.elastic import RayHostDiscovery as RayHostDiscovery
from horovod.ray.workers import WorkerResources, Workers
from horovod.runner.elastic.settings import ElasticSettings


@dataclass
class ElasticSize(WorkerResources):
    """Limits and resources of an elastic job.

    Attributes:
        min_workers: Least number of workers.
        max_workers: Largest number of workers; all slots of the cluster by default.
        reset_limit: Largest number of sessions after the first.
        cooldown_range: Least and largest time that a node is not used after a worker failed there, in seconds.
        elastic_timeout: Longest wait for slots, in seconds.
        override_discovery: Whether the nodes of the cluster are the hosts.
    """

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    elastic_timeout: int = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_workers < 1:
            raise ValueError(f"`min_workers` is {self.min_workers}: a job has at least 1")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers is {self.max_workers}, and min_workers is {self.min_workers}.")


class ElasticWorkers(Workers):
    """Workers that join and leave. Each function is a job of its own, whose workers start with it.

    Args:
        settings: Settings of :meth:`horovod.ray.RayExecutor.create_settings`.
        params: Limits and resources.
    """

    def __init__(self, settings: Any, params: ElasticSize) -> None:
        self.settings = settings
        self.params = params
        given = getattr(settings, "discovery", None)
        slots = (params.use_gpu, params.cpus_per_worker, params.gpus_per_worker or 1)
        self._discovery = choose_discovery(given, params.override_discovery, *slots)
        self._creation: tuple[Any, ...] | None = None
        self._env_vars: dict[str, str] = {}

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: dict[str, str] | None = None,
    ) -> None:
        """Keep what workers need at their start.

        Args:
            executable_cls: Class of the object that :meth:`execute` passes to functions.
            executable_args: Arguments of the class.
            executable_kwargs: Keyword arguments of the class.
            extra_env_vars: Variables of the workers.
        """
        self._creation = (executable_cls, executable_args, executable_kwargs)
        self._env_vars = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.settings.timeout_s), **(extra_env_vars or {})}

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Run a function as an elastic job; each worker has its object of ``executable_cls``.

        Args:
            fn: The function.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results of the workers of the last session by rank.

        Raises:
            RuntimeError: The job could not continue, or :meth:`start` was not called.
        """
        if self._creation is None:
            raise RuntimeError("call `start()` first")
        params = self.params
        settings = ElasticSettings(
            discovery=self._discovery,
            min_num_proc=params.min_workers,
            max_num_proc=params.max_workers,
            elastic_timeout=params.elastic_timeout,
            reset_limit=params.reset_limit,
            cooldown_range=params.cooldown_range,
            verbose=self.settings.verbose,
            key=self.settings.key,
            nics=self.settings.nics,
        )
        resources = (params.use_gpu, params.cpus_per_worker, params.gpus_per_worker or 1)
        job = ElasticJob(settings, *resources, env_vars=self._env_vars, creation=self._creation)
        try:
            return job.run(fn, callbacks)
        finally:
            job.stop()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Run a function as an elastic job.

        Args:
            fn: The function, which uses ``hvd.elastic.run``.
            args: Its arguments.
            kwargs: Its keyword arguments.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results of the workers of the last session by rank.

        Raises:
            RuntimeError: The job could not continue, or :meth:`start` was not called.
        """
        return self.execute(lambda _: fn(*(args or ()), **(kwargs or {})), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Raise an error: workers of an elastic job change, so there is no reference for each rank.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("an elastic job has no references by rank: use `run`, in a thread if need be")

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Raise an error: workers of an elastic job exist only while a function runs on all of them.

        Args:
            fn: The function.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("workers of an elastic job exist only during `run` and `execute`")

    def shutdown(self) -> None:
        """Forget what :meth:`start` has kept. The workers have ended with their functions."""
        self._creation = None
