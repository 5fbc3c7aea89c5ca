"""Functions in threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread.

    Args:
        target: The function.
        args: Its arguments.
        name: Name of the thread.
        daemon: Whether the process ends without waiting for the thread.
        silent: Whether exceptions are not shown.

    Returns:
        The thread.

    Raises:
        ValueError: `args` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")

    def run() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Run a function in a thread once an event is set.

    Args:
        event: The event.
        func: The function.
        args: Its arguments.
        stop: Ends the wait for the event.
        check_stop_interval_s: Time between two checks of ``stop``, in seconds.
        daemon: Whether the process ends without waiting for the thread.
        silent: Whether exceptions are not shown.

    Returns:
        The thread.

    Raises:
        ValueError: ``event`` is missing, ``args`` is not a tuple, or nothing could end a thread that the process waits
            for.
    """
    if event is None:
        raise ValueError("Event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait() -> None:
        if stop is None:
            event.wait()
        else:
            while not event.wait(check_stop_interval_s):
                if stop.is_set():
                    return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Iterable[Iterable[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any]:
    """Run a function with each list of arguments, in threads.

    Args:
        fn: The function.
        args_list: The lists.
        block_until_all_done: Whether to wait for all; otherwise nothing is returned.
        max_concurrent_executions: Largest number of threads.

    Returns:
        Results by position.

    Raises:
        Exception: The first exception of the function.
    """
    work: queue.Queue[tuple[int, Iterable[Any]]] = queue.Queue()
    for position, args in enumerate(args_list):
        work.put((position, args))
    total = work.qsize()
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run() -> None:
        while True:
            try:
                position, args = work.get(block=False)
            except queue.Empty:
                return
            try:
                results[position] = fn(*args)
            except BaseException as error:
                failures.append(error)

    threads = [in_thread(run, daemon=not block_until_all_done) for _ in range(min(max_concurrent_executions, total))]
    if not block_until_all_done:
        return {}
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
