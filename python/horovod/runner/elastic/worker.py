"""What a process of an elastic job hears of its hosts."""

from __future__ import annotations

from enum import IntFlag

from horovod.common.elastic import WorkerNotificationManager as WorkerNotificationManager
from horovod.common.elastic import notification_manager as notification_manager


class HostUpdateResult(IntFlag):
    """What has changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
