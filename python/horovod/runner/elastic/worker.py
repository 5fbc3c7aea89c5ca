"""Notices of hosts for the workers of an elastic job."""

from __future__ import annotations

from typing import Any

from horovod.common.elastic import WorkerNotificationManager as WorkerNotificationManager
from horovod.common.elastic import notification_manager as notification_manager
from horovod.runner.common.util import network
from horovod.runner.elastic.constants import HostUpdateResult as HostUpdateResult


class HostsUpdatedRequest:
    """A message that hosts have joined or left.

    Args:
        timestamp: Time of the change in seconds since 1970.
        res: Kind of the change.
    """

    def __init__(self, timestamp: float, res: HostUpdateResult = HostUpdateResult.no_update) -> None:
        self.timestamp = timestamp
        self.res = res


class WorkerNotificationService(network.BasicService):
    """Receives notices of an :class:`~horovod.runner.elastic.driver.ElasticDriver` for a worker.

    Args:
        key: The job's secret.
        nic: The interface at which the service is reached; all by default.
        manager: Passes the notices on to states.
    """

    NAME = "worker notification service"

    def __init__(self, key: bytes, nic: str | None, manager: WorkerNotificationManager) -> None:
        self._manager = manager
        super().__init__(self.NAME, key, {nic} if nic else None)

    def _handle(self, req: Any, client_address: Any) -> Any:
        if isinstance(req, HostsUpdatedRequest):
            self._manager.handle_hosts_updated(req.timestamp, int(req.res))
            return network.AckResponse()
        return super()._handle(req, client_address)


class WorkerNotificationClient(network.BasicClient):
    """Sends notices to a worker.

    Args:
        addresses: Addresses of the worker's service.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
    """

    def __init__(self, addresses: Any, key: bytes, verbose: int = 0, match_intf: bool = False) -> None:
        super().__init__(WorkerNotificationService.NAME, addresses, key, verbose, match_intf=match_intf)

    def notify_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Send a notice.

        Args:
            timestamp: Time of the change in seconds since 1970.
            update_res: Kind of the change.
        """
        self._send(HostsUpdatedRequest(timestamp, update_res), timeout=self._probe_timeout)
