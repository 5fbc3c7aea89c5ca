"""Gradient reduction over the replicas of a partition, by rounds of data parallelism's reducer.

- GRA-1: a gradient is reduced when the last microbatch has left all stages that contribute to it. Buckets and their
  order follow from the parameters alone, so replicas whose bodies differ only overlap less.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.dataparallel.torch.parallel.comm_hooks import AVERAGE, CommHook
from smdistributed.modelparallel.torch.runtime.executor import Microbatch
from smdistributed.modelparallel.torch.runtime.fallbacks import script_level
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph

Named = Iterable[tuple[str, torch.Tensor]]


class GradientReducer:
    """Averages gradients over the ranks that hold the same partition.

    Args:
        group: The ranks.
        bucket_cap_mb: The size of a bucket.
        overlapping: Whether buckets start before the last backward has ended.
        passes: Number of steps with a backward after which gradients are reduced.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_cap_mb: float, overlapping: bool, passes: int) -> None:
        self._group, self._bucket_bytes, self._overlapping = group, int(bucket_cap_mb * (1 << 20)), overlapping
        self._passes, self._steps = passes, 0
        #: Whether the next step reduces gradients; ``None``: as ``passes`` says.
        self.reduces_next: bool | None = None
        self._hook: CommHook | None = None
        self._reducer: Any = None
        #: The parameters whose gradients are reduced, and the index of each.
        self._parameters: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        #: For each stage, indices of gradients to which it contributes; and for each gradient, the number of
        #: pending stages.
        self._stages: dict[int, list[int]] = {}
        self._pending_stages: dict[int, int] = {}
        self._stage_graph: StageGraph | None = None
        self._ready: set[int] = set()
        self._reduces = False
        #: Whether there are gradients of earlier steps that were not reduced.
        self._accumulated = False

    @property
    def hook(self) -> tuple[object, Callable[..., Any]] | None:
        """The communication hook of the script and its state."""
        return None if self._hook is None else (self._hook.state, self._hook.function)

    @hook.setter
    def hook(self, chosen: tuple[object, Callable[..., Any]]) -> None:
        self._hook, self._reducer = CommHook(*chosen), None

    def begin(self, pipeline: Pipeline, parameters: Named) -> None:
        """Begin a step."""
        self._pipeline = pipeline
        self._stage_graph, self._stages, self._pending_stages, self._ready = None, {}, {}, set()
        self._reduces = self._is_reducing_step()
        self._accumulated = not self._reduces
        if self._reduces:
            self._update_reducer(parameters)
            self._reducer.open()

    def on_stage_done(self, number: int, last: Microbatch) -> None:
        """Mark gradients as ready after a stage's backward for the last microbatch of the step."""
        if not self._reduces or not self._overlapping:
            return
        if self._stage_graph is None:
            self._map_stages(last)
        complete = []
        for place in self._stages.get(number, ()):
            self._pending_stages[place] -= 1
            if self._pending_stages[place] == 0:
                complete.append(place)
        self._mark_ready(complete)

    def _map_stages(self, last: Microbatch) -> None:
        """Find the gradients to which each stage contributes."""
        graph = self._stage_graph = last.stage_graph
        pipeline, tasks = self._pipeline, last.recording.tasks
        for number, stage in enumerate(graph.stages):
            if stage.rank != pipeline.rank:
                continue
            found: dict[int, None] = {}
            for task_number in stage.tasks:
                task = tasks[task_number]
                used: list[torch.Tensor] = [] if task.module is None else list(task.module.parameters())
                used += [pipeline.parameters[value.parameter] for value in task.inputs if value.parameter is not None]
                found.update((self._places[id(each)], None) for each in used if id(each) in self._places)
            self._stages[number] = list(found)
            for place in found:
                self._pending_stages[place] = self._pending_stages.get(place, 0) + 1

    def finish(self) -> None:
        """Wait until all gradients are reduced."""
        if self._reduces:
            self._complete()

    def cancel(self) -> None:
        """End a failed step: the reduction fails on the other replicas, too."""
        if self._reduces:
            self._reducer.cancel()

    def join_shadow(self, parameters: Named) -> None:
        """Take part in the reduction of the other replicas.

        The first call contributes the gradients that this replica has accumulated, later ones zeros. This replica's
        gradients do not change.
        """
        if not self._is_reducing_step():
            return
        self._update_reducer(parameters)
        if self._accumulated:
            self._accumulated = False
            self._reduce_all()
        else:
            self._reducer.shadow()

    def reduce(self, parameters: Named) -> None:
        """Reduce all gradients, after a step without a pipeline."""
        self._accumulated = not self._is_reducing_step()
        if not self._accumulated:
            self._update_reducer(parameters)
            self._reduce_all()

    def _is_reducing_step(self) -> bool:
        """Count a step; return whether it reduces gradients."""
        self._steps += 1
        reduces, self.reduces_next = self.reduces_next, None
        return self._steps % self._passes == 0 if reduces is None else reduces

    def _update_reducer(self, named: Named) -> None:
        """Create a reducer if the parameters have changed, as they do on all replicas alike. Collective."""
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        parameters = [parameter for _, parameter in trained]
        same = len(parameters) == len(self._parameters) and all(map(_is, parameters, self._parameters))
        if self._reducer is not None and same and self._reducer.fits():
            return
        self._parameters = parameters
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._reducer = None
        settings = {
            "rounds": 1,
            "find_unused_parameters": 1,
            "static_graph": 0,
            "accumulation_steps": 1,
            "reduction": AVERAGE,
            "comm_hook": -1 if self._hook is None else self._hook.number,
        }
        names = [name for name, _ in trained]
        sizes = _core.bucket_sizes(self._bucket_bytes)
        self._reducer = torch.classes.smd.Reducer(
            parameters, names, [], [], [], [], list(self._group.ranks or ()), sizes, settings
        )
        # Stages, and not a backward's end, determine when a gradient is complete.
        self._reducer.remove_hooks()

    def _mark_ready(self, places: Iterable[int]) -> None:
        complete = [place for place in places if self._parameters[place].grad is not None]
        self._ready.update(complete)
        self._reducer.ready(complete)

    def _reduce_all(self) -> None:
        self._ready = set()
        self._reducer.open()
        self._complete()

    def _complete(self) -> None:
        # A parameter without a gradient on any replica keeps none.
        self._mark_ready(place for place in range(len(self._parameters)) if place not in self._ready)
        self._reducer.close()


class GradientSnapshot:
    """The gradients at the start of a step with one partition.

    They show afterwards whether the body has created or changed any gradient, by whichever call.

    Args:
        parameters: The model's parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._gradients = [(each.grad, _version(each.grad)) for each in parameters]

    def has_changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether a parameter has a different gradient now."""
        now = [each.grad for each in parameters]
        return len(now) != len(self._gradients) or any(
            gradient is not None and (gradient is not before or gradient._version != version)
            for gradient, (before, version) in zip(now, self._gradients, strict=True)
        )


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


@functools.cache
def warn_of_sums() -> None:
    """Warn once in a process that gradients are summed over microbatches."""
    warnings.warn(
        "the body of a `smp.step` function made gradients without `model.backward`, as by `loss.backward()`: they "
        "are averaged over replicas, and summed over microbatches, where `model.backward(loss)` averages over both",
        stacklevel=script_level(),
    )


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other
