"""Results of actors, and callbacks in the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.runner.places import first_cause
from horovod.runner.util.threads import in_thread

#: Seconds to wait for failures of other ranks after the first one: their errors name the rank that has died.
_GRACE = 10.0


def call_all(fn: Callable[[Any], Any], collection: Sequence[Any]) -> list[Any]:
    """Call a function that returns a reference for each item, and wait for all results.

    Args:
        fn: The function.
        collection: The items.

    Returns:
        The results in order.
    """
    return ray.get([fn(item) for item in collection])


def gather(references: Sequence[Any], hosts: Sequence[str]) -> list[Any]:
    """Wait for the results of all ranks.

    Args:
        references: References of the results by rank.
        hosts: Names of the ranks' hosts.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: The process of a rank has died.
        Exception: The exception of the rank that failed; a failed collective of another rank counts as its consequence.
    """
    ranks = {reference: rank for rank, reference in enumerate(references)}
    values: dict[int, Any] = {}
    failures: dict[int, RayError] = {}
    pending, deadline = list(references), None
    while pending:
        left = None if deadline is None else deadline - time.monotonic()
        done, pending = ray.wait(pending, timeout=left if left is None else max(left, 0.0))
        if not done:
            break
        for reference in done:
            try:
                values[ranks[reference]] = ray.get(reference)
            except RayError as error:
                failures[ranks[reference]] = error
                deadline = deadline or time.monotonic() + _GRACE
    for rank, failure in failures.items():
        if isinstance(failure, RayActorError):
            raise RuntimeError(f"rank {rank} on host {hosts[rank]} has died: {failure}") from failure
    if failures:
        raise failures[first_cause(failures)]
    return [values[rank] for rank in range(len(references))]


@contextlib.contextmanager
def callbacks_called(callbacks: Sequence[Callable[[Any], Any]] | None) -> Iterator[Any]:
    """Call functions with the records that workers log, in a thread, until the end of the block.

    Args:
        callbacks: The functions.

    Yields:
        The queue for :meth:`RankActor.set_queue`; ``None`` without callbacks.

    Raises:
        Exception: The exception of a callback.
    """
    if not callbacks:
        yield None
        return
    from ray.util.queue import Queue

    # On the driver's node: the node of a worker may leave an elastic job.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    end = "end of records"
    failures: list[Exception] = []

    def call() -> None:
        while (record := queue.get()) != end:
            try:
                for callback in callbacks:
                    callback(record)
            except Exception as error:
                # Raised by the caller's thread below.
                failures.append(error)

    thread = in_thread(call, name="horovod-callbacks")
    try:
        yield queue
    finally:
        queue.put(end)
        thread.join()
        queue.shutdown()
    for failure in failures:
        raise failure
