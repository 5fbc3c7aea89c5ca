"""The order of tasks that read and write the same state of a partition: parameters, buffers, attributes of a module.

Stages are ordered by level, which follows from the values that tasks pass on. A task that writes state passes no
value to tasks that read it, so it gets a level that orders it after earlier calls and before later ones.

- ORD-1: a task of the body that writes to a parameter or buffer comes after all earlier tasks of its partition, and
  before all later ones.
- ORD-2: a call of a module that changes its own state comes after all earlier calls, and before all later calls, of
  modules that share a submodule with it. So do operations of the body that use a parameter or buffer of such a
  submodule.
- ORD-3: the same holds for calls of modules without a common submodule that share what one of them changes: a
  container or a tensor in an attribute, a parameter or a buffer. The signature of a task names such calls before it,
  so recordings that need another order have another digest.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value

_parts: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


class StateOrder:
    """The order of one recording.

    Attributes:
        changes_state: Whether some task changes parameters, buffers or attributes.
    """

    def __init__(self) -> None:
        self.changes_state = False
        #: By rank: the highest level so far, and the level of the last task of the body that writes a parameter or
        #: buffer.
        self._highest: dict[int, int] = {}
        self._written: dict[int, int] = {}
        #: By the id of a module: the level of the last call that changes its state, and the highest level of calls
        #: that read it.
        self._changed: dict[int, int] = {}
        self._read: dict[int, int] = {}
        #: Tasks that are not in `_read` yet, because it is needed only if a call changes state.
        self._new: list[Task] = []
        #: By the id of a container or storage (ORD-3): the modules whose calls change it, and those that reach it, by
        #: name, with the ids of their submodules.
        self._changing: dict[int, dict[str, frozenset[int]]] = {}
        self._reaching: dict[int, dict[str, frozenset[int]]] = {}

    def level(self, task: Task, level: int, writes_parameter: bool, spec: OutputSpec | None) -> int:
        """Return the level of a task whose inputs allow ``level``."""
        rank = task.rank
        level = max(level, self._written.get(rank, 0))
        if writes_parameter:
            self.changes_state = True
            level = self._written[rank] = max(level, self._highest.get(rank, 0))
        if self._changed:
            level = max(level, _highest(self._changed, touched_modules(task)), _highest(self._changed, task.parts))
        if task.module is not None and spec is not None and spec.changes_state:
            self.changes_state = True
            self._fold()
            modules = touched_modules(task).union(task.changes)
            level = max(level, _highest(self._read, modules))
            self._changed.update(dict.fromkeys(modules, level))
        task.level = level
        self._new.append(task)
        self._highest[rank] = max(level, self._highest.get(rank, 0))
        return level

    def note(self, task: Task) -> None:
        """Record a task whose level is known."""
        rank, level = task.rank, task.level
        if level > self._highest.get(rank, 0):
            self._highest[rank] = level
        self._new.append(task)
        if task.output_spec is None:
            return
        if task.output_spec.changes_state and task.module is not None:
            self.changes_state = True
            self._changed.update(dict.fromkeys(touched_modules(task).union(task.changes), level))
            self._note_changing(task)
        if task.writes and writes_parameter(task):
            self.changes_state = True
            self._written[rank] = level

    def partners(self, task: Task) -> tuple[str, ...]:
        """Return the names of called modules with which a call shares what it or they change; note its changes."""
        if not (task.changes or (self._changing and task.parts)):
            return ()
        modules = touched_modules(task)
        found = [self._changing.get(part, {}) for part in task.parts]
        found += [self._reaching.get(part, {}) for part in task.changes]
        self._note_changing(task)
        return tuple(sorted({name for each in found for name, parts in each.items() if modules.isdisjoint(parts)}))

    def _note_changing(self, task: Task) -> None:
        for part in task.changes:
            self._changing.setdefault(part, {})[task.name] = touched_modules(task)

    def _fold(self) -> None:
        for task in self._new:
            modules = touched_modules(task)
            for part in (*modules, *task.parts):
                self._read[part] = max(task.level, self._read.get(part, 0))
            for part in task.parts:
                self._reaching.setdefault(part, {})[task.name] = modules
        self._new.clear()


class StateEdges:
    """Which earlier tasks of its partition each task follows because of ORD-1 to ORD-3.

    Levels alone do not order stages: a stage whose values only a later stage of its partition uses is computed there.
    """

    def __init__(self) -> None:
        #: For each task: its partition, and the modules, containers and storages whose state it can read.
        self._tasks: list[tuple[int, frozenset[int]]] = []
        #: Number of those that are in the tables below, which are needed only if some task changes state.
        self._num_noted = 0
        self._changes_state = False
        #: By the id of a module, container or storage: the last task that changes its state, and those that have read
        #: it since.
        self._changed: dict[int, int] = {}
        self._read: dict[int, list[int]] = {}
        #: By partition: the last task of the body that writes a parameter or buffer, and the tasks since.
        self._written: dict[int, int] = {}
        self._since: dict[int, list[int]] = {}

    def of(self, task: Task) -> list[int]:
        """Return the numbers of the tasks that the next task follows."""
        number, rank = len(self._tasks), task.rank
        parts = touched_modules(task).union(task.parts)
        self._tasks.append((rank, parts))
        spec = task.output_spec
        changes = task.module is not None and spec is not None and spec.changes_state
        writes = bool(task.writes) and writes_parameter(task)
        self._changes_state = self._changes_state or changes or writes
        if not self._changes_state:
            return []
        for earlier in range(self._num_noted, number):
            self._note(earlier)
        found = {self._changed[part] for part in parts if part in self._changed}
        if rank in self._written:
            found.add(self._written[rank])
        if changes:
            for part in touched_modules(task).union(task.changes):
                found.update(self._read.pop(part, ()))
                self._changed[part] = number
        if writes:
            found.update(self._since.pop(rank, ()))
            self._written[rank] = number
        self._note(number)
        return sorted(other for other in found if self._tasks[other][0] == rank)

    def _note(self, number: int) -> None:
        rank, parts = self._tasks[number]
        for part in parts:
            self._read.setdefault(part, []).append(number)
        self._since.setdefault(rank, []).append(number)
        self._num_noted = number + 1


def refuse_parameter_writes(tasks: Iterable[Task], earlier: Iterable[Task]) -> None:
    """Refuses tasks that run before the backward of an earlier microbatch, and write to what that needs.

    Args:
        tasks: The tasks.
        earlier: Those of the earlier microbatches.

    Raises:
        SMPUsageError: One writes to a parameter that requires a gradient.
    """
    saved = {
        id(tensor)
        for task in earlier
        if task.module is not None and task.output_spec is not None
        for _, tensor in state_of(task.module, task.output_spec.saved_state)
    }
    for task in tasks:
        for name in _needed_parameters(task, saved):
            raise SMPUsageError(
                f"`{task.name}` changes the parameter `{name}` in place, and the `smp.step` function reads values "
                "after it: the backward of the microbatch before, which needs the parameter as it was, has not run. "
                "Change parameters between steps, or read no values"
            )


def _needed_parameters(task: Task, saved: Container[int]) -> Iterator[str]:
    """Yield names of parameters and buffers to which a task writes and that backwards may need."""
    for source, *_ in task.writes:
        if isinstance(source, Value) and source.storage.parameter is not None and source.storage.meta.requires_grad:
            yield source.storage.parameter
    spec = task.output_spec
    if task.module is not None and spec is not None:
        for path, (_, tensor) in zip(spec.written_state, state_of(task.module, spec.written_state), strict=True):
            if tensor is None:
                continue
            if tensor.requires_grad or path in spec.saved_state or id(tensor) in saved:
                yield f"{task.name}.{path}"


def state_of(module: nn.Module, paths: Iterable[str]) -> Iterator[tuple[nn.Module, torch.Tensor | None]]:
    """Yield parameters and buffers of a module by their paths in it, each with the submodule that has it."""
    module = getattr(module, "_orig_mod", module)
    for path in paths:
        owner, _, name = path.rpartition(".")
        part = module.get_submodule(owner)
        yield part, part._parameters[name] if name in part._parameters else part._buffers.get(name)


def _highest(levels: dict[int, int], modules: Iterable[int]) -> int:
    return max((levels.get(module, 0) for module in modules), default=0)


def touched_modules(task: Task) -> frozenset[int]:
    """Return the ids of the modules whose state a task can read.

    These are the called module with its submodules, and the modules whose parameters it uses.
    """
    found = frozenset[int]() if task.module is None else _parts_of(task.module)
    owners = [value.owner for value in task.inputs if value.owner is not None]
    return found.union(owners) if owners else found


def _parts_of(module: nn.Module) -> frozenset[int]:
    known = _parts.get(module)
    if known is None:
        known = _parts[module] = frozenset(map(id, module.modules()))
    return known


def writes_trained_parameter(task: Task) -> bool:
    """Return whether a task, or the module that it calls, writes to a parameter that requires a gradient."""
    if writes_parameter(task) and any(
        isinstance(source, Value) and source.storage.meta.requires_grad for source, *_ in task.writes
    ):
        return True
    if task.module is None or task.output_spec is None or not task.output_spec.written_state:
        return False
    written = (tensor for _, tensor in state_of(task.module, task.output_spec.written_state))
    return any(tensor is not None and tensor.requires_grad for tensor in written)


def writes_parameter(task: Task) -> bool:
    """Return whether a task writes to a parameter or buffer among its arguments."""
    return any(isinstance(source, Value) and source.storage.parameter is not None for source, *_ in task.writes)
