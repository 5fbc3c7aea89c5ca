"""Functions that run on all processes of a new job: their transfer, and that of their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from horovod.common.util import env


class FunctionServer:
    """Serves the function of a job to its processes and collects the results.

    Attributes:
        results: The function's results by rank.
        failures: Exceptions of the function by rank, the first one first.

    Args:
        task: A pickled function with its arguments and keyword arguments.
    """

    def __init__(self, task: bytes) -> None:
        from horovod.runner.util.peers import PeerServer

        self.results: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}
        self._task = task
        self._server = PeerServer(self._serve_process, "horovod-run")
        self.port, self.key = self._server.port, self._server.key

    def _serve_process(self, connection: Connection) -> None:
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

    def variable(self, host: str | None = None) -> dict[str, str]:
        """Return the variable by which a process finds this object. It contains the secret.

        Args:
            host: Address of this host for the process; by default that of the rendezvous.

        Returns:
            The value by name.
        """
        return {"HOROVOD_RUN_FUNCTION_SERVER": ":".join([*([host] if host else []), str(self.port), self.key.hex()])}

    def close(self) -> None:
        """Stop the server and close all connections."""
        self._server.close()


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
    server = FunctionServer(pickle.dumps((options.run_func, (), {})))
    try:
        with env(**server.variable()):
            start(options)
    except RuntimeError as error:
        if server.failures:
            rank = min(server.failures)
            raise RuntimeError(f"{error} Rank {rank}: {server.failures[rank]!r}") from server.failures[rank]
        raise
    finally:
        server.close()
    wanted = range(options.num_proc if options.min_num_proc is None else options.min_num_proc)
    missing = [rank for rank in wanted if rank not in server.results]
    if missing:
        raise RuntimeError(f"no results came from rank(s) {missing}")
    return [server.results[rank] for rank in wanted]
