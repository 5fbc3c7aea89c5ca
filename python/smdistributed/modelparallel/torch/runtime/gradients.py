"""Gradients over the replicas of a partition: the reducer of data parallelism, in rounds.

- GRA-1: a gradient is reduced as soon as the last microbatch has left all stages that have a part in it. Buckets and their
  order follow from the parameters, so replicas whose bodies take different ways only overlap less.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.dataparallel.torch.parallel.comm_hooks import AVERAGE, CommHook
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.runtime.stage_graph import Layout
from smdistributed.modelparallel.torch.tracing.recording import Recording

Named = Iterable[tuple[str, torch.Tensor]]


class GradientReducer:
    """Averages gradients over the ranks that hold the same partition.

    Args:
        group: These ranks.
        bucket_cap_mb: The size of a bucket.
        overlapping: Whether buckets start before the last backward has ended.
        passes: After how many steps with a backward gradients are reduced.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_cap_mb: float, overlapping: bool, passes: int) -> None:
        self._group, self._cap, self._overlapping = group, int(bucket_cap_mb * (1 << 20)), overlapping
        self._passes, self._steps = passes, 0
        self._hook: CommHook | None = None
        self._reducer: Any = None
        #: Those that are reduced, and the place of each.
        self._parameters: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        #: By stage: places of the gradients that it has a part in; and of each, how many stages it still waits for.
        self._stages: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}
        self._layout: Layout | None = None
        self._ready: set[int] = set()
        self._reduces = False
        #: Whether there are gradients of steps that have not reduced them.
        self._accumulated = False

    @property
    def hook(self) -> tuple[object, Callable[..., Any]] | None:
        """What the script has buckets reduced by, and its state."""
        return None if self._hook is None else (self._hook.state, self._hook.function)

    @hook.setter
    def hook(self, chosen: tuple[object, Callable[..., Any]]) -> None:
        self._hook, self._reducer = CommHook(*chosen), None

    def begin(self, pipeline: Pipeline, recordings: Sequence[Recording], parameters: Named) -> None:
        """A step whose last microbatch is that of the last recording."""
        self._pipeline, self._recording = pipeline, recordings[-1]
        self._layout, self._stages, self._left, self._ready = None, {}, {}, set()
        self._reduces = self._counts()
        self._accumulated = not self._reduces
        if self._reduces:
            self._follow(parameters)
            self._reducer.open()

    def stage_is_done(self, number: int, layout: Layout) -> None:
        """The backward of the last microbatch has left a stage."""
        if not self._reduces or not self._overlapping:
            return
        if self._layout is None:
            self._look_at(layout)
        complete = []
        for place in self._stages.get(number, ()):
            self._left[place] -= 1
            if self._left[place] == 0:
                complete.append(place)
        self._give(complete)

    def _look_at(self, layout: Layout) -> None:
        """Which stages have a part in which gradient."""
        self._layout = layout
        pipeline, tasks = self._pipeline, self._recording.tasks
        for number, stage in enumerate(layout.stages):
            if stage.rank != pipeline.rank:
                continue
            found: dict[int, None] = {}
            for task_number in stage.tasks:
                task = tasks[task_number]
                used = [] if task.module is None else list(task.module.parameters())
                used += [pipeline.parameters[value.parameter] for value in task.inputs if value.parameter is not None]
                found.update((self._places[id(each)], None) for each in used if id(each) in self._places)
            self._stages[number] = list(found)
            for place in found:
                self._left[place] = self._left.get(place, 0) + 1

    def finish(self) -> None:
        """Returns when all gradients are reduced."""
        if self._reduces:
            self._complete()

    def give_up(self) -> None:
        """The step has failed: the other replicas' reduction fails, too."""
        if self._reduces:
            self._reducer.cancel()

    def stand_in(self, parameters: Named) -> None:
        """Takes part in what the other replicas reduce: with what this one has accumulated before it ran out, then with
        zeros, and gradients here stay as they are."""
        if not self._counts():
            return
        self._follow(parameters)
        if self._accumulated:
            self._accumulated = False
            self._reduce_all()
        else:
            self._reducer.shadow()

    def reduce(self, parameters: Named) -> None:
        """All gradients, after a step without a pipeline."""
        self._accumulated = not self._counts()
        if not self._accumulated:
            self._follow(parameters)
            self._reduce_all()

    def _counts(self) -> bool:
        """One more step; whether it reduces."""
        self._steps += 1
        return self._steps % self._passes == 0

    def _follow(self, named: Named) -> None:
        """Has a reducer for these parameters: collective where they have changed, which they do on all replicas."""
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
        sizes = _core.bucket_sizes(self._cap)
        self._reducer = torch.classes.smd.Reducer(
            parameters, names, [], [], [], [], list(self._group.ranks or ()), sizes, settings
        )
        # Stages say when a gradient is complete; a backward does not.
        self._reducer.remove_hooks()

    def _give(self, places: Iterable[int]) -> None:
        complete = [place for place in places if self._parameters[place].grad is not None]
        self._ready.update(complete)
        self._reducer.ready(complete)

    def _reduce_all(self) -> None:
        self._ready = set()
        self._reducer.open()
        self._complete()

    def _complete(self) -> None:
        # A gradient that no replica has stays none.
        self._give(place for place in range(len(self._parameters)) if place not in self._ready)
        self._reducer.close()


class GradientSnapshot:
    """The gradients at the start of a step with one partition: they tell whether its body has made or changed any, by whichever
    call.

    Args:
        parameters: The model's.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._gradients = [(each.grad, _version(each.grad)) for each in parameters]

    def has_changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether a parameter has another gradient now."""
        now = [each.grad for each in parameters]
        return len(now) != len(self._gradients) or any(
            gradient is not None and (gradient is not before or gradient._version != version)
            for gradient, (before, version) in zip(now, self._gradients, strict=True)
        )


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


@functools.cache
def warn_of_sums() -> None:
    """Warns once a process of gradients that are those of the sum over microbatches."""
    warnings.warn(
        "the body of a `smp.step` function made gradients without `model.backward`, as by `loss.backward()`: they are averaged over "
        "replicas, and summed over microbatches, where `model.backward(loss)` averages over both",
        stacklevel=5,
    )


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other
