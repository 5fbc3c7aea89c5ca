"""Where the tasks of a launcher say where they are found."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.util import network
from horovod.runner.common.util.network import Addresses, Registrations
from horovod.runner.common.util.timeout import Timeout


class RegisterTaskRequest:
    """A task is there.

    Args:
        index: Its number.
        task_addresses: Where its service is found.
        host_hash: What tells its host from others.
    """

    def __init__(self, index: int, task_addresses: Addresses, host_hash: str) -> None:
        self.index = index
        self.task_addresses = task_addresses
        self.host_hash = host_hash


class AllTaskAddressesRequest:
    """Where is this task found?"""

    def __init__(self, index: int) -> None:
        self.index = index


class AllTaskAddressesResponse:
    """There."""

    def __init__(self, all_task_addresses: Addresses) -> None:
        self.all_task_addresses = all_task_addresses


class RegisterTaskToTaskAddressesRequest:
    """A task has found this one at these addresses."""

    def __init__(self, index: int, task_addresses: Addresses) -> None:
        self.index = index
        self.task_addresses = task_addresses


def _left(timeout: Timeout | float | None) -> float | None:
    return timeout.remaining() if isinstance(timeout, Timeout) else timeout


class BasicDriverService(network.BasicService):
    """Collects where tasks are found, and where they find each other.

    Args:
        num_proc: Tasks.
        name: The service's name.
        key: The secret.
        nics: Interfaces to be found at; all by default.
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
        """Where a task says that it is found."""
        found: Addresses = self._tasks[index]
        return found

    def task_addresses_for_driver(self, index: int) -> Addresses:
        """The same; nobody else's word is needed."""
        return self.all_task_addresses(index)

    def task_addresses_for_tasks(self, index: int) -> Addresses:
        """Where another task has found it."""
        found: Addresses = self._found[index]
        return found

    def task_indices(self) -> list[int]:
        """Numbers of the tasks that are there."""
        return [index for index, _ in self._tasks.items()]

    def task_index_host_hash(self, index: int) -> str:
        """What tells a task's host from others."""
        return str(self._hashes[index])

    def task_host_hash_indices(self) -> dict[str, list[int]]:
        """Tasks by host."""
        found: dict[str, list[int]] = {}
        for index, host in self._hashes.items():
            found.setdefault(host, []).append(index)
        return found

    def wait_for_initial_registration(self, timeout: Timeout | float | None) -> None:
        """Waits until all tasks are there.

        Raises:
            TimeoutError: It took longer.
        """
        self._tasks.wait(range(self._num_proc), _left(timeout), "tasks to start")

    def wait_for_task_to_task_address_updates(self, timeout: Timeout | float | None) -> None:
        """Waits until each has been found by another.

        Raises:
            TimeoutError: It took longer.
        """
        self._found.wait(range(self._num_proc), _left(timeout), "tasks to be found by others")

    def get_common_interfaces(self) -> set[str]:
        """Interfaces at which all tasks are found.

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
    """Tells the driver, and asks it.

    Args:
        service_name: The service's name.
        driver_addresses: Where it may be found.
        key: The secret.
        verbose: Accepted.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: How often each is tried.
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
        """A task is there."""
        self._send(RegisterTaskRequest(index, task_addresses, host_hash))

    def all_task_addresses(self, index: int) -> Addresses:
        """Where a task says that it is found."""
        found: Addresses = self._send(AllTaskAddressesRequest(index)).all_task_addresses
        return found

    def register_task_to_task_addresses(self, index: int, task_addresses: Addresses) -> None:
        """Where a task has been found."""
        self._send(RegisterTaskToTaskAddressesRequest(index, task_addresses))
