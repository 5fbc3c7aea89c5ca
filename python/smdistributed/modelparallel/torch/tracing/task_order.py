"""Reordering of tasks if ranks make the same calls in different orders.

A loop over a set of strings does so, because each Python process hashes strings differently.

- SAME-1: ranks that recorded the same tasks with the same inputs adopt the order of the first rank, and number their
  values in that order. So plans and messages are equal on all ranks.
- SAME-2: a task that draws random numbers, writes in place, changes its module, or ran while the body was recorded
  keeps its place. Only tasks between two such tasks are reordered.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.tasks import Task, digest_of

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline


def content_digests(pipeline: Pipeline, recording: Recording) -> list[tuple[int, bool]]:
    """Describe the tasks of a recording without their order.

    Args:
        pipeline: Caches digests.
        recording: The recording, which may be incomplete.

    Returns:
        For each task a digest of the function and its inputs, and whether the task keeps its place (SAME-2).
    """
    tasks = recording.tasks
    made_by = {value: (number, place) for number, task in enumerate(tasks) for place, value in enumerate(task.outputs)}

    def inputs(task: Task, digests: Sequence[int]) -> list[Any]:
        return [
            (digests[made_by[value][0]], made_by[value][1]) if value in made_by else value.parameter
            for value in task.inputs
        ]

    # Equal calls may have different consumers, which distinguish them and, in turn, the calls that compute their
    # inputs.
    producers: list[int] = []
    for task in tasks:
        producers.append(digest_of((pipeline.digest(task.signature, task.level), inputs(task, producers))))
    uses: list[list[Any]] = [[] for _ in tasks]
    for place, (value, _) in enumerate(recording.backward_roots):
        if value in made_by:
            uses[made_by[value][0]].append((made_by[value][1], -1, place))
    with_consumers = list(producers)
    for number in range(len(tasks) - 1, -1, -1):
        with_consumers[number] = digest_of((producers[number], sorted(uses[number])))
        for place, value in enumerate(tasks[number].inputs):
            if value in made_by:
                uses[made_by[value][0]].append((made_by[value][1], place, with_consumers[number]))
    digests: list[int] = []
    for number, task in enumerate(tasks):
        digests.append(digest_of((with_consumers[number], inputs(task, digests))))
    # Values that later microbatches and steps use are identified by their number.
    is_taken_from = bool(recording.retained.by_value)
    keeps = [
        is_taken_from or number < recording.num_executed or _keeps_its_place(task) for number, task in enumerate(tasks)
    ]
    return list(zip(digests, keeps, strict=True))


def _keeps_its_place(task: Task) -> bool:
    spec = task.output_spec
    return spec is None or bool(spec.draws or spec.mutated or spec.attributes or spec.effects) or spec.changes_state


def places(own: Sequence[tuple[int, bool]], first: Sequence[tuple[int, bool]]) -> list[int] | None:
    """Find the order of the first rank.

    Args:
        own: The result of :func:`content_digests` for this rank's tasks.
        first: The same for the tasks of the first rank.

    Returns:
        The numbers of this rank's tasks in the order of the first rank; ``None`` if the tasks differ, or must not be
        reordered.
    """
    if len(own) != len(first):
        return None
    waiting: dict[tuple[int, bool], collections.deque[int]] = {}
    order: list[int] = []
    begin = 0
    for place, task in enumerate(own):
        waiting.setdefault(task, collections.deque()).append(place)
        if not task[1] and place + 1 < len(own):
            continue
        if task[1] and first[place] != task:
            return None
        for theirs in first[begin : place + 1]:
            if not waiting.get(theirs):
                return None
            order.append(waiting[theirs].popleft())
        begin = place + 1
    return order


def reorder(recording: Recording, order: Sequence[int]) -> None:
    """Put the tasks of a recording into an order, and renumber their values (SAME-1)."""
    recording.tasks[:] = [recording.tasks[number] for number in order]
    values = [value for task in recording.tasks for value in task.outputs]
    # Equal microbatches share their values, which the first of them has renumbered.
    for number, value in enumerate(values):
        value.index = number


def digest(pipeline: Pipeline, recording: Recording) -> int:
    """Return a digest of a reordered recording; equal on ranks with the same recording."""
    tasks = tuple(
        pipeline.digest(task.signature, tuple(value.parameter or value.index for value in task.inputs))
        for task in recording.tasks
    )
    return digest_of((tasks, recording.num_executed, tuple(value.index for value, _ in recording.backward_roots)))
