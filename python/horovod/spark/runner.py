"""Jobs on a Spark cluster: a fixed number of processes here, elastic ones by :mod:`horovod.spark.elastic`."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from pyspark import SparkContext, cloudpickle

from horovod.runner.common.util import secret
from horovod.runner.function import FunctionServer
from horovod.runner.places import Places, first_cause, rank_order
from horovod.runner.util.threads import in_thread
from horovod.spark.agents import Agent, AgentLostError, Agents

#: Seconds to wait for failures of other ranks after the first one: their errors name the rank that has died.
_GRACE_S = 10.0
#: Seconds between checks of the Spark job.
_POLL_SECONDS = 0.2
#: Command of each process.
COMMAND = ["-m", "horovod.runner.run_task"]


@dataclass
class SparkSettings:
    """Settings of a job.

    Attributes:
        verbose: 2 prints more lines.
        nics: Interfaces that processes use; by default the core chooses.
        start_timeout: Longest wait for Spark's tasks, and of ``hvd.init()`` for the other ranks, in seconds.
        key: The job's secret.
    """

    verbose: int = 1
    nics: Any = None
    start_timeout: float = 600.0
    key: bytes = field(default_factory=secret.make_secret_key, repr=False)


def active_context() -> SparkContext:
    """Return the application's Spark context.

    Returns:
        The context.

    Raises:
        RuntimeError: There is none.
    """
    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError(
            "there is no active SparkContext: create one first, such as by `SparkSession.builder.getOrCreate()`. "
            "A Spark Connect session has none"
        )
    return context


def chosen_timeout(start_timeout: float | None) -> float:
    """Return the longest wait for Spark's tasks.

    Args:
        start_timeout: The caller's choice, in seconds.

    Returns:
        Seconds: the caller's choice, that of ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
    """
    return float(start_timeout or os.environ.get("HOROVOD_SPARK_START_TIMEOUT") or 600)


class _Ranks:
    """The processes of a job, by rank."""

    def __init__(self, agents: Agents, members: Sequence[Agent], server: FunctionServer) -> None:
        self._agents = agents
        self._members = members
        self._server = server
        self._over = threading.Event()
        self._lock = threading.Lock()
        #: Ranks that did not succeed, with the way they ended, the first one first.
        self._ends: dict[int, int | AgentLostError] = {}

    def run(self, variables: Sequence[dict[str, str]], executable: str | None, has_timestamp: bool) -> None:
        """Run all processes to their end; after a failure the others have some seconds to say why they fail."""

        def follow(rank: int) -> None:
            member = self._members[rank]
            end: int | AgentLostError
            try:
                end = member.run(COMMAND, variables[rank], rank, [self._over], executable, has_timestamp)
            except AgentLostError as error:
                end = error
            if end != 0 and not self._over.is_set():
                with self._lock:
                    self._ends[rank] = end

        threads = [in_thread(follow, (rank,), name=f"horovod-rank-{rank}") for rank in range(len(self._members))]
        deadline = None
        try:
            while any(thread.is_alive() for thread in threads):
                if deadline is None and (self._ends or self._agents.has_failed()):
                    deadline = time.monotonic() + _GRACE_S
                if deadline is not None and time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            self._over.set()
        for thread in threads:
            thread.join()

    def check(self) -> None:
        """Raise the failure that explains the others."""
        self._agents.check()
        for rank, end in self._ends.items():
            where = f"rank {rank} on host {self._members[rank].host}"
            if isinstance(end, AgentLostError):
                raise RuntimeError(f"{where} has died: {end}") from end
            if end > 128 and rank not in self._server.failures:
                raise RuntimeError(f"{where} has died: signal {end - 128} ended its process")
        if self._server.failures:
            rank = first_cause(self._server.failures)
            failure = self._server.failures[rank]
            raise RuntimeError(f"rank {rank} on host {self._members[rank].host} failed: {failure!r}") from failure
        for rank, end in self._ends.items():
            raise RuntimeError(f"rank {rank} on host {self._members[rank].host} ended with status {end}")


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: dict[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Run a function as a job of Horovod, each rank in a process that a Spark task starts.

    Args:
        fn: The function. It calls ``hvd.init()``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes; ``spark.default.parallelism`` by default.
        start_timeout: Longest wait for Spark's tasks, in seconds; by default ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
        use_mpi: Accepted for compatibility, without effect: Spark's tasks start the processes.
        use_gloo: Accepted for compatibility, without effect.
        extra_mpi_args: Accepted for compatibility, without effect.
        env: Variables of the processes, beside those of Spark's tasks.
        stdout: Receives what processes print; ``sys.stdout`` by default.
        stderr: Receives their errors; ``sys.stderr`` by default.
        verbose: 2 prints requests to the store.
        nics: Interfaces that processes use; by default the core chooses.
        prefix_output_with_timestamp: Whether lines of output begin with the time.
        executable: The Python interpreter of the processes; that of Spark's tasks by default.

    Returns:
        The function's results by rank.

    Raises:
        RuntimeError: A rank has failed or died, the Spark job was cancelled, or there is no Spark context. The message
            names the rank.
        horovod.runner.common.util.timeout.TimeoutException: Not all of Spark's tasks have started in time.
        ValueError: Arguments exclude each other.

    Examples:
        >>> def train(epochs):
        ...     hvd.init()
        ...     return hvd.rank()
        >>> horovod.spark.run(train, kwargs={"epochs": 5}, num_proc=2)
        [0, 1]
    """
    if use_mpi and use_gloo:
        raise ValueError("`use_mpi` and `use_gloo` exclude each other")
    if use_mpi or extra_mpi_args:
        warnings.warn("use_mpi and extra_mpi_args have no effect: Spark's tasks start the processes", stacklevel=2)
    context = active_context()
    count = context.defaultParallelism if num_proc is None else num_proc
    if count < 1:
        raise ValueError(f"`num_proc` is {count}: a job has at least 1 process")
    settings = SparkSettings(verbose, nics, chosen_timeout(start_timeout))
    server = FunctionServer(cloudpickle.dumps((fn, tuple(args), kwargs or {})))
    places = Places(settings)
    try:
        with Agents(context, count, stdout, stderr) as agents:
            tasks = agents.wait(settings.start_timeout)
            members = [tasks[index] for index in rank_order([task.host for task in tasks])]
            for rank, member in enumerate(members):
                places.add(member.host, rank)
            own = places.variables_by_rank()
            common = places.start_store(agents.address) | server.variable(agents.address)
            common |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(settings.start_timeout)), **(env or {})}
            ranks = _Ranks(agents, members, server)
            ranks.run([{**common, **own[rank]} for rank in range(count)], executable, prefix_output_with_timestamp)
            ranks.check()
    finally:
        places.shutdown()
        server.close()
    missing = [rank for rank in range(count) if rank not in server.results]
    if missing:
        raise RuntimeError(f"no results came from rank(s) {missing}")
    return [server.results[rank] for rank in range(count)]
