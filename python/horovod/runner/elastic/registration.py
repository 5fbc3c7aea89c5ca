"""States that workers of an elastic job have reported."""

from __future__ import annotations

import threading
from typing import Any

READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"


class WorkerStateRegistry:
    """The last state of each worker, which the driver learns as well.

    Args:
        driver: The driver, whose core decides what follows.
        host_manager: Hosts of the job.
        reset_limit: Largest number of sessions after the first; beyond it the core ends the job.
        verbose: Accepted for compatibility, without effect.
    """

    def __init__(self, driver: Any, host_manager: Any, reset_limit: int | None = None, verbose: int = 0) -> None:
        self._driver = driver
        self._host_manager = host_manager
        self._reset_limit = reset_limit
        self._lock = threading.Lock()
        self._states: dict[tuple[str, int], str] = {}

    def reset(self) -> None:
        """Forget all states when a session begins."""
        with self._lock:
            self._states.clear()

    def get(self, state: str) -> set[tuple[str, int]]:
        """Return the workers in a state.

        Args:
            state: The state.

        Returns:
            Hosts and slots.
        """
        with self._lock:
            return {place for place, found in self._states.items() if found == state}

    def count(self, state: str) -> int:
        """Return the number of workers in a state.

        Args:
            state: The state.

        Returns:
            The number.
        """
        return len(self.get(state))

    def size(self) -> int:
        """Return the number of workers that have reported a state.

        Returns:
            The number.
        """
        with self._lock:
            return len(self._states)

    def get_recorded_slots(self) -> set[tuple[str, int]]:
        """Return the workers that have reported a state.

        Returns:
            Hosts and slots.
        """
        with self._lock:
            return set(self._states)

    def record_ready(self, host: str, slot: int) -> None:
        """Record that a worker requests a rank in the next session.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.
        """
        self._record(host, slot, READY)
        self._driver.entered(host, slot)

    def record_success(self, host: str, slot: int) -> None:
        """Record that a worker has ended successfully.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.
        """
        self._record(host, slot, SUCCESS)

    def record_failure(self, host: str, slot: int) -> None:
        """Record that a worker has failed.

        Args:
            host: Name of the host.
            slot: Number of the slot on the host.
        """
        self._record(host, slot, FAILURE)

    def _record(self, host: str, slot: int, state: str) -> None:
        with self._lock:
            self._states[host, slot] = state
