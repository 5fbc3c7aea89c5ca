"""The task of a host, which the task before it must reach."""

from __future__ import annotations

import threading
from typing import Any

from horovod.runner.common.service import task_service
from horovod.runner.common.util import network
from horovod.runner.common.util.timeout import Timeout


class TaskToTaskAddressCheckFinishedSignal:
    """A message that the task before has reached this one."""


class HorovodRunTaskService(task_service.BasicTaskService):
    """The task of a host.

    Args:
        index: Number of the task.
        key: The job's secret.
        nics: Interfaces at which the service is reached; all by default.
    """

    NAME_FORMAT = "horovod task service #%d"

    def __init__(self, index: int, key: bytes, nics: Any = None) -> None:
        self._found = threading.Event()
        super().__init__(self.NAME_FORMAT % index, index, key, nics)

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        if isinstance(req, TaskToTaskAddressCheckFinishedSignal):
            self._found.set()
            return network.AckResponse()
        return super()._handle(req, client_address)

    def wait_for_task_to_task_address_check_finish_signal(self, timeout: Timeout) -> None:
        """Wait until the task before has reached this one.

        Args:
            timeout: Longest wait, in seconds or as a :class:`Timeout`.

        Raises:
            TimeoutException: The wait took longer.
        """
        if not self._found.wait(timeout.remaining()):
            timeout.check_time_out_for("the address check of the previous task")


class HorovodRunTaskClient(task_service.BasicTaskClient):
    """A client of the task of a host.

    Args:
        index: Number of the task.
        task_addresses: Addresses to try, by interface.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: Number of attempts for each address.
    """

    def __init__(
        self,
        index: int,
        task_addresses: network.Addresses,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        name = HorovodRunTaskService.NAME_FORMAT % index
        super().__init__(name, task_addresses, key, verbose, match_intf, probe_timeout, attempts)

    def task_to_task_address_check_completed(self) -> None:
        """Report that the check of addresses between tasks is complete."""
        self._send(TaskToTaskAddressCheckFinishedSignal())
