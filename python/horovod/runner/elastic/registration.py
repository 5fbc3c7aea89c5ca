"""What workers of an elastic job have said."""

from __future__ import annotations

import threading
from typing import Any

READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"


class WorkerStateRegistry:
    """The last word of each place's worker; the driver hears of it.

    Args:
        driver: Its core decides what follows.
        host_manager: The job's hosts.
        reset_limit: Sessions after the first, at most: the core ends the job beyond.
        verbose: Accepted.
    """

    def __init__(self, driver: Any, host_manager: Any, reset_limit: int | None = None, verbose: int = 0) -> None:
        self._driver = driver
        self._host_manager = host_manager
        self._reset_limit = reset_limit
        self._lock = threading.Lock()
        self._states: dict[tuple[str, int], str] = {}

    def reset(self) -> None:
        """A session begins: nobody has said anything."""
        with self._lock:
            self._states.clear()

    def get(self, state: str) -> set[tuple[str, int]]:
        """Hosts and slots of the workers in this state."""
        with self._lock:
            return {place for place, found in self._states.items() if found == state}

    def count(self, state: str) -> int:
        """How many these are."""
        return len(self.get(state))

    def size(self) -> int:
        """Workers that have said something."""
        with self._lock:
            return len(self._states)

    def get_recorded_slots(self) -> set[tuple[str, int]]:
        """Their hosts and slots."""
        with self._lock:
            return set(self._states)

    def record_ready(self, host: str, slot: int) -> None:
        """A worker asks for a place in the next session."""
        self._record(host, slot, READY)
        self._driver.entered(host, slot)

    def record_success(self, host: str, slot: int) -> None:
        """A worker has ended well."""
        self._record(host, slot, SUCCESS)

    def record_failure(self, host: str, slot: int) -> None:
        """A worker has failed."""
        self._record(host, slot, FAILURE)

    def _record(self, host: str, slot: int, state: str) -> None:
        with self._lock:
            self._states[host, slot] = state
