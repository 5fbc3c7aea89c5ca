"""A time limit that is asked now and then."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818 - the documented name
    """It took too long."""


class Timeout:
    """A limit from now on.

    Args:
        timeout: Seconds.
        message: What is said when they are over; ``{timeout}`` stands for the seconds.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._timeout_at - time.monotonic())

    def timed_out(self) -> bool:
        """Whether they are over."""
        return time.monotonic() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raises if they are.

        Raises:
            TimeoutException: With the message.
        """
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
