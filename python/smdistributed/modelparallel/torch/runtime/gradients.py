"""Gradient reduction over the replicas of a partition, by rounds of data parallelism's reducer.

- GRA-1: a gradient is reduced when the last microbatch has left all stages that contribute to it. Buckets and their
  order follow from the parameters alone, so replicas whose bodies differ only overlap less.
- GRA-2: with one partition, a gradient is complete when the last backward of the last microbatch has accumulated it.
  Which backward is the last one is known from an earlier call of the step function that changed no gradient afterwards.
  If a body then does change gradients, they are averaged again at the end of the step, on all replicas: the average of
  an average and a later gradient is the average of both.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.dataparallel.torch.parallel.comm_hooks import AVERAGE, CommHook
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.runtime.executor import Microbatch
from smdistributed.modelparallel.torch.runtime.fallbacks import script_level
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph

Named = Iterable[tuple[str, torch.Tensor]]
#: Reducers, each with its parameters and their names.
Reducers = Sequence[tuple["GradientReducer", Sequence[tuple[str, torch.Tensor]]]]


class GradientReducer:
    """Averages gradients over the ranks that hold the same partition.

    Args:
        group: The ranks.
        bucket_cap_mb: The size of a bucket.
        overlapping: Whether buckets start before the last backward has ended.
        passes: Number of steps with a backward after which gradients are reduced.
        has_stages: Whether the end of stages determines when a gradient is complete, and not autograd (GRA-2).
    """

    def __init__(
        self, group: dist.ProcessGroup, bucket_cap_mb: float, overlapping: bool, passes: int, has_stages: bool
    ) -> None:
        self._group, self._bucket_bytes, self._overlapping = group, int(bucket_cap_mb * (1 << 20)), overlapping
        self._has_stages = has_stages
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

    def begin_backward(self, parameters: Named, accumulations: Mapping[int, int]) -> None:
        """Begin to reduce the gradients that a backward accumulates, unless this step only accumulates (GRA-2).

        ``accumulations`` has, by the parameter's id, how often the backward accumulates its gradient.
        """
        self._ready, self._reduces = set(), self._is_reducing_step()
        self._accumulated = not self._reduces
        if self._reduces:
            self._update_reducer(parameters)
            self._reducer.open()
            self._reducer.expect([accumulations.get(id(each), 0) for each in self._parameters])

    def end_backward(self) -> bool:
        """End that backward; return whether it accumulated no gradient more often."""
        if not self._reduces:
            return True
        is_as_expected = not any(self._reducer.further_accumulations())
        self._reducer.expect([0] * len(self._parameters))
        missing = set(self._reducer.missing())
        self._ready = {place for place in range(len(self._parameters)) if place not in missing}
        return is_as_expected

    def begin_counting(self) -> None:
        """Begin to count how often autograd accumulates each gradient."""
        if self._reducer is not None:
            self._reducer.expect([-1] * len(self._parameters))

    def end_counting(self) -> dict[int, int] | None:
        """Return the counts by the parameter's id; ``None`` before the first reduction."""
        if self._reducer is None:
            return None
        counts = self._reducer.further_accumulations()
        self._reducer.expect([0] * len(self._parameters))
        return {id(each): count for each, count in zip(self._parameters, counts, strict=True)}

    @property
    def has_reduced(self) -> bool:
        """Whether the last step reduced gradients, and did not only accumulate them."""
        return not self._accumulated

    def reduce_again(self) -> None:
        """Reduce the gradients of a step once more."""
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
        if self._has_stages or not self._overlapping:
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


class BackwardOverlap:
    """Chooses the backwards during which gradients are reduced (GRA-2)."""

    def __init__(self) -> None:
        #: By step function, what the last microbatch of its last call did.
        self._expectations: weakref.WeakKeyDictionary[Any, ExpectedBackwards] = weakref.WeakKeyDictionary()
        self._step: Any = None
        self._calls = 0
        self._accumulations: dict[int, int] | None = None
        self._begun: list[GradientReducer] = []
        #: The parameters, and their gradients when the latest backward of the last microbatch had ended.
        self._after: tuple[list[torch.Tensor], GradientSnapshot] | None = None

    def begin_step(self, step: Any) -> None:
        """Begin a call of a step function, also after one that has failed."""
        self._step, self._calls, self._accumulations, self._begun, self._after = step, 0, None, [], None

    def backward(self, run: Callable[[], None], reducers: Reducers) -> None:
        """Run a backward of the last microbatch; if it is the last one, reduce its gradients as they become complete.

        Raises:
            SMPUsageError: A gradient was accumulated more often than in the step before.
        """
        self._calls += 1
        if self._begun:
            # Its gradients are reduced at the end of the step.
            run()
            return
        expected = self._expectations.get(self._step)
        if expected is not None and self._calls == expected.calls:
            for reducer, named in reducers:
                reducer.begin_backward(named, expected.accumulations)
                self._begun.append(reducer)
            run()
            is_as_expected = [reducer.end_backward() for reducer in self._begun]
            if not all(is_as_expected):
                raise SMPUsageError(
                    "a layer in several checkpoints with `use_reentrant=True` was used more often than in the step "
                    "before, while its gradient was reduced: pass `overlapping_allreduce=False` to "
                    "`smp.DistributedModel`"
                )
            for reducer in self._begun:
                reducer.finish()
        else:
            for reducer, _ in reducers:
                reducer.begin_counting()
            run()
            counts = [reducer.end_counting() for reducer, _ in reducers]
            known = [each for each in counts if each is not None]
            self._accumulations = dict(ChainMap(*known)) if len(known) == len(counts) else None
        parameters = [parameter for _, named in reducers for _, parameter in named]
        self._after = parameters, GradientSnapshot(parameters)

    def end_step(self) -> tuple[bool, bool]:
        """End a step; return whether gradients were reduced, and whether the body has changed them afterwards."""
        # Drops the gradients.
        after, self._after = self._after, None
        has_changed = after is None or after[1].has_changed(after[0])
        if has_changed:
            self._expectations.pop(self._step, None)
        elif self._accumulations is not None:
            self._expectations[self._step] = ExpectedBackwards(self._calls, self._accumulations)
        return bool(self._begun), has_changed

    def cancel(self) -> None:
        """End a failed step: reductions that have begun fail on the other replicas, too."""
        for reducer in self._begun:
            reducer.cancel()
        self._expectations.pop(self._step, None)
        self.begin_step(None)


class ExpectedBackwards(NamedTuple):
    """The backwards of a step's last microbatch.

    Attributes:
        calls: Their number.
        accumulations: By a parameter's id, how often the last of them accumulates its gradient.
    """

    calls: int
    accumulations: Mapping[int, int]


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other
