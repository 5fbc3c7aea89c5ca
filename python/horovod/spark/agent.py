"""A task of Spark, which starts processes as the driver asks it to.

Messages of the driver: ``("start", executable, command, env, index, has_timestamp)``, ``("stop",)``, ``("end",)``.
Messages of the task: first a :class:`Greeting`, then ``("output", name, text)`` and ``("ended", code)``. The processes
end with the task, and when the connection to the driver is lost.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.util.peers import connect
from horovod.runner.util.threads import in_thread

#: Variables with which Spark's own processes find and trust each other. The job's processes do not need them.
_SPARKS_OWN = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SOCK_PATH")


@dataclass
class Greeting:
    """The description that a task sends of itself.

    Attributes:
        partition: Its number in the Spark job.
        attempt: How often Spark has started this partition before.
        address: Address of its host.
        executor: Identifies its executor among those of the host.
        hostname: Name of its host, for messages.
    """

    partition: int
    attempt: int
    address: str
    executor: int
    hostname: str


class _Stream:
    """Sends text to the driver."""

    def __init__(self, send: Any, name: str) -> None:
        self._send = send
        self._name = name

    def write(self, text: str) -> None:
        self._send(("output", self._name, text))

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


def serve(address: str, port: int, key: bytes, partition: int, rows: Iterable[Any]) -> Iterable[Any]:
    """Serve the driver until it ends the job.

    Args:
        address: The driver's address.
        port: The driver's port.
        key: The secret of the connection.
        partition: Number of the partition.
        rows: Its rows, which are not read.

    Returns:
        No rows.
    """
    import socket

    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = 0 if context is None else context.attemptNumber()
    connection, own = connect(address, port, key)
    with connection:
        # The parent of all Python workers of an executor is its daemon.
        connection.send(Greeting(partition, attempt, own, os.getppid(), socket.gethostname()))
        _obey(connection)
    return iter(())


def _obey(connection: Connection) -> None:
    lock = threading.Lock()

    def send(message: Any) -> None:
        # The driver may be gone; the loop below sees that.
        with lock, suppress(OSError):
            connection.send(message)

    stop = threading.Event()
    running: list[threading.Thread] = []
    try:
        while True:
            message = connection.recv()
            if message[0] == "start":
                stop = threading.Event()
                running = [in_thread(_run, (send, stop, *message[1:]), name="horovod-process")]
            elif message[0] == "stop":
                stop.set()
            else:
                return
    except (EOFError, OSError):
        # The driver has ended, or its host does not answer.
        return
    finally:
        stop.set()
        for thread in running:
            thread.join()


def _run(
    send: Any,
    stop: threading.Event,
    executable: str | None,
    command: list[str],
    env: dict[str, str],
    index: int,
    has_timestamp: bool,
) -> None:
    own = {name: value for name, value in os.environ.items() if name not in _SPARKS_OWN}
    # Packages that the Spark application has distributed are in the worker's path only.
    own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    own["PYTHONUNBUFFERED"] = "1"
    words = [executable or sys.executable, *command]
    try:
        code = safe_shell_exec.execute(
            words,
            env={**own, **env},
            stdout=_Stream(send, "stdout"),  # type: ignore[arg-type]
            stderr=_Stream(send, "stderr"),  # type: ignore[arg-type]
            index=index,
            events=[stop],
            prefix_output_with_timestamp=has_timestamp,
        )
    except OSError as error:
        send(("output", "stderr", f"{words[0]} cannot be started: {error}\n"))
        code = 127
    send(("ended", code))
