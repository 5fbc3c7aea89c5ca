"""Joining and leaving the job, and reporting a failure of this process to it."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import process as mp_process
from multiprocessing import util as mp_util
from types import TracebackType

from smdistributed import _core
from smdistributed._common import errors, interrupts

_exported: dict[str, str] = {}
_hooked = False
#: What runs before the process leaves the job, with the process that has asked for it: a forked child has not.
_before_finish: list[tuple[int, weakref.WeakMethod[Callable[[], None]]]] = []


def init() -> None:
    """Join the job that the launcher's environment describes, and wait until all ranks have joined.

    Raises:
        AlreadyInitializedError: This process is in a job already.
        ConfigError: The environment contradicts itself.
        PeerFailedError, WaitTimeoutError, RendezvousError: Not all ranks have joined.
    """
    _core.init()
    export_environment()
    watch()
    if "tensorflow" in sys.modules:
        interrupts.watch()


def shutdown() -> None:
    """Leave the job; do nothing if this process is in none. :func:`init` may be called again afterwards."""
    try:
        _run_before_finish()
    finally:
        _core.shutdown()
        for name, value in _exported.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        _exported.clear()


def export_environment() -> None:
    """Set the variables of torch's ``env://`` that the launcher did not set.

    ``init_process_group`` then works under any launcher. :func:`shutdown` removes them, so that they do not reach jobs
    that this process starts later.
    """
    for name, value in _core.missing_environment():
        os.environ[name] = value
        _exported[name] = value


def watch() -> None:
    """From now on, report to the job how this process ends. Does nothing on a second call."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _report(error)
        previous(kind, error, trace)

    sys.excepthook = report
    atexit.register(_finish)
    if mp_process.parent_process() is not None:
        # Children of multiprocessing run neither atexit functions nor the excepthook.
        mp_util.Finalize(None, _finish_child, exitpriority=100)


def _finish_child() -> None:
    error = sys.exc_info()[1]
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        _report(error)
    _finish()


def before_finish(method: Callable[[], None]) -> None:
    """Call a method before the process leaves the job, if its object still exists.

    Args:
        method: A bound method.
    """
    _before_finish[:] = [(pid, other) for pid, other in _before_finish if other() is not None]
    _before_finish.append((os.getpid(), weakref.WeakMethod(method)))


def _run_before_finish() -> None:
    hooks = list(_before_finish)
    _before_finish.clear()
    for pid, reference in hooks:
        method = reference()
        if method is None or pid != os.getpid():
            continue
        try:
            method()
        except Exception:  # the process leaves the job nevertheless
            warnings.warn(f"before leaving the job: {traceback.format_exc()}", stacklevel=1)


def _finish() -> None:
    try:
        _run_before_finish()
    finally:
        _core.finish()


def _report(error: BaseException) -> None:
    text = "".join(traceback.format_exception_only(error)).strip()
    ours = errors.from_report(str(error))
    if ours is not None:
        # The framework's error begins with the place in its graph. Other ranks need only the text of the core.
        text = f"{type(error).__name__}: {ours}"
    try:
        _core.report_failure(text)
    except Exception:  # the exception that ends this process must be shown, whatever the state of the session
        pass
