"""The task of a host: the one before finds it."""

from __future__ import annotations

import threading
from typing import Any

from horovod.runner.common.service import task_service
from horovod.runner.common.util import network
from horovod.runner.common.util.timeout import Timeout


class TaskToTaskAddressCheckFinishedSignal:
    """The task before has found this one."""


class HorovodRunTaskService(task_service.BasicTaskService):
    """The task of a host.

    Args:
        index: Its number.
        key: The secret.
        nics: Interfaces to be found at; all by default.
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
        """Waits until the task before has found this one.

        Raises:
            TimeoutException: It took longer.
        """
        if not self._found.wait(timeout.remaining()):
            timeout.check_time_out_for("the address check of the task before")


class HorovodRunTaskClient(task_service.BasicTaskClient):
    """Tells such a task.

    Args:
        index: Its number.
        task_addresses: Where it may be found.
        key: The secret.
        verbose: Accepted.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: How often each is tried.
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
        """It has been found."""
        self._send(TaskToTaskAddressCheckFinishedSignal())
