"""A time limit that callers check."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818 - the documented name
    """A time limit was exceeded."""


class Timeout:
    """A time limit, counted from now.

    Args:
        timeout: Seconds.
        message: Text of the exception; ``{timeout}`` stands for the seconds.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.monotonic() + timeout
        self._message = message

    @property
    def seconds(self) -> float:
        """The whole time limit in seconds, not what remains of it."""
        return self._timeout

    def remaining(self) -> float:
        """Return the remaining time.

        Returns:
            Seconds, at least 0.
        """
        return max(0.0, self._timeout_at - time.monotonic())

    def timed_out(self) -> bool:
        """Return whether the time is over.

        Returns:
            ``True`` if the time is over.
        """
        return time.monotonic() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raise an exception if the time is over.

        Args:
            activity: Description of the wait, for the text.

        Raises:
            TimeoutException: The time is over.
        """
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
