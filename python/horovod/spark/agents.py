"""The tasks of a Spark job as its driver sees them."""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TextIO

from pyspark import InheritableThread, SparkContext

from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.util.peers import PeerServer
from horovod.runner.util.threads import in_thread
from horovod.spark import agent
from horovod.spark.agent import Greeting

#: Seconds between checks of the events that end a process.
_POLL_SECONDS = 0.1
#: Seconds in which Spark ends a job's tasks.
_EXIT_TIMEOUT_S = 30.0


class AgentLostError(RuntimeError):
    """A Spark task that runs a process has ended."""


class Agent:
    """One task.

    Args:
        greeting: The task's description of itself.
        connection: The connection to it.
        streams: Where its processes' output goes, by name.
    """

    def __init__(self, greeting: Greeting, connection: Connection, streams: dict[str, TextIO | None]) -> None:
        self.greeting = greeting
        self.host = greeting.address
        #: Set when the task has ended.
        self.lost = threading.Event()
        self._connection = connection
        self._streams = streams
        self._codes: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def __str__(self) -> str:
        return f"task {self.greeting.partition} on host {self.host} ({self.greeting.hostname})"

    def run(
        self,
        command: list[str],
        env: dict[str, str],
        index: int,
        events: Iterable[threading.Event],
        executable: str | None = None,
        has_timestamp: bool = False,
    ) -> int:
        """Run a Python command on the task's host to its end.

        Args:
            command: Arguments of the interpreter.
            env: Variables, beside those of the task.
            index: Number before each line of output.
            events: The first one that is set ends the process.
            executable: The Python interpreter; that of the task by default.
            has_timestamp: Whether lines of output begin with the time.

        Returns:
            The exit code; 128 plus the signal if one ended it.

        Raises:
            AgentLostError: The task has ended.
        """
        self._send(("start", executable, command, env, index, has_timestamp))
        is_told = False
        while True:
            with suppress(queue.Empty):
                code = self._codes.get(timeout=_POLL_SECONDS)
                if code is None:
                    raise AgentLostError(f"Spark {self} has ended: its executor or its Python process was killed")
                return code
            if not is_told and any(event.is_set() for event in events):
                is_told = True
                self._send(("stop",))

    def end(self) -> None:
        """End the task and its process."""
        self._send(("end",))

    def forget(self) -> None:
        """Count the task as ended: Spark has started another one in its place."""
        self.lost.set()
        self._codes.put(None)

    def listen(self) -> None:
        """Receive the task's messages until it ends.

        Another thread writes the output. While a stream blocks, such as that of a stopped terminal, messages are still
        received: a task whose messages are not received counts the driver's host as lost.
        """
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        writer = in_thread(self._handle, (messages,), name="horovod-spark-output")
        try:
            while True:
                messages.put(self._connection.recv())
        except (EOFError, OSError):
            # The task has ended.
            return
        finally:
            messages.put(None)
            writer.join()

    def _handle(self, messages: queue.SimpleQueue[Any]) -> None:
        """Handle messages in their order, until there is a ``None``."""
        try:
            while (message := messages.get()) is not None:
                if message[0] == "ended":
                    self._codes.put(message[1])
                    continue
                stream = self._streams[message[1]] or getattr(sys, message[1])
                stream.write(message[2])
                stream.flush()
        finally:
            self.forget()

    def _send(self, message: Any) -> None:
        # `listen` notices that the task has ended.
        with suppress(OSError):
            self._connection.send(message)


class Agents:
    """A Spark job whose tasks start processes, from ``with`` to the end of its block.

    Args:
        context: The Spark context.
        count: Number of tasks.
        stdout: Receives the output of processes; by default ``sys.stdout``.
        stderr: Receives their errors; by default ``sys.stderr``.
        is_elastic: Whether tasks that Spark starts again are used.
    """

    def __init__(
        self,
        context: SparkContext,
        count: int,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        is_elastic: bool = False,
    ) -> None:
        self._context = context
        self._count = count
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._is_elastic = is_elastic
        self._group = f"horovod-{uuid.uuid4().hex}"
        self._changed = threading.Condition()
        self._agents: dict[int, Agent] = {}
        self._failure: BaseException | None = None
        self._is_over = False
        #: Address of the driver for executors.
        self.address = str(context.getConf().get("spark.driver.host"))

    def __enter__(self) -> Agents:
        self._server = PeerServer(self._meet, "horovod-spark")
        task = functools.partial(agent.serve, self.address, self._server.port, self._server.key)
        self._job = InheritableThread(target=self._run, args=(task,), name="horovod-spark-job", daemon=True)
        self._job.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        with self._changed:
            self._is_over = True
            agents = list(self._agents.values())
        for each in agents:
            each.end()
        # Tasks that have not started yet would start later.
        if kind is not None or len(agents) < self._count:
            self._context.cancelJobGroup(self._group)
        self._job.join(_EXIT_TIMEOUT_S)
        if self._job.is_alive():
            self._context.cancelJobGroup(self._group)
            self._job.join(_EXIT_TIMEOUT_S)
        self._server.close()

    def alive(self) -> list[Agent]:
        """Return the tasks that have not ended.

        Returns:
            The tasks, in the order of their partitions.
        """
        with self._changed:
            return [self._agents[number] for number in sorted(self._agents) if not self._agents[number].lost.is_set()]

    def wait(self, seconds: float, count: int | None = None) -> list[Agent]:
        """Wait until tasks are there.

        Args:
            seconds: Longest wait.
            count: Number of tasks; all by default.

        Returns:
            The tasks, in the order of their partitions.

        Raises:
            TimeoutException: Not all tasks have started in time.
            RuntimeError: The Spark job has ended.
        """
        deadline = time.monotonic() + seconds
        wanted = self._count if count is None else count
        while True:
            self.check()
            agents = self.alive()
            if len(agents) >= wanted:
                return agents
            if time.monotonic() > deadline:
                raise TimeoutException(
                    f"timed out after {seconds:.0f} s waiting for Spark tasks to start: {len(agents)} of {wanted} "
                    "have. Does the cluster have that many free cores? `num_proc` sets the number of processes, and "
                    "`start_timeout` or HOROVOD_SPARK_START_TIMEOUT the longest wait"
                )
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def check(self) -> None:
        """Check that the Spark job runs.

        Raises:
            RuntimeError: The Spark job has failed, or was cancelled.
        """
        if self._failure is not None:
            reason = str(getattr(self._failure, "java_exception", self._failure)).splitlines()
            raise RuntimeError(f"the Spark job has ended: {reason[0] if reason else ''}") from self._failure

    def has_failed(self) -> bool:
        """Return whether the Spark job has failed or was cancelled.

        Returns:
            ``True`` if the job has failed or was cancelled.
        """
        return self._failure is not None

    def _run(self, task: Callable[[int, Iterable[Any]], Iterable[Any]]) -> None:
        from py4j.protocol import Py4JError

        try:
            self._context.setJobGroup(self._group, "processes of Horovod", interruptOnCancel=True)
            self._context.parallelize(range(self._count), self._count).mapPartitionsWithIndex(task).collect()
        except Py4JError as error:
            with self._changed:
                if not self._is_over:
                    self._failure = error
                self._changed.notify_all()

    def _meet(self, connection: Connection) -> None:
        try:
            greeting = connection.recv()
        except (EOFError, OSError):
            return
        one = Agent(greeting, connection, self._streams)
        with self._changed:
            # Another attempt, or a speculative copy: ranks of a job that is not elastic cannot be replaced.
            is_wanted = not self._is_over and (greeting.partition not in self._agents or self._is_replaceable(greeting))
            if is_wanted:
                if greeting.partition in self._agents:
                    self._agents[greeting.partition].forget()
                self._agents[greeting.partition] = one
                self._changed.notify_all()
        if is_wanted:
            one.listen()
            with self._changed:
                self._changed.notify_all()
        else:
            one.end()
            # The task closes the connection.
            one.listen()

    def _is_replaceable(self, greeting: Greeting) -> bool:
        return self._is_elastic and greeting.attempt > self._agents[greeting.partition].greeting.attempt
