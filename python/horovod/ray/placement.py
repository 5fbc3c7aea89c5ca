"""Placement of the workers of a Ray job with a fixed number of workers."""

from __future__ import annotations

import warnings
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group
from ray.util.placement_group import remove_placement_group as remove_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.common.basics import warn_once
from horovod.ray.actor import RankActor


def reserve(resources_per_bundle: dict[str, float], num_bundles: int, timeout: float, strategy: str) -> PlacementGroup:
    """Reserve resources, and wait for them.

    Args:
        resources_per_bundle: Resources of each bundle.
        num_bundles: Number of bundles.
        timeout: Longest wait in seconds.
        strategy: Ray's strategy, such as ``PACK``.

    Returns:
        The placement group.

    Raises:
        TimeoutError: The cluster did not offer the resources in time.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=strategy)
    if not group.wait(timeout_seconds=timeout):
        available = ray.available_resources()
        remove_group(group)
        raise TimeoutError(
            f"the cluster did not offer {bundles} ({strategy}) within {timeout} s; available now: {available}"
        )
    return group


def warn_of_unused_group(argument: str) -> None:
    """Warn once if the caller is in a placement group that its workers do not use.

    Args:
        argument: The argument that makes the workers reserve their own resources.
    """
    if ray.is_initialized() and get_current_placement_group() is not None:
        warn_once(
            f"workers do not use the current placement group: with `{argument}` they reserve other resources. Pass "
            "`use_current_placement_group=False` to confirm this"
        )


class Placement:
    """Creates the actors of a job.

    Args:
        settings: Settings of :meth:`horovod.ray.RayExecutor.create_settings`.
        cpus_per_worker: CPUs of each worker.
        use_gpu: Whether workers get GPUs.
        gpus_per_worker: GPUs of each worker; 1 by default.
    """

    def __init__(self, settings: Any, cpus_per_worker: int, use_gpu: bool, gpus_per_worker: int | None) -> None:
        self.settings = settings
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = (gpus_per_worker or 1) if use_gpu else 0
        self.placement_group: PlacementGroup | None = None
        self._is_own_group = False

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        raise NotImplementedError

    @property
    def has_own_group(self) -> bool:
        """Whether the resources were reserved for these workers alone."""
        return self._is_own_group

    def describe_group(self) -> str:
        """Compare the placement group with what the workers need.

        Returns:
            A part of a sentence.
        """
        bundles = self.placement_group.bundle_specs if self.placement_group is not None else []
        needs = {"CPU": self.cpus_per_worker * self.num_workers, "GPU": self.gpus_per_worker * self.num_workers}
        parts = [
            f"it has {sum(bundle.get(name, 0) for bundle in bundles):g} {name}, and the workers need {need}"
            for name, need in needs.items()
            if need
        ]
        return f"{'; '.join(parts)}, besides what the caller and others hold of it"

    def create_workers(self) -> list[Any]:
        """Reserve the resources and create the actors.

        Returns:
            The actors; those of a node need not follow each other.

        Raises:
            TimeoutError: The cluster did not offer the resources in time.
        """
        raise NotImplementedError

    def shutdown(self) -> None:
        """Release the resources."""
        if self._is_own_group and self.placement_group is not None:
            remove_group(self.placement_group)
        self.placement_group = None

    def _reserve(self, num_bundles: int, workers_per_bundle: int, strategy: str) -> None:
        bundle = {"CPU": float(self.cpus_per_worker * workers_per_bundle)}
        if self.gpus_per_worker:
            bundle["GPU"] = float(self.gpus_per_worker * workers_per_bundle)
        timeout = self.settings.placement_group_timeout_s
        self.placement_group = reserve(bundle, num_bundles, timeout, strategy)
        self._is_own_group = True

    def _create(self, bundles: list[int]) -> list[Any]:
        """Create one actor in each of these bundles; -1 is any."""
        actor = ray.remote(RankActor)
        created = []
        for bundle in bundles:
            place = PlacementGroupSchedulingStrategy(
                placement_group=self.placement_group, placement_group_bundle_index=bundle
            )
            options = actor.options(
                num_cpus=self.cpus_per_worker, num_gpus=self.gpus_per_worker, scheduling_strategy=place
            )
            created.append(options.remote())
        return created


class SpreadPlacement(Placement):
    """The same number of workers on each of some nodes.

    Args:
        settings: See :class:`Placement`.
        num_hosts: Number of nodes.
        num_workers_per_host: Workers of each node.
        cpus_per_worker: See :class:`Placement`.
        use_gpu: See :class:`Placement`.
        gpus_per_worker: See :class:`Placement`.
    """

    def __init__(
        self,
        *,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        cpus_per_worker: int,
        use_gpu: bool,
        gpus_per_worker: int | None,
    ) -> None:
        super().__init__(settings, cpus_per_worker, use_gpu, gpus_per_worker)
        self.num_hosts = num_hosts
        self.num_workers_per_host = num_workers_per_host

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.num_hosts * self.num_workers_per_host

    def create_workers(self) -> list[Any]:
        """Reserve one bundle on each node and create the actors in them.

        Returns:
            The actors.

        Raises:
            TimeoutError: The cluster did not offer the resources in time.
        """
        self._reserve(self.num_hosts, self.num_workers_per_host, "STRICT_SPREAD")
        return self._create([host for host in range(self.num_hosts) for _ in range(self.num_workers_per_host)])


class PackedPlacement(Placement):
    """A number of workers on as few nodes as possible, or in the placement group of the caller.

    Args:
        settings: See :class:`Placement`.
        num_workers: Number of workers.
        cpus_per_worker: See :class:`Placement`.
        use_gpu: See :class:`Placement`.
        gpus_per_worker: See :class:`Placement`.
        placement_group: The group to use; by default the one that the caller runs in, if it is a task of Ray.
        always_reserves: Whether the workers get a group of their own in any case.
    """

    def __init__(
        self,
        *,
        settings: Any,
        num_workers: int,
        cpus_per_worker: int,
        use_gpu: bool,
        gpus_per_worker: int | None,
        placement_group: PlacementGroup | None = None,
        always_reserves: bool = False,
    ) -> None:
        super().__init__(settings, cpus_per_worker, use_gpu, gpus_per_worker)
        self._num_workers = num_workers
        if not always_reserves:
            self.placement_group = placement_group or get_current_placement_group()

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._num_workers

    def create_workers(self) -> list[Any]:
        """Reserve resources, unless there is a group, and create the actors.

        Returns:
            The actors.

        Raises:
            TimeoutError: The cluster did not offer the resources in time.
        """
        if self.placement_group is not None:
            self._check_group(self.placement_group)
            return self._create([-1] * self._num_workers)
        self._reserve(self._num_workers, 1, "PACK")
        return self._create(list(range(self._num_workers)))

    def _check_group(self, group: PlacementGroup) -> None:
        cpus = sum(bundle.get("CPU", 0) for bundle in group.bundle_specs)
        if cpus < self.cpus_per_worker * self._num_workers:
            warnings.warn(
                f"the current placement group has {cpus:g} CPUs, and {self._num_workers} workers need "
                f"{self.cpus_per_worker * self._num_workers}: some wait until others end",
                stacklevel=3,
            )
