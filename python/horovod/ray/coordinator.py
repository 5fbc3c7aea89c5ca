"""Places of the workers that another library has started on Ray, such as Ray Train's ``HorovodTrainer``."""

from __future__ import annotations

from typing import Any

import ray

from horovod.runner.places import Places


class Coordinator:
    """Assigns ranks to workers, and serves the store through which the ranks connect.

    Args:
        settings: An object with ``verbose``, ``key``, ``nics`` and ``timeout_s``, such as a :class:`RaySettings`.

    Examples:
        >>> coordinator = Coordinator(settings)
        >>> for rank, (hostname, node) in enumerate(workers):
        ...     coordinator.register(hostname, node, rank)
        >>> variables_by_rank = coordinator.finalize_registration()
        >>> common_variables = coordinator.establish_rendezvous()
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._places = Places(settings)

    @property
    def hostnames(self) -> list[str]:
        """Ids of the nodes in the order of their first worker, since nodes of one machine share a name."""
        return list(self._places.ranks_by_host)

    @property
    def world_size(self) -> int:
        """Number of workers so far."""
        return self._places.size

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Add a worker.

        Args:
            hostname: Name of the host; ``node_id`` identifies it.
            node_id: Id of the worker's node of Ray.
            world_rank: Rank of the worker.
        """
        self._places.add(node_id, world_rank)

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """Assign the ranks of all workers.

        Returns:
            Variables of each rank.
        """
        return self._places.variables_by_rank()

    def establish_rendezvous(self) -> dict[str, str]:
        """Start the store on this node, until the process ends or :meth:`shutdown`.

        Returns:
            Variables of all workers. They contain the job's secret.
        """
        variables = self._places.start_store(ray.util.get_node_ip_address())
        return variables | {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.settings.timeout_s)}

    def shutdown(self) -> None:
        """Stop the store."""
        self._places.shutdown()
