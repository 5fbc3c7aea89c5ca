"""Functions that run on all processes of a new job: their transfer, and that of their results."""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from horovod.common.util import env

#: A peer that has not proved the secret within this many seconds is disconnected.
_GREETING_TIME = 10


class _Desk:
    """Serves the function of a job to its processes and collects the results. Both sides prove a secret first."""

    def __init__(self, task: bytes) -> None:
        from horovod.runner.common.util import secret

        self.key = secret.make_secret_key()
        self.results: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}
        self._task = task
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._peers: dict[threading.Thread, socket.socket] = {}
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._server = threading.Thread(target=self._serve, name="horovod-run", daemon=True)
        self._server.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                # The socket is closed, the peer has left, or the process is out of file descriptors for the moment.
                self._closed.wait(0.1)
                continue
            thread = threading.Thread(target=self._talk, args=(peer,), daemon=True)
            with self._lock:
                self._peers[thread] = peer
            thread.start()

    def _talk(self, peer: socket.socket) -> None:
        try:
            with peer, Connection(os.dup(peer.fileno())) as connection:
                if self._is_ours(peer, connection):
                    self._take_result(connection)
        finally:
            with self._lock:
                del self._peers[threading.current_thread()]

    def _is_ours(self, peer: socket.socket, connection: Connection) -> bool:
        try:
            _limit_waits(peer, _GREETING_TIME)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            _limit_waits(peer, 0)
        except Exception:
            # The client did not prove the secret. Nothing that it sent was unpickled.
            return False
        return True

    def _take_result(self, connection: Connection) -> None:
        import pickle

        try:
            connection.send_bytes(self._task)
            rank, succeeded, outcome = pickle.loads(connection.recv_bytes())
            (self.results if succeeded else self.failures)[rank] = outcome
            # The process may end now.
            connection.send_bytes(b"")
        except (EOFError, OSError):
            # The process ended without a result; its exit code tells.
            return

    def close(self) -> None:
        """Nobody comes any more, and who is still here is sent away."""
        self._closed.set()
        _end(self._listener)
        self._server.join()
        self._listener.close()
        with self._lock:
            peers = dict(self._peers)
            for peer in peers.values():
                _end(peer)
        for thread in peers:
            thread.join()


def _limit_waits(peer: socket.socket, seconds: int) -> None:
    """Limit the time of one read; 0 means no limit.

    Unlike `settimeout` this also holds for a `Connection` of the socket.
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))


def _end(one: socket.socket) -> None:
    """Wake threads that wait at a socket."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def run_function(options: argparse.Namespace, start: Callable[[argparse.Namespace], None]) -> list[Any]:
    """Run ``options.run_func`` on all processes of a job.

    Args:
        options: Options of ``horovodrun``; the command becomes the one that runs the function.
        start: Starts the job with these options, and returns when all processes have ended.

    Returns:
        The function's results by rank; of an elastic job, those of the first ``options.min_num_proc`` ranks.

    Raises:
        RuntimeError: A process failed; its exception is the cause.
    """
    try:
        import cloudpickle as pickle
    except ImportError:
        import pickle

    options.executable = options.executable or sys.executable
    options.command = [options.executable, "-m", "horovod.runner.run_task"]
    desk = _Desk(pickle.dumps((options.run_func, (), {})))
    try:
        with env(HOROVOD_RUN_DESK=f"{desk.port}:{desk.key.hex()}"):
            start(options)
    except RuntimeError as error:
        if desk.failures:
            rank = min(desk.failures)
            raise RuntimeError(f"{error} Rank {rank}: {desk.failures[rank]!r}") from desk.failures[rank]
        raise
    finally:
        desk.close()
    wanted = range(options.num_proc if options.min_num_proc is None else options.min_num_proc)
    missing = [rank for rank in wanted if rank not in desk.results]
    if missing:
        raise RuntimeError(f"no results came from rank(s) {missing}")
    return [desk.results[rank] for rank in wanted]
