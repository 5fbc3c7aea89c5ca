"""A pipe of text between threads."""

from __future__ import annotations

import threading


class Pipe:
    """A pipe of text between two threads. It holds one piece at a time; writers wait for the reader."""

    def __init__(self) -> None:
        self._buffer: str | None = None
        self._offset = 0
        self._closed = False
        self._changed = threading.Condition()

    def write(self, buf: str) -> int:
        """Write a piece once the piece before is read.

        Args:
            buf: The text.

        Returns:
            Its length.

        Raises:
            RuntimeError: The pipe is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._buffer is None)
            if self._closed:
                raise RuntimeError("Pipe is closed")
            if buf:
                self._buffer, self._offset = buf, 0
                self._changed.notify_all()
        return len(buf)

    def read(self, length: int = -1, timeout: float | None = None) -> str | None:
        """Read text, and wait for some.

        Args:
            length: Largest number of characters; -1 means no limit.
            timeout: Longest wait, in seconds; ``None`` means no limit.

        Returns:
            The text; ``None`` at the end, or when the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._buffer is not None, timeout)
            if self._buffer is None:
                return None
            end = len(self._buffer) if length <= 0 else self._offset + length
            piece = self._buffer[self._offset : end]
            self._offset += len(piece)
            if self._offset >= len(self._buffer):
                self._buffer = None
                self._changed.notify_all()
            return piece

    def at_end(self) -> bool:
        """Return whether the pipe is closed and all of it was read.

        Returns:
            ``True`` if the pipe is closed and all of it was read.
        """
        with self._changed:
            return self._closed and self._buffer is None

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """End the text. A piece that was written before can still be read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
