"""Ctrl-C while the main thread is inside a function of TensorFlow that waits for an operation.

Such a function does not check for signals, and Python runs a signal's handler only once the function has returned. A
thread therefore checks whether the handler runs within a second after the signal. If it does not, the thread ends all
waits of this process in the core with an error. TensorFlow's function returns with the error, which Python replaces by
``KeyboardInterrupt``.

- INT-1: one pipe contains each signal's number, which the interpreter writes when the signal arrives, and ``_HANDLED``
  for each run of the handler, in the order in which they happened.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType

from smdistributed import _core

#: How long to wait for the main thread to return to the interpreter, in seconds.
_EXIT_SECONDS = 1.0
#: A byte in the pipe that is not a signal's number.
_HANDLED = 0
#: The ends of the pipe; none in a forked child, which has no thread to read it.
_pipe: tuple[int, int] | None = None


def watch() -> None:
    """Make Ctrl-C end such waits from now on.

    The call does nothing the second time, on a thread that is not the main one, if other code uses
    ``signal.set_wakeup_fd``, or if SIGINT has another handler than Python's, after which the program may continue.
    """
    global _pipe
    if _pipe is not None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _handle):
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(reader)
        os.close(writer)
        return
    _pipe = reader, writer
    signal.signal(signal.SIGINT, _handle)
    threading.Thread(target=_listen, args=(reader,), name="smd-interrupts", daemon=True).start()


def raise_what_replaced(error: RuntimeError) -> None:
    """Raise ``KeyboardInterrupt`` if it was raised while TensorFlow reported an interrupted wait.

    The signal's handler raises while TensorFlow creates its own error. pybind11 reports both as a ``RuntimeError``.

    Args:
        error: The error of TensorFlow's function.

    Raises:
        KeyboardInterrupt: The error is such a ``RuntimeError``.
    """
    if "REPLACED BY KeyboardInterrupt" in str(error):
        raise KeyboardInterrupt from None


def _handle(number: int, frame: FrameType | None) -> None:
    """Python's own handler; it also writes ``_HANDLED`` for the listener thread."""
    if _pipe is not None:
        # The pipe is full only if the listener has ended; then no thread reads the byte.
        with contextlib.suppress(BlockingIOError):
            os.write(_pipe[1], bytes([_HANDLED]))
    signal.default_int_handler(number, frame)


def _listen(reader: int) -> None:
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    deadline = None
    while True:
        poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1e3)
        try:
            happened = os.read(reader, 64)
        except BlockingIOError:
            # The pipe is read even if `poll` has timed out, because the handler may have run since.
            happened = b""
        for number in happened:
            if number == _HANDLED:
                deadline = None
            elif number == signal.SIGINT and deadline is None:
                deadline = time.monotonic() + _EXIT_SECONDS
        if not happened and deadline is not None and time.monotonic() >= deadline:
            deadline = None
            # After another handler than Python's own, the program may continue.
            if signal.getsignal(signal.SIGINT) is _handle:
                _core.interrupt()


def _forget() -> None:
    """Close the pipe in a forked child, whose handler must not write into its parent's pipe."""
    global _pipe
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        for end in _pipe:
            os.close(end)
        _pipe = None


os.register_at_fork(after_in_child=_forget)
