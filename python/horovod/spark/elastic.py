"""Elastic jobs on a Spark cluster, whose executors are the hosts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from pyspark import cloudpickle

from horovod.runner.common.util import secret
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.function import FunctionServer
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.places import ElasticPlaces, first_cause
from horovod.runner.util.threads import in_thread
from horovod.spark.agents import Agent, AgentLostError, Agents
from horovod.spark.runner import COMMAND, active_context, chosen_timeout

#: Seconds between checks of the Spark job.
_POLL_SECONDS = 0.5


class ExecutorDiscovery(HostDiscovery):
    """The executors that run a job's tasks, with a slot for each task.

    The name of an executor is the address of its host. Further executors at an address have names of their own: they
    have failed nowhere yet, so they are not blacklisted.

    Args:
        agents: The tasks.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._names: dict[tuple[str, int], str] = {}
        self._busy: set[Agent] = set()
        self._lock = threading.Lock()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the executors.

        Returns:
            Slots by name.
        """
        found: dict[str, int] = {}
        for agent in self._agents.alive():
            name = self._name(agent)
            found[name] = found.get(name, 0) + 1
        return found

    def acquire(self, host: str) -> Agent:
        """Reserve a task that runs no process.

        Args:
            host: Name of the executor.

        Returns:
            The task.

        Raises:
            RuntimeError: The executor has no such task any more.
        """
        for agent in self._agents.alive():
            if self._name(agent) == host:
                with self._lock:
                    if agent not in self._busy:
                        self._busy.add(agent)
                        return agent
        raise RuntimeError(f"executor {host} has no free task any more")

    def release(self, agent: Agent) -> None:
        """Mark a task as free after its process has ended.

        Args:
            agent: The task.
        """
        with self._lock:
            self._busy.discard(agent)

    def _name(self, agent: Agent) -> str:
        key = agent.host, agent.greeting.executor
        with self._lock:
            if key not in self._names:
                is_taken = agent.host in self._names.values()
                self._names[key] = f"{agent.host}-{agent.greeting.executor}" if is_taken else agent.host
            return self._names[key]


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    env: dict[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function as an elastic job, which continues when executors are lost or come back.

    Args:
        fn: The function. It uses ``hvd.elastic.run``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes of the first session; ``spark.default.parallelism`` by default.
        min_num_proc: Least number of processes; ``num_proc`` by default.
        max_num_proc: Largest number of processes; ``num_proc`` by default. The Spark job has that many tasks.
        start_timeout: Longest wait for Spark's first tasks, and of ``hvd.init()`` for the other ranks, in seconds; by
            default ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
        elastic_timeout: Longest wait of a later session for slots, and of any for workers to call ``hvd.init()``, in
            seconds; by default ``HOROVOD_ELASTIC_TIMEOUT``, or 600.
        reset_limit: Largest number of sessions after the first.
        cooldown_range: Least and largest time that an executor is not used after a process failed there, in seconds;
            by default it is never used again.
        env: Variables of the processes, beside those of Spark's tasks.
        stdout: Receives what processes print; ``sys.stdout`` by default.
        stderr: Receives their errors; ``sys.stderr`` by default.
        verbose: 0 prints no progress.
        nics: Interfaces that processes use; by default the core chooses.
        prefix_output_with_timestamp: Whether lines of output begin with the time.
        min_np: Deprecated: use ``min_num_proc``.
        max_np: Deprecated: use ``max_num_proc``.

    Returns:
        The results of the processes of the last session by rank.

    Raises:
        RuntimeError: The job could not continue, or there is no Spark context.
        horovod.runner.common.util.timeout.TimeoutException: There were not enough tasks in time.
        ValueError: The numbers of processes exclude each other.
    """
    from horovod.runner import renamed

    context = active_context()
    first = context.defaultParallelism if num_proc is None else num_proc
    fewest = renamed("min_np", min_np, "min_num_proc", min_num_proc) or first
    most = renamed("max_np", max_np, "max_num_proc", max_num_proc) or first
    if not 1 <= fewest <= first <= most:
        raise ValueError(
            f"min_num_proc is {fewest}, num_proc {first} and max_num_proc {most}: expected 1 or more, in this order"
        )
    timeout = elastic_timeout or os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or 600
    server = FunctionServer(cloudpickle.dumps((fn, tuple(args), kwargs or {})))
    try:
        with Agents(context, most, stdout, stderr, is_elastic=True) as agents:
            start = chosen_timeout(start_timeout)
            agents.wait(start, first)
            settings = ElasticSettings(
                discovery=ExecutorDiscovery(agents),
                min_num_proc=fewest,
                max_num_proc=most,
                elastic_timeout=int(timeout),
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                num_proc=first,
                verbose=verbose,
                key=secret.make_secret_key(),
                nics=nics,
                prefix_output_with_timestamp=prefix_output_with_timestamp,
            )
            variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(start)), **(env or {})}
            _ElasticJob(settings, agents, server, variables).run()
    finally:
        server.close()
    return [server.results[rank] for rank in sorted(server.results)]


class _ElasticJob:
    """One run of a function by processes that join and leave."""

    def __init__(self, settings: ElasticSettings, agents: Agents, server: FunctionServer, env: dict[str, str]) -> None:
        self._settings = settings
        self._agents = agents
        self._server = server
        self._places = ElasticPlaces(settings, agents.address)
        self._env = self._places.variables | server.variable(agents.address) | env

    def run(self) -> None:
        """Run the function to the end of the job."""
        driver = self._places.driver
        in_thread(self._watch, name="horovod-spark-watch")
        try:
            driver.start(self._settings.num_proc or 1, self._run_worker)
            results = driver.get_results()
        finally:
            self._places.stop()
        if results.error_message is None:
            return
        text = f"the elastic job has ended with a failure: {results.error_message}"
        if not self._server.failures:
            raise RuntimeError(text)
        rank = first_cause(self._server.failures)
        failure = self._server.failures[rank]
        raise RuntimeError(f"{text}. The failure of rank {rank}: {failure!r}") from failure

    def _watch(self) -> None:
        """End the job with the Spark job."""
        while not self._places.driver.finished():
            if self._agents.has_failed():
                try:
                    self._agents.check()
                except RuntimeError as error:
                    self._places.driver.stop(str(error))
                return
            time.sleep(_POLL_SECONDS)

    def _run_worker(self, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        """Run a worker to its end. Return its exit code and the time of its end."""
        discovery = self._settings.discovery
        agent = discovery.acquire(slot.hostname)
        try:
            variables = {**self._env, **create_slot_env_vars(slot)}
            has_timestamp = self._settings.prefix_output_with_timestamp
            code = agent.run(COMMAND, variables, slot.rank, events, has_timestamp=has_timestamp)
        except AgentLostError as error:
            print(f"horovod: worker {slot.hostname}[{slot.local_rank}] has died: {error}", file=sys.stderr, flush=True)
            code = 1
        finally:
            discovery.release(agent)
        return code, time.time()
