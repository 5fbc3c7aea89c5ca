"""The service with which the launcher's tasks register their addresses."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.util import network
from horovod.runner.common.util.network import Addresses, Registrations
from horovod.runner.common.util.timeout import Timeout


class RegisterTaskRequest:
    """Registers a task.

    Args:
        index: Number of the task.
        task_addresses: Addresses of its service, by interface.
        host_hash: Identifies its host.
    """

    def __init__(self, index: int, task_addresses: Addresses, host_hash: str) -> None:
        self.index = index
        self.task_addresses = task_addresses
        self.host_hash = host_hash


class AllTaskAddressesRequest:
    """A request for the addresses of a task.

    Args:
        index: Number of the task.
    """

    def __init__(self, index: int) -> None:
        self.index = index


class AllTaskAddressesResponse:
    """The addresses of a task.

    Args:
        all_task_addresses: The addresses, by interface.
    """

    def __init__(self, all_task_addresses: Addresses) -> None:
        self.all_task_addresses = all_task_addresses


class RegisterTaskToTaskAddressesRequest:
    """Registers the addresses at which another task has reached this one.

    Args:
        index: Number of the task.
        task_addresses: The addresses, by interface.
    """

    def __init__(self, index: int, task_addresses: Addresses) -> None:
        self.index = index
        self.task_addresses = task_addresses


def _left(timeout: Timeout | float | None) -> float | None:
    return timeout.remaining() if isinstance(timeout, Timeout) else timeout


class BasicDriverService(network.BasicService):
    """Collects the addresses of tasks, and the addresses at which they reach each other.

    Args:
        num_proc: Number of tasks.
        name: Name of the service.
        key: The job's secret.
        nics: Interfaces at which the service is reached; all by default.
    """

    def __init__(self, num_proc: int, name: str, key: bytes, nics: Any = None) -> None:
        self._num_proc = num_proc
        self._tasks = Registrations()
        self._found = Registrations()
        self._hashes = Registrations()
        super().__init__(name, key, nics)

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        if isinstance(req, RegisterTaskRequest):
            if not 0 <= req.index < self._num_proc:
                raise ValueError(f"there is no task {req.index}: there are {self._num_proc}")
            self._hashes.put(req.index, req.host_hash)
            self._tasks.put(req.index, req.task_addresses)
            return network.AckResponse()
        if isinstance(req, AllTaskAddressesRequest):
            return AllTaskAddressesResponse(self.all_task_addresses(req.index))
        if isinstance(req, RegisterTaskToTaskAddressesRequest):
            self._found.put(req.index, req.task_addresses)
            return network.AckResponse()
        return super()._handle(req, client_address)

    def all_task_addresses(self, index: int) -> Addresses:
        """Return the addresses that a task has registered.

        Args:
            index: Number of the task.

        Returns:
            Addresses by interface.
        """
        found: Addresses = self._tasks[index]
        return found

    def task_addresses_for_driver(self, index: int) -> Addresses:
        """Return the addresses at which the driver reaches a task: all that it has registered.

        Args:
            index: Number of the task.

        Returns:
            Addresses by interface.
        """
        return self.all_task_addresses(index)

    def task_addresses_for_tasks(self, index: int) -> Addresses:
        """Return the addresses at which another task has reached a task.

        Args:
            index: Number of the task.

        Returns:
            Addresses by interface.
        """
        found: Addresses = self._found[index]
        return found

    def task_indices(self) -> list[int]:
        """Return the numbers of the registered tasks.

        Returns:
            The numbers.
        """
        return [index for index, _ in self._tasks.items()]

    def task_index_host_hash(self, index: int) -> str:
        """Return the hash of a task's host.

        Args:
            index: Number of the task.

        Returns:
            The hash.
        """
        return str(self._hashes[index])

    def task_host_hash_indices(self) -> dict[str, list[int]]:
        """Return the tasks of each host.

        Returns:
            Numbers of tasks, by the hash of their host.
        """
        found: dict[str, list[int]] = {}
        for index, host in self._hashes.items():
            found.setdefault(host, []).append(index)
        return found

    def wait_for_initial_registration(self, timeout: Timeout | float | None) -> None:
        """Wait until all tasks have registered.

        Args:
            timeout: Longest wait, in seconds or as a :class:`Timeout`.

        Raises:
            TimeoutError: The wait took longer.
        """
        self._tasks.wait(range(self._num_proc), _left(timeout), "tasks to start")

    def wait_for_task_to_task_address_updates(self, timeout: Timeout | float | None) -> None:
        """Wait until each task has been reached by another.

        Args:
            timeout: Longest wait, in seconds or as a :class:`Timeout`.

        Raises:
            TimeoutError: The wait took longer.
        """
        self._found.wait(range(self._num_proc), _left(timeout), "tasks to be found by others")

    def get_common_interfaces(self) -> set[str]:
        """Return the interfaces at which all tasks are reached.

        Returns:
            Names of interfaces.

        Raises:
            RuntimeError: There are none.
        """
        found = {index: set(places) for index, places in self._found.items()}
        common = set.intersection(*found.values()) if found else set()
        if not common:
            names = {index: sorted(places) for index, places in found.items()}
            raise RuntimeError(f"Unable to find a set of common task-to-task communication interfaces: {names}")
        return common


class BasicDriverClient(network.BasicClient):
    """A client of a driver service.

    Args:
        service_name: Name of the service.
        driver_addresses: Addresses to try, by interface.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: Number of attempts for each address.
    """

    def __init__(
        self,
        service_name: str,
        driver_addresses: network.Addresses,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        super().__init__(service_name, driver_addresses, key, verbose, match_intf, probe_timeout, attempts)

    def register_task(self, index: int, task_addresses: Addresses, host_hash: str) -> None:
        """Register a task.

        Args:
            index: Number of the task.
            task_addresses: Addresses of its service, by interface.
            host_hash: Identifies its host.
        """
        self._send(RegisterTaskRequest(index, task_addresses, host_hash))

    def all_task_addresses(self, index: int) -> Addresses:
        """Return the addresses that a task has registered.

        Args:
            index: Number of the task.

        Returns:
            Addresses by interface.
        """
        found: Addresses = self._send(AllTaskAddressesRequest(index)).all_task_addresses
        return found

    def register_task_to_task_addresses(self, index: int, task_addresses: Addresses) -> None:
        """Register the addresses at which a task was reached.

        Args:
            index: Number of the task.
            task_addresses: The addresses, by interface.
        """
        self._send(RegisterTaskToTaskAddressesRequest(index, task_addresses))
