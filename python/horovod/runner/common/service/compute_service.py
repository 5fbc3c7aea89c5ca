"""The service through which the data service of TensorFlow and the training job find each other."""

from __future__ import annotations

import threading
from typing import Any

from horovod.runner.common.util import network
from horovod.runner.common.util.network import Registrations

#: A request waits at most this long, in seconds. Clients repeat it, and so notice if the service has ended.
_POLL_SECONDS = 20.0


class _RegisterDispatcher:
    def __init__(self, dispatcher_id: int, address: str) -> None:
        self.dispatcher_id = dispatcher_id
        self.address = address


class _RegisterWorker:
    def __init__(self, dispatcher_id: int, worker_id: int) -> None:
        self.dispatcher_id = dispatcher_id
        self.worker_id = worker_id


class _Dispatcher:
    """A request for a dispatcher's address."""

    def __init__(self, dispatcher_id: int, seconds: float) -> None:
        self.dispatcher_id = dispatcher_id
        self.seconds = seconds


class _Workers:
    """A request whether all workers of a dispatcher are registered."""

    def __init__(self, dispatcher_id: int, seconds: float) -> None:
        self.dispatcher_id = dispatcher_id
        self.seconds = seconds


class _Shutdown:
    """Reports that the training is done."""


class _IsShutdown:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class _Answer:
    def __init__(self, value: Any) -> None:
        self.value = value


class ComputeService(network.BasicService):
    """Stores the addresses of dispatchers, and which workers have joined them.

    Args:
        dispatchers: Number of dispatchers.
        workers_per_dispatcher: Number of workers of each.
        key: The job's secret.
        nics: Interfaces at which the service is reached; all by default.

    Raises:
        ValueError: A number is not positive.
    """

    NAME = "Compute service"

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Any = None) -> None:
        if dispatchers <= 0:
            raise ValueError(f"The number of dispatchers must be larger than 0: {dispatchers}")
        if workers_per_dispatcher <= 0:
            raise ValueError(f"The number of workers per dispatcher must be larger than 0: {workers_per_dispatcher}")
        self._numbers = range(dispatchers)
        self._workers_per_dispatcher = workers_per_dispatcher
        self._dispatchers = Registrations()
        self._workers = [Registrations() for _ in self._numbers]
        self._changed = threading.Condition()
        self._done = False
        super().__init__(self.NAME, key, nics)

    def _check(self, dispatcher_id: int) -> None:
        if dispatcher_id not in self._numbers:
            raise IndexError(f"there is no dispatcher {dispatcher_id}: there are {len(self._numbers)}")

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        if isinstance(req, _RegisterDispatcher):
            self._check(req.dispatcher_id)
            known = dict(self._dispatchers.items()).get(req.dispatcher_id, req.address)
            if known != req.address:
                raise ValueError(f"Dispatcher with id {req.dispatcher_id} has already been registered under {known}")
            self._dispatchers.put(req.dispatcher_id, req.address)
            return network.AckResponse()
        if isinstance(req, _RegisterWorker):
            self._check(req.dispatcher_id)
            self._workers[req.dispatcher_id].put(req.worker_id, True)
            return network.AckResponse()
        if isinstance(req, _Dispatcher):
            self._check(req.dispatcher_id)
            return _Answer(self._within(self._dispatchers, [req.dispatcher_id], req.seconds))
        if isinstance(req, _Workers):
            self._check(req.dispatcher_id)
            first = req.dispatcher_id * self._workers_per_dispatcher
            numbers = range(first, first + self._workers_per_dispatcher)
            return _Answer(self._within(self._workers[req.dispatcher_id], numbers, req.seconds))
        if isinstance(req, _Shutdown):
            with self._changed:
                self._done = True
                self._changed.notify_all()
            return network.AckResponse()
        if isinstance(req, _IsShutdown):
            with self._changed:
                self._changed.wait_for(lambda: self._done or self._connections.closing, req.seconds)
                return _Answer(self._done)
        return super()._handle(req, client_address)

    def _wake(self) -> None:
        for registrations in (self._dispatchers, *self._workers):
            registrations.close()
        with self._changed:
            self._changed.notify_all()

    @staticmethod
    def _within(registrations: Registrations, numbers: Any, seconds: float) -> Any:
        try:
            registrations.wait(numbers, seconds, "registrations")
        except TimeoutError:
            return None
        return [registrations[number] for number in numbers]


class ComputeClient(network.BasicClient):
    """A client of a :class:`ComputeService`.

    Args:
        compute_addresses: Addresses of the service, by interface.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
    """

    def __init__(
        self, compute_addresses: network.Addresses, key: bytes, verbose: int = 1, match_intf: bool = False
    ) -> None:
        super().__init__(ComputeService.NAME, compute_addresses, key, verbose, match_intf=match_intf)

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register the address of a dispatcher.

        Args:
            dispatcher_id: Number of the dispatcher.
            dispatcher_address: Its address.

        Raises:
            RuntimeError: There is no such dispatcher, or it has another address.
        """
        self._send(_RegisterDispatcher(dispatcher_id, dispatcher_address))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker that has joined a dispatcher.

        Args:
            dispatcher_id: Number of the dispatcher.
            worker_id: Number of the worker.

        Raises:
            RuntimeError: There is no such dispatcher.
        """
        self._send(_RegisterWorker(dispatcher_id, worker_id))

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait for a dispatcher.

        Args:
            dispatcher_id: Number of the dispatcher.
            timeout: Longest wait, in seconds.

        Returns:
            The address of the dispatcher.

        Raises:
            TimeoutError: The wait took longer.
            RuntimeError: There is no such dispatcher.
        """
        found = self._wait(lambda seconds: _Dispatcher(dispatcher_id, seconds), timeout, f"dispatcher {dispatcher_id}")
        return str(found[0])

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers have joined a dispatcher.

        Args:
            dispatcher_id: Number of the dispatcher.
            timeout: Longest wait, in seconds.

        Raises:
            TimeoutError: The wait took longer.
            RuntimeError: There is no such dispatcher.
        """
        self._wait(
            lambda seconds: _Workers(dispatcher_id, seconds), timeout, f"the workers of dispatcher {dispatcher_id}"
        )

    def _wait(self, request: Any, timeout: float, what: str) -> Any:
        left = timeout
        while True:
            seconds = min(left, _POLL_SECONDS)
            answer = self._send(request(seconds), timeout=seconds + 60).value
            if answer is not None:
                return answer
            left -= seconds
            if left <= 0:
                raise TimeoutError(f"timed out after {timeout:.0f} s waiting for {what} to register")

    def shutdown(self) -> None:
        """Notify dispatchers and workers that the training is done."""
        self._send(_Shutdown())

    def wait_for_shutdown(self) -> None:
        """Wait until the training is done or the service is gone."""
        try:
            while not self._send(_IsShutdown(_POLL_SECONDS), timeout=_POLL_SECONDS + 60).value:
                continue
        except (OSError, EOFError):
            # The thread ends with the job that it belongs to.
            return
