"""A loader of batches, and a mixin that prefetches on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any


class BaseDataLoader:
    """A loader of batches. Subclasses define ``__len__`` and ``_iterate``."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of an epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Process a batch before the script gets it."""
        return batch


class _Failure:
    """Carries an exception from the loader's thread to the script's."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


# Mixed into a `BaseDataLoader`, which has the other attributes; `Any` tells the type checker so.
_Base: Any = object


class AsyncDataLoaderMixin(_Base):
    """Prefetch batches; the mixin precedes a :class:`BaseDataLoader` in the list of bases.

    One thread loads epoch after epoch into a queue.

    Args:
        async_loader_queue_size: Maximum number of queued batches; 0 loads on the script's thread.
        debug_data_loader: Accepted for compatibility, without effect.
        *args: Passed to the other bases.
        **kwargs: Passed to the other bases.

    Examples:
        >>> class Loader(AsyncDataLoaderMixin, MyDataLoader): ...
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue(max(self.async_loader_queue_size, 1))
        self.finished_event = threading.Event()
        self.thread: threading.Thread | None = None

    def _put(self, item: Any) -> bool:
        """Put a batch into the queue; return `False` if the loader is being closed."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                if not all(self._put(batch) for batch in self._iterate()):
                    return
                # The end of an epoch.
                self._put(None)
        except Exception as error:
            # Raised in the script's thread.
            self._put(_Failure(error))

    def close_async_loader(self) -> None:
        """End the thread and drop the batches that it has loaded. The next iteration starts another thread."""
        self.finished_event.set()
        if self.thread is not None:
            self.thread.join()
        self._begin()

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of an epoch.

        Raises:
            Exception: The exception of the loader's thread.
        """
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self._async_worker, daemon=True, name="async-data-loader")
            self.thread.start()
        while True:
            batch = self.queue.get()
            if batch is None:
                return
            if isinstance(batch, _Failure):
                self.close_async_loader()
                raise batch.error
            yield self._process_batch(batch)
