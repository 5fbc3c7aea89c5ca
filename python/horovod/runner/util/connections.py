"""The connections of a server with a thread for each request."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator

#: Seconds that a closing server waits for requests that are being answered.
CLOSE_TIMEOUT_S = 30.0


class Connections:
    """Tracks connections whose request is being answered, so that a server can close without losing an answer.

    Args:
        name: The name of the server, for the warning of :meth:`close`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        # Connections without an open request: new ones, and those that are kept alive after an answer.
        self._idle: set[socket.socket] = set()
        self._answering = 0
        self._closing = False

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called: a handler that waits for something ends its wait."""
        return self._closing

    @contextlib.contextmanager
    def open(self, connection: socket.socket) -> Iterator[None]:
        """Return a context for the life of a connection.

        Args:
            connection: The connection.

        Yields:
            Nothing.
        """
        with self._changed:
            self._idle.add(connection)
            if self._closing:
                _end(connection)
        try:
            yield
        finally:
            with self._changed:
                self._idle.discard(connection)

    @contextlib.contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """Return a context for the answer to an authenticated request.

        Args:
            connection: The connection.

        Yields:
            Nothing.
        """
        with self._changed:
            self._idle.discard(connection)
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._idle.add(connection)
                if self._closing:
                    _end(connection)
                self._changed.notify_all()

    def mark_closing(self) -> None:
        """Record that the server is about to close."""
        self._closing = True

    def close(self) -> None:
        """End idle connections, and wait until all requests are answered. Warn if that takes longer than 30 s."""
        with self._changed:
            self._closing = True
            for connection in self._idle:
                _end(connection)
            if not self._changed.wait_for(lambda: self._answering == 0, CLOSE_TIMEOUT_S):
                print(
                    f"{self._name}: warning: closed with {self._answering} unanswered request(s) after "
                    f"{CLOSE_TIMEOUT_S:.0f} s",
                    file=sys.stderr,
                )


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads from a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
