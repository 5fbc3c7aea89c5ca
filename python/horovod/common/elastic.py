"""State that survives the failure and the arrival of workers."""

from __future__ import annotations

import atexit
import copy
import functools
import os
import queue
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from horovod.common import driven
from horovod.common.commit_files import CommitFiles
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, ScalarError, at_execution
from smdistributed import _core


class WorkerNotificationManager:
    """Notifies states when hosts join or leave an elastic job."""

    def __init__(self) -> None:
        self._listeners: list[State] = []
        self._thread: threading.Thread | None = None
        # Whether this worker has registered with the driver of a script.
        self._is_registered = False
        self._stopping = threading.Event()

    def init(self) -> None:
        """Begin to listen to the launcher, if it sends notices; do nothing the second time."""
        if driven.is_driven() and not self._is_registered:
            driven.listen(self)
            # If `listen` raises, the next call of this method tries again.
            self._is_registered = True
        if self._thread is not None or not os.environ.get("SMD_WORKER"):
            return
        self._thread = threading.Thread(target=self._listen, name="horovod-hosts", daemon=True)
        self._thread.start()
        # The interpreter must not end while the thread is in the core.
        atexit.register(self._stop)

    def _listen(self) -> None:
        while not self._stopping.is_set():
            update = _core.next_hosts_update(0.2)
            if update is not None:
                self.handle_hosts_updated(*update)

    def _stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def register_listener(self, listener: State) -> None:
        """Add a listener, whose ``on_hosts_updated`` is called from now on.

        Args:
            listener: The state.
        """
        self._listeners.append(listener)

    def remove_listener(self, listener: State) -> None:
        """Remove a listener.

        Args:
            listener: The state.
        """
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Pass a notice on to all listeners.

        Args:
            timestamp: Time of the change in seconds since 1970.
            update_res: Kind of the change: 1 removed, 2 added, 3 both.
        """
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()

#: Kinds of changes, as bits of a mask.
_REMOVED = 1


class State:
    """The values that a training script keeps over resets.

    Args:
        bcast_object: Gives every rank the object of rank 0.
        get_rank: Returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commit_files: CommitFiles | None = None

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Register functions that are called, in order, after a reset and before the state is synchronized.

        Args:
            callbacks: The functions.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Drop notices, reset the state, and call the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that hosts have joined or left.

        Args:
            timestamp: Time of the change in seconds since 1970.
            update_res: Kind of the change: 1 removed, 2 added, 3 both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and call :meth:`check_host_updates`."""
        self.save()
        if self._commit_files is not None:
            self._commit_files.write(self._committed_state)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise an error on all ranks if hosts have joined or left. All ranks call it.

        Raises:
            HostsUpdatedInterrupt: A rank has received a notice since the last call.
            HorovodInternalError: A rank has ended.
        """
        before, latest, kinds = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, kind = self._host_messages.get()
            latest, kinds = max(latest, timestamp), kinds | kind
        if _core.is_initialized():
            before, latest, kinds = _combine_host_updates(before, latest, kinds)
        self._last_updated_timestamp = latest
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(kinds == _REMOVED)

    def _committed_state(self) -> Any:
        """Return the saved state, to be restored with :meth:`_restore_saved` in another process."""
        return None

    def _restore_saved(self, saved: Any) -> None:
        """Return to a state that another process has saved."""

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks after a reset; does nothing by default."""


def _combine_host_updates(handled_before: float, latest: float, kinds: int) -> tuple[float, float, int]:
    """Combine the notices of all ranks, which receive them at different times."""
    try:
        handled, latest_known, kinds = _core.combine_host_updates(
            round(handled_before * 1e6), round(latest * 1e6), kinds
        )
    except RuntimeError as error:
        raise at_execution(error) from None
    return handled / 1e6, latest_known / 1e6, kinds


class ObjectState(State):
    """A state of plain objects, which become attributes.

    Args:
        bcast_object: See :class:`State`.
        get_rank: See :class:`State`.
        **kwargs: Names and first values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Keep copies of all objects."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the saved objects."""
        self._set_attrs()

    def _committed_state(self) -> Any:
        return self._saved_state

    def _restore_saved(self, saved: Any) -> None:
        self._saved_state = saved
        self._set_attrs()

    def sync(self) -> None:
        """Take over rank 0's saved objects."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run_fn(
    func: Callable[..., Any],
    reset: Callable[[], None],
    translated: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[..., Any]:
    """Make a training function continue after a failure or a change of hosts.

    Args:
        func: The training function; its first argument is the state.
        reset: Leaves the job and joins it again.
        translated: Turns the framework's own errors into :class:`HorovodInternalError`.

    Returns:
        The wrapped function.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        files = state._commit_files = CommitFiles()
        skip_sync = False
        is_first, is_reset_due = True, False
        # New workers synchronize, and so do ranks that have seen a failure: a rank cannot know whether all others
        # skip the synchronization.
        may_skip = not driven.is_elastic()
        try:
            while True:
                try:
                    with translated():
                        if is_reset_due:
                            reset()
                            state.on_reset()
                            is_reset_due = False
                        if is_first:
                            saved = files.read(state._bcast_object)
                            is_first = False
                            if saved is not None:
                                state._restore_saved(saved)
                        if not skip_sync:
                            state.sync()
                        result = func(state, *args, **kwargs)
                        files.remove()
                        return result
                except ScalarError:
                    raise
                except HorovodInternalError as error:
                    warnings.warn(f"the job goes on from the last commit: {error}", RuntimeWarning, stacklevel=2)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync and may_skip
                is_reset_due = True
        finally:
            notification_manager.remove_listener(state)

    return wrapper
