"""Ctrl-C while the main thread is inside a function of TensorFlow that waits for an operation.

Such a function does not look for signals; waits of the core do. Python handles a signal only when the function returns.
A thread therefore checks whether the signal's handler has run, which happens as soon as the main thread is back in the
interpreter. If it has not run within a second, every wait of this process ends with an error. TensorFlow's functions
return with it, and Python raises ``KeyboardInterrupt`` in its place. Once the main thread has received its
``KeyboardInterrupt``, the thread leaves it alone.

- INT-1: one pipe has, in the order in which it happened, each signal's number (the interpreter writes it when the
  signal arrives) and ``_HANDLED`` for each time that the handler has run.
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
_PATIENCE = 1.0
#: A byte in the pipe that is not a signal's number.
_HANDLED = 0
#: The ends of the pipe; none in a forked child, which has no thread to read it.
_pipe: tuple[int, int] | None = None


def watch() -> None:
    """Make Ctrl-C end such waits from now on.

    The call does nothing the second time, on another thread than the main one, if other code has asked Python to be
    told of signals (``signal.set_wakeup_fd``), or if SIGINT has another handler, which may want to continue.
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
    """Raise ``KeyboardInterrupt`` if an error came from a wait that it has ended.

    The handler raises while TensorFlow creates its own error, which pybind11 reports as a ``RuntimeError``.

    Args:
        error: The error of TensorFlow's function.

    Raises:
        KeyboardInterrupt: The error is such a report.
    """
    if "REPLACED BY KeyboardInterrupt" in str(error):
        raise KeyboardInterrupt from None


def _handle(number: int, frame: FrameType | None) -> None:
    """Python's own handler, which the listener hears of."""
    if _pipe is not None:
        # The pipe is full only if the listener has ended, and then nothing needs the byte.
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
            # The pipe is read again instead of using the result of `poll`: the handler may have run meanwhile.
            happened = b""
        for number in happened:
            if number == _HANDLED:
                deadline = None
            elif number == signal.SIGINT and deadline is None:
                deadline = time.monotonic() + _PATIENCE
        if not happened and deadline is not None and time.monotonic() >= deadline:
            deadline = None
            # Other handlers than Python's own may want to continue.
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
