"""Records that workers send to callbacks in the driver."""

from __future__ import annotations

from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Set where :func:`log` puts records.

    Args:
        queue: A ``ray.util.queue.Queue``; ``None`` drops records.
    """
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Send a record to the driver, which calls each callback of ``run`` with it. Without callbacks it is dropped.

    Args:
        info_dict: The record.
    """
    if _queue is not None:
        _queue.put(info_dict)
