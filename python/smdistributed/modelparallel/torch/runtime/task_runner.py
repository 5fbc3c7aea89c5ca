"""Runs the tasks of a stage, one after the other.

EXE-3: a stage owns the storages that its tasks write to. Its inputs are copied when it begins, their views become views
of the copy, and what other stages need from before a write is copied when it is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime.call_plan import CallPlan
from smdistributed.modelparallel.torch.runtime.stage_graph import Stage, StageGraph
from smdistributed.modelparallel.torch.runtime.storage_copies import StoragePart, copied, is_whole
from smdistributed.modelparallel.torch.runtime.task_execution import GradAutocastState, run_planned, task_outputs
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec, describe_result
from smdistributed.modelparallel.torch.tracing.placeholders import UnreadTensor
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta, offset_of, version_of
from smdistributed.modelparallel.torch.tracing.state_order import writes_trained_parameter
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value


class DrawObserver(Protocol):
    """Called before and after a task that draws random numbers."""

    def start(self) -> None:
        """Begin the task."""

    def stop(self) -> None:
        """End the task."""


class TaskRunner:
    """Runs the tasks of stages of one rank.

    Args:
        rank: The rank in the pipeline.
        parameters: Parameters and buffers by their paths.
        modules: The attributes of modules.
        early: Whether the body is still being recorded, so that it may write to tensors that tasks have taken.

    Attributes:
        unknown: For a task without a known output spec: the spec that was found, and the output tensors.
    """

    def __init__(
        self, rank: int, parameters: Mapping[str, torch.Tensor], modules: ModuleState, early: bool = False
    ) -> None:
        self._rank, self._parameters, self._modules, self._early = rank, parameters, modules, early
        self.unknown: Any = None

    def run(
        self,
        graph: StageGraph,
        stage: Stage,
        tasks: Sequence[Task],
        env: dict[int, torch.Tensor],
        retained: Container[int],
        draws: Mapping[int, Sequence[DrawObserver]],
    ) -> None:
        """Run the tasks of a stage.

        Args:
            graph: The stages of the microbatch.
            stage: The stage.
            tasks: Its tasks.
            env: Its inputs by the indices of their values; the results are added.
            retained: Values to which the body still refers when it has ended.
            draws: The random numbers that tasks draw, by the number of the task in the recording.
        """
        if graph.written:
            self._copy_written_inputs(graph, stage, tasks, env)
        snapshots: dict[int, torch.Tensor] = {}
        with GradAutocastState(self._modules) as grad_autocast:
            for number, task in zip(stage.tasks, tasks, strict=True):
                grad_autocast.enter(task)
                drawn = draws.get(number, ())
                for draw in drawn:
                    draw.start()
                if task.plan is None:
                    task.plan = CallPlan.of(task)
                if task.plan is False or (self._early and task.plan.has_replicated):
                    self._run_task(task, env)
                else:
                    run_planned(task, task.plan, env, self._parameters)
                for draw in drawn:
                    draw.stop()
                if writes_trained_parameter(task):
                    torch.clear_autocast_cache()
                for output in task.outputs if graph.written else ():
                    is_wanted = self._early or output.index in stage.exports or output.index in retained
                    if output.storage_key in graph.written and is_wanted:
                        # A tensor that the task changed without gradient mode still has its graph. A view that was
                        # taken without it has none, and autograd refuses to use it after a write to its base.
                        has_graph = output.meta.requires_grad and output.index not in graph.without_graph
                        with torch.set_grad_enabled(has_graph):
                            snapshots[output.index] = env[output.index].clone()
        env |= snapshots

    def _copy_written_inputs(
        self, graph: StageGraph, stage: Stage, tasks: Sequence[Task], env: dict[int, torch.Tensor]
    ) -> None:
        """Copy inputs to whose storage the stage writes, and recreate their views as views of the copy (EXE-3)."""
        own: dict[int | str, torch.Tensor] = {}
        for task in tasks:
            for source, *_ in task.writes:
                if not isinstance(source, Value):
                    continue
                if source.base is None or source.storage.rank != self._rank:
                    if source.home is not None and source.rank == self._rank and not source.meta.requires_grad:
                        own[source.storage_key] = self._parameters[source.home]
                    elif source.parameter is not None:
                        own[source.parameter] = self._parameters[source.parameter]
                    elif source.index in env and source.index not in own:
                        parts = self._parts(graph, stage, source, env)
                        if is_whole(parts[source.index], list(parts.values())):
                            own[source.index] = env[source.index] = env[source.index].clone()
                        else:
                            env.update(zip(parts, copied(list(parts.values())), strict=True))
                    else:
                        # If the stage itself creates a view of an input from another partition and writes to it, the
                        # input is copied.
                        for index in itertools.chain(*stage.inputs.values()):
                            if index not in own and graph.values[index].storage_key == source.storage_key:
                                own[index] = env[index] = env[index].clone()
        if not own:
            return
        #: A detached tensor and its views are views of one tensor, so that a write to one gives all of them a graph.
        detached: dict[tuple[int | str, int], torch.Tensor] = {}
        for values in stage.inputs.values():
            for index in values:
                value = graph.values[index]
                base = own.get(value.storage_key)
                if value.base is None or base is None:
                    continue
                if base.dtype is not value.meta.dtype:
                    raise SMPError(
                        f"a task writes in place to a tensor that has a view of another dtype, {value.meta}, and "
                        "another partition computes between the view and the write: write to a copy"
                    )
                if base.requires_grad and not value.meta.requires_grad:
                    key = (value.storage_key, index if value.detached is None else -1 - value.detached)
                    base = detached.setdefault(key, base.detach())
                offset = offset_of(base) + value.offset
                env[index] = base.as_strided(value.meta.shape, value.meta.stride, offset)

    def _parts(
        self, graph: StageGraph, stage: Stage, base: Value, env: Mapping[int, torch.Tensor]
    ) -> dict[int, StoragePart]:
        """Return the inputs of a stage that share the storage of a value of this partition, which comes first."""
        found = {base.index: StoragePart(env[base.index], base.meta, 0)}
        for index in itertools.chain(*stage.inputs.values()) if base.base is None else ():
            value = graph.values[index]
            if value.base is not None and value.storage_key == base.index and value.meta.dtype is base.meta.dtype:
                found[index] = StoragePart(env[index], value.meta, value.offset)
        return found

    def _run_task(self, task: Task, env: dict[int, torch.Tensor]) -> None:
        place = -1
        changed = task.output_spec.mutated if task.output_spec is not None else ()
        replicated: dict[int, torch.Tensor] = {}
        #: Replicated tensors that the call changes, and their copies by id: one each, since a call may get one twice.
        leaves = task.leaves() if changed else []
        written = {id(leaves[place]) for place in changed}
        copies: dict[int, torch.Tensor] = {}
        #: Indices of tensors by id, for tensors inside of containers among the arguments.
        given: dict[int, int] = {}

        def leaf(item: Any) -> Any:
            nonlocal place
            place += 1
            if isinstance(item, Value):
                item = self._tensor(item, env)
            else:
                if id(item) in written or (task.output_spec is None and type(item) is torch.Tensor):
                    if id(item) not in copies:
                        copies[id(item)] = item.clone()
                    replicated[place] = item = copies[id(item)]
                elif isinstance(item, torch.Tensor) and not isinstance(item, UnreadTensor) and self._early:
                    # Copied, because the body may write to it before the backward.
                    item = item.clone()
            if task.has_containers:
                given[id(item)] = place
            return item

        watch = None
        if task.has_containers:
            copier = object_state.Copier(leaf)
            args = copier.copy(task.args)
            kwargs = {key: copier.copy(item) for key, item in task.kwargs.items()}
            watch = object_state.Watch(copier.copies)
        else:
            args, kwargs = pytree.transform((task.args, task.kwargs), leaf)
        if task.output_spec is None:
            versions = {place: version_of(tensor) for place, tensor in replicated.items()}
            result = task.call(*args, **kwargs)
            template, outputs, effects = describe_result(result, watch)
            mutated = tuple(at for at, version in versions.items() if version_of(replicated[at]) != version)
            # It is not known which tensors autograd has saved, so all of them are listed.
            saved = tuple(range(-len(outputs), place + 1)) if task.context.grad else ()
            metas, aliases = tuple(map(TensorMeta.of, outputs)), (None,) * len(outputs)
            spec = OutputSpec(template, metas, mutated, aliases, effects=effects, saved=saved)
            self.unknown = spec, [*outputs, *(replicated[place] for place in mutated)]
            return
        outputs = task_outputs(task, task.call(*args, **kwargs), watch, given)
        for value, tensor in zip(task.outputs, outputs, strict=False):
            env[value.index] = tensor
        for source, value, _ in task.writes:
            env[value.index] = replicated[source] if isinstance(source, int) else self._tensor(source, env)

    def _tensor(self, value: Value, env: Mapping[int, torch.Tensor]) -> torch.Tensor:
        # Parameters and buffers are changed in place.
        return env[value.index] if value.parameter is None else self._parameters[value.parameter]
