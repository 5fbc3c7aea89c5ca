"""The order of tasks that read and write the same state of a partition: parameters, buffers, attributes of a module.

Stages run by their levels, which follow from the values that tasks pass each other. State passes no values, so a task that
writes it gets a level that keeps it after the calls before it, and before the calls after it.
"""

from __future__ import annotations

from smdistributed.modelparallel.torch.metadata import Outcome
from smdistributed.modelparallel.torch.tasks import Task, Value


class StateOrder:
    """That of one recording."""

    def __init__(self) -> None:
        #: By rank: the highest level so far, and the level of the last task of the body that writes a parameter or buffer.
        self._highest: dict[int, int] = {}
        self._written: dict[int, int] = {}
        #: By the identity of a module that changes its own state: the level of its last call.
        self._modules: dict[int, int] = {}

    def level(self, task: Task, level: int, writes_parameter: bool, outcome: Outcome | None) -> int:
        """The level of a task whose inputs allow ``level``."""
        rank = task.rank
        level = max(level, self._written.get(rank, 0))
        if writes_parameter:
            level = self._written[rank] = max(level, self._highest.get(rank, 0))
        if task.module is not None and outcome is not None and outcome.changes_state:
            level = self._modules[id(task.module)] = max(level, self._modules.get(id(task.module), 0))
        self._highest[rank] = max(level, self._highest.get(rank, 0))
        return level

    def note(self, task: Task) -> None:
        """Takes note of a task whose level is known."""
        rank, level = task.rank, task.level
        if level > self._highest.get(rank, 0):
            self._highest[rank] = level
        if task.outcome is None:
            return
        if task.outcome.changes_state and task.module is not None:
            self._modules[id(task.module)] = level
        if task.writes and writes_parameter(task):
            self._written[rank] = level


def writes_parameter(task: Task) -> bool:
    """Whether a task writes to a parameter or buffer that it is given."""
    return any(isinstance(source, Value) and source.storage.parameter is not None for source, _ in task.writes)
