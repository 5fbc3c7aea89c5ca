"""Places of a job's processes where another system, such as Ray or Spark, has started them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util import codec, secret
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer


class Places:
    """Assigns ranks to workers, and serves the store through which the ranks connect.

    Args:
        settings: An object with ``verbose``, ``key`` and ``nics``.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        #: Ranks by host, hosts in the order of their first worker.
        self.ranks_by_host: dict[str, list[int]] = defaultdict(list)
        self.rendezvous: RendezvousServer | None = None
        self._slots: list[SlotInfo] = []

    @property
    def size(self) -> int:
        """Number of workers so far."""
        return sum(map(len, self.ranks_by_host.values()))

    def add(self, hostname: str, rank: int) -> None:
        """Add a worker. Machines that share an address are one host.

        Args:
            hostname: Name of the host.
            rank: Rank of the worker.
        """
        self.ranks_by_host[hostname].append(rank)

    def variables_by_rank(self) -> dict[int, dict[str, str]]:
        """Assign the ranks of all workers.

        Returns:
            Variables of each rank.
        """
        across: dict[int, int] = defaultdict(int)
        self._slots = []
        for host, ranks in self.ranks_by_host.items():
            for local_rank, rank in enumerate(sorted(ranks)):
                slot = SlotInfo(host, rank, local_rank, across[local_rank], self.size, len(ranks))
                self._slots.append(slot)
                across[local_rank] += 1
        for slot in self._slots:
            slot.cross_size = across[slot.local_rank]
        return {slot.rank: create_slot_env_vars(slot) for slot in self._slots}

    def start_store(self, address: str) -> dict[str, str]:
        """Start the store.

        Args:
            address: This host's address for the workers.

        Returns:
            Variables of all workers. They contain the job's secret.
        """
        self.rendezvous = RendezvousServer(self.settings.verbose, self.settings.key)
        port = self.rendezvous.start()
        self.rendezvous.init(self._slots)
        return create_run_env_vars(address, self.settings.nics, port) | secret_variable(self.rendezvous.key)

    def shutdown(self) -> None:
        """Stop the store."""
        if self.rendezvous is not None:
            self.rendezvous.stop()
            self.rendezvous = None


class ElasticPlaces:
    """Serves the store and drives the sessions of an elastic job, whose workers another system starts.

    Args:
        settings: An ``ElasticSettings``.
        address: This host's address for the workers.
    """

    def __init__(self, settings: Any, address: str) -> None:
        self.rendezvous = RendezvousServer(settings.verbose, settings.key)
        self.driver = ElasticDriver(
            self.rendezvous,
            settings.discovery,
            settings.min_num_proc,
            settings.max_num_proc,
            timeout=settings.elastic_timeout,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            verbose=settings.verbose,
        )
        port = self.rendezvous.start(create_rendezvous_handler(self.driver))
        #: Variables of all workers. They contain the job's secret.
        self.variables = create_run_env_vars(address, settings.nics, port, elastic=True) | secret_variable(
            self.rendezvous.key
        )

    def stop(self) -> None:
        """End the job and its workers."""
        self.driver.stop()
        self.rendezvous.stop()


def secret_variable(key: bytes) -> dict[str, str]:
    """Return the variable that gives workers the job's secret.

    Args:
        key: The secret.

    Returns:
        The value by name.
    """
    return {secret.HOROVOD_SECRET_KEY: str(codec.dumps_base64(key))}


def rank_order(hosts: Sequence[str]) -> list[int]:
    """Order workers so that those of a host follow each other, as collectives over several hosts want it.

    Args:
        hosts: Name of each worker's host.

    Returns:
        Indices of the workers by rank.
    """
    age = {host: place for place, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda worker: age[hosts[worker]])


def first_cause(failures: Mapping[int, BaseException]) -> int:
    """Choose the rank whose exception explains a failure: a failed collective is the consequence of another one.

    Args:
        failures: Exceptions by rank, the first one first; at least one.

    Returns:
        The rank.
    """
    causes = [rank for rank, failure in failures.items() if not isinstance(failure, HorovodInternalError)]
    return [*causes, *failures][0]
