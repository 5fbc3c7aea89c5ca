"""A thread that submits gradients by name after the ranks have voted against a planned reduction.

An optimizer checks the result of the vote at its next gradient and at its step. After the last gradient, the script may
wait for other ranks that reach that point only after their step, which needs the gradients of this rank. The thread
prevents this deadlock. It starts when an optimizer has a plan, and wakes only for declined rounds.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

from smdistributed import _core

#: Seconds between checks whether the process ends.
_POLL_SECONDS = 0.2


class _DeclinedRounds:
    """The thread, and the methods that it calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()

    def watch(self, submit: Callable[[], None]) -> None:
        """Call a method of an object after each declined round of this process, as long as the object exists.

        Args:
            submit: The method, bound to the object.
        """
        method = weakref.WeakMethod(submit)
        with self._lock:
            self._methods = [*(known for known in self._methods if known() is not None), method]
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="horovod-rounds", daemon=True)
            self._thread.start()
        # The interpreter must not end while the thread is in the core.
        atexit.register(self._end)

    def _run(self) -> None:
        seen = 0
        while not self._is_ending.is_set():
            count = _core.declined_rounds(seen, _POLL_SECONDS)
            if count == seen:
                continue
            seen = count
            with self._lock:
                methods = [method() for method in self._methods]
            for submit in methods:
                if submit is not None:
                    submit()

    def _end(self) -> None:
        self._is_ending.set()
        if self._thread is not None:
            self._thread.join()


_declined_rounds = _DeclinedRounds()

watch = _declined_rounds.watch
