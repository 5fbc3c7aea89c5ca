"""Ctrl-C while the main thread is inside of a function of TensorFlow's, which waits for an operation and hears no signals.

Waits of the core look for signals themselves. Of others Python knows only when they return, so a thread looks whether the
main thread has come back to the interpreter, where the signal's handler raises. If it has not, every wait of this process
ends with an error; TensorFlow's functions return with it, and Python raises ``KeyboardInterrupt`` in its place.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from smdistributed import _core

#: How long the main thread has to come back by itself, in seconds.
_PATIENCE = 1.0
_is_watched = False


def watch() -> None:
    """From now on Ctrl-C ends such waits. Does nothing the second time, on another thread than the main one, or if somebody
    else has asked Python to be told of signals (``signal.set_wakeup_fd``)."""
    global _is_watched
    if _is_watched or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(reader)
        os.close(writer)
        return
    _is_watched = True
    # A child has the pipe, too, and no thread of its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_listen, args=(reader,), name="smd-interrupts", daemon=True).start()


def raise_what_replaced(error: RuntimeError) -> None:
    """Raises ``KeyboardInterrupt`` if ``error`` is of a wait that it has ended: the handler raises while TensorFlow makes its own
    error, and pybind11 takes that for a mistake."""
    if "REPLACED BY KeyboardInterrupt" in str(error):
        raise KeyboardInterrupt from None


def _listen(reader: int) -> None:
    while True:
        if signal.SIGINT not in os.read(reader, 64):
            continue
        # A handler of the script's may want to go on.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and not _main_thread_moves():
            _core.interrupt()


def _main_thread_moves() -> bool:
    """Whether the main thread runs anything of Python's soon; it would raise then."""
    before = _place()
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if _place() != before:
            return True
    return False


def _place() -> tuple[int, int] | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
