"""The stages of a microbatch: groups of tasks that one rank computes without waiting for another."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from smdistributed import _core
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.partitioning import cost_model
from smdistributed.modelparallel.torch.tracing.state_order import (
    StateEdges,
    state_of,
    touched_modules,
    writes_parameter,
)
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value


class Stage(NamedTuple):
    """The tasks and values of a stage, by their numbers.

    Attributes:
        rank: The partition.
        tasks: The tasks in the order of their recording.
        inputs: Values of other stages, by producer.
        outputs: Values for other stages, by consumer.
        returning: The outputs whose gradients are sent back.
        exports: Values that are needed after its forward: by other stages, by the caller, or to begin a backward.
        backward_roots: The values at which a backward begins.
        early: Whether it runs while the step is still being recorded, because the body reads values.
        has_backward: Whether it has a backward.
    """

    rank: int
    tasks: list[int]
    inputs: dict[int, list[int]]
    outputs: dict[int, list[int]]
    returning: dict[int, list[int]]
    exports: list[int]
    backward_roots: list[int]
    early: bool
    has_backward: bool


class StageGraph:
    """The stages of a microbatch, in topological order.

    Attributes:
        stages: The stages.
        values: Every value by its number.
        returned: Values that the body returns, by rank.
    """

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.values: list[Value] = []
        self.returned: list[int] = []
        #: Storages to which a task writes, by `Value.storage_key`; earlier values that others need are copied.
        self.written: set[int | str] = set()
        #: Whether microbatches run one after the other, because each reads the state that the previous one left, or
        #: would write to state that the backward of the previous one needs.
        self.runs_in_turn = False
        #: Tasks that call a module which changes its own state, with the modules and parts whose state they change; and
        #: for each task, those whose state it can read (ORD-2, ORD-3).
        self._stateful: dict[int, frozenset[int]] = {}
        self._touched: list[frozenset[int]] = []
        #: Tasks of the body that write to a parameter or buffer, and whether that requires a gradient; these parameters
        #: and buffers, and those that autograd saves for a task of the body, as ids of modules and names in them.
        self._writers: dict[int, bool] = {}
        self._written_state: dict[int, set[tuple[int | None, str]]] = {}
        self._saved_state: set[tuple[int | None, str]] = set()
        #: Tasks that call a module which writes to parameters or buffers, with the module and their paths in it.
        self._state_writers: dict[int, tuple[nn.Module, tuple[str, ...]]] = {}
        #: The same for parameters and buffers that autograd saves, and modules whose parameters other tasks use.
        self._state_savers: list[tuple[nn.Module, tuple[str, ...]]] = []
        self._used_modules: set[int] = set()
        self._tasks: list[str] = []
        #: For each task, which inputs get gradients of which outputs, as (inputs, outputs).
        self._gradients: list[list[tuple[list[int], list[int]]]] = []
        #: Values that require gradients without a graph: views that were created without gradients.
        self.without_graph: set[int] = set()
        #: Values on which a loss depends.
        self._live: set[int] = set()
        self._state_edges = StateEdges()
        self._core = _core.StageGraph()

    def extend(self, tasks: Sequence[Task], start: int, early: bool) -> list[int]:
        """Add the tasks from ``start`` on; return the numbers of the new stages."""
        new = tasks[start:]
        added = self._core.extend([_row(task, self._state_edges.of(task)) for task in new], early)
        self._read_stages()
        for task in new:
            self._check_parameters(task)
            self.values += task.outputs
            if task.writes and writes_parameter(task):
                storages = [source.storage for source, *_ in task.writes if isinstance(source, Value)]
                self._writers[len(self._tasks)] = any(storage.meta.requires_grad for storage in storages)
                self._written_state[len(self._tasks)] = _state_in(storages)
            elif task.context.grad and any(value.meta.requires_grad for value in task.outputs):
                saved = (value for value in task.saved() if isinstance(value, Value) and value.rank == task.rank)
                self._saved_state |= _state_in(value.storage for value in saved)
            if task.module is not None and task.output_spec is not None and task.output_spec.changes_state:
                self._stateful[len(self._tasks)] = touched_modules(task).union(task.changes)
            # A call may return its own buffer, which the partition's later tasks use.
            returned = (value.base for value in task.inputs if value.base is not None and value.rank == task.rank)
            self._used_modules.update(base.owner for base in returned if base.owner is not None)
            if task.module is None:
                self._used_modules.update(value.owner for value in task.inputs if value.owner is not None)
            elif task.output_spec is not None:
                if task.output_spec.written_state:
                    self._state_writers[len(self._tasks)] = task.module, task.output_spec.written_state
                if task.output_spec.saved_state:
                    self._state_savers.append((task.module, task.output_spec.saved_state))
            self._touched.append(touched_modules(task).union(task.parts))
            self._tasks.append(task.name)
            self._gradients.append(_gradients(task))
            if not task.context.grad:
                linked = {result for _, results in self._gradients[-1] for result in results}
                linked -= self._results_without_graph(task)
                self.without_graph.update(set(_trained(task.outputs)) - linked)
            self.written.update(source.storage_key for source, *_ in task.writes if isinstance(source, Value))
            self.written.update(task.overwritten)
        return added

    def _results_without_graph(self, task: Task) -> set[int]:
        """Return the results of a write that are views without a graph, which they do not get by a write either."""
        found = {
            result.index
            for source, result, _ in task.writes
            if isinstance(source, Value) and source.index in self.without_graph
        }
        spec = task.output_spec
        if spec is not None and any(place is not None for place in spec.aliases):
            leaves = task.leaves()
            for place, result in zip(spec.aliases, task.outputs, strict=False):
                leaf = None if place is None else leaves[place]
                if isinstance(leaf, Value) and leaf.index in self.without_graph:
                    found.add(result.index)
        return found

    def _check_parameters(self, task: Task) -> None:
        """Refuse a task that would lose the gradient of a parameter which the body has changed in place.

        Raises:
            SMPUsageError: The parameter is on another partition.
        """
        for value in task.inputs if task.context.grad else ():
            if value.rank != task.rank and value.index in self.without_graph and value.home != value.parameter:
                raise SMPUsageError(
                    f"`{task.name}` on partition {task.rank} uses the parameter `{value.home}` of partition "
                    f"{value.rank} after the `smp.step` function has changed it in place: change it between steps"
                )

    def set_outputs(self, task: int, outputs: Sequence[Value]) -> int:
        """Add the outputs of a task whose output spec was unknown; return its stage."""
        self.values += outputs
        if not self._gradients[task]:
            self.without_graph.update(_trained(outputs))
        for _, results in self._gradients[task]:
            results.extend(_trained(outputs))
        return self._core.set_outputs(task, _output_rows(outputs))

    def stage_of(self, value: int) -> int:
        """Return the stage that computes a value."""
        return self._core.stage_of(value)

    def finish(self, roots: Iterable[int], returned: Iterable[int]) -> None:
        """Set the values that are needed after the forwards."""
        self.returned = sorted(set(returned))
        roots = list(roots)
        self._core.finish(roots, self.returned)
        self._read_stages()
        self._live = set(roots)
        for links in reversed(self._gradients):
            for inputs, outputs in links:
                if not self._live.isdisjoint(outputs):
                    self._live.update(inputs)
        self._live -= self.without_graph
        self._find_state()

    def _writes_saved_state(self) -> set[int]:
        """Return the tasks that call a module which writes to a parameter or buffer that some backward needs."""
        if not self._state_writers:
            return set()
        saved = {id(tensor) for saver in self._state_savers for _, tensor in state_of(*saver)}
        return {
            task
            for task, writer in self._state_writers.items()
            if any(id(tensor) in saved or id(owner) in self._used_modules for owner, tensor in state_of(*writer))
        }

    def _find_state(self) -> None:
        write_saved = self._writes_saved_state()
        saved_state = self._saved_state.union(
            (id(part), path.rpartition(".")[2])
            for module, paths in (self._state_savers if self._writers else ())
            for path, (part, _) in zip(paths, state_of(module, paths), strict=True)
        )
        stages_of: dict[int, set[int]] = {}
        if self._stateful:
            for number, stage in enumerate(self.stages):
                for task in stage.tasks:
                    for module in self._touched[task]:
                        stages_of.setdefault(module, set()).add(number)
        for stage in self.stages:
            for task in stage.tasks:
                is_split = task in self._stateful and (
                    # The next microbatch's forward would write to what this one's backward needs.
                    task in write_saved or any(len(stages_of.get(part, ())) > 1 for part in self._stateful[task])
                )
                if task in self._writers:
                    # The gradient is computed with the parameter's value before the write, and with a buffer's value
                    # before the next microbatch's write.
                    others = sum(other.rank == stage.rank for other in self.stages)
                    is_saved = not saved_state.isdisjoint(self._written_state[task])
                    is_split = self._writers[task] or others > 1 or is_saved
                if is_split and not self.runs_in_turn:
                    self.runs_in_turn = True
                    warnings.warn(
                        f"`{self._tasks[task]}` changes parameters, buffers or attributes that its partition uses "
                        "before and after another one computes, or that its backward needs: microbatches run "
                        "one after the other, in the order of the body",
                        stacklevel=2,
                    )

    def edges(self, stages: Iterable[int]) -> list[tuple[int, int]]:
        """Return the pairs of ranks (producer, consumer) between which the inputs of these stages pass."""
        pairs = (
            (self.stages[producer].rank, self.stages[consumer].rank)
            for consumer in stages
            for producer in self.stages[consumer].inputs
        )
        return sorted(set(pairs))

    def gradients(self, producer: int, consumer: int) -> list[int]:
        """Return the values of an edge whose gradients are sent back.

        A stage with a backward may also have inputs on which no loss depends. Their gradients stay `None`, as in one
        process.
        """
        return [value for value in self.stages[producer].returning[consumer] if value in self._live]

    def plan(
        self,
        rank: int,
        ranks: int,
        microbatches: int,
        schedule: str,
        active_microbatches: int | None,
        memory_bytes: int | None,
    ) -> list[tuple[str, int, int, int | None]]:
        """Returns a rank's program for ``microbatches`` microbatches like this one."""
        return self._core.plan(rank, ranks, microbatches, schedule, active_microbatches, memory_bytes)

    def _read_stages(self) -> None:
        self.stages = [Stage(*row) for row in self._core.stages()]


def _state_in(storages: Iterable[Value]) -> set[tuple[int | None, str]]:
    """Return the parameters and buffers among storages, as ids of modules and names in them."""
    return {(each.owner, each.home.rpartition(".")[2]) for each in storages if each.home is not None}


def _row(task: Task, follows: list[int]) -> tuple:
    inputs = [value.index for value in task.inputs if value.parameter is None]
    cost, outputs = cost_model.UNKNOWN_COST, _output_rows(task.outputs)
    if task.output_spec is not None:
        cost = task.output_spec.cost
        if task.output_spec.attributes:
            # The sizes of these values may differ between ranks, and only few are used, so the plan ignores them.
            own, all_ = task.output_spec.results, len(task.output_spec.metas)
            outputs[own:all_] = [(0, wanted) for _, wanted in outputs[own:all_]]
    return (
        task.rank, task.level, inputs, follows, outputs, (cost.forward, cost.input, cost.weight),
        (cost.kept_bytes, cost.waiting_bytes),
    )  # fmt: skip


def _gradients(task: Task) -> list[tuple[list[int], list[int]]]:
    """Return which inputs of a task get gradients of which outputs."""
    apart = [write for write in task.writes if not write.has_graph] if task.context.grad else []
    if apart:
        # Only the numbers of these values change, through a detached tensor.
        leaves, results = set(map(id, task.leaves())), {write.result for write in apart}
        sources = [write.source for write in apart if id(write.source) not in leaves]
        inputs = [value for value in task.inputs if value not in sources]
        outputs = [value for value in task.outputs if value not in results]
        links = [(_trained([write.source]), _trained([write.result])) for write in apart if type(write.source) is Value]
        return [(_trained(inputs), _trained(outputs)), *links]
    if task.context.grad:
        return [(_trained(task.inputs), _trained(task.outputs))]
    # Without gradients, tensors that are returned unchanged or changed in place keep their graph.
    pairs: list[tuple[object, Value]] = [(write.source, write.result) for write in task.writes]
    aliases = () if task.output_spec is None else task.output_spec.aliases
    if any(place is not None for place in aliases):
        arguments = task.leaves()
        pairs += [(arguments[at], value) for at, value in zip(aliases, task.outputs, strict=False) if at is not None]
    return [
        (_trained([source]), _trained([result]))
        for source, result in pairs
        if isinstance(source, Value) and source.parameter is None
    ]


def _trained(values: Sequence[Value]) -> list[int]:
    return [value.index for value in values if value.parameter is None and value.meta.requires_grad]


def _output_rows(values: Sequence[Value]) -> list[tuple[int, bool]]:
    return [(value.meta.bytes, value.meta.requires_grad) for value in values]
