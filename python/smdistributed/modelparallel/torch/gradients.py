"""Gradients over the replicas of a partition: reduced as soon as the last microbatch has left them complete.

- GRA-1: what is reduced together, and in which order, follows from the layout of the last microbatch; replicas compare
  it first, and where they differ (the body took different ways), all is reduced at the end in the order of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.torch.layout import Layout
from smdistributed.modelparallel.torch.pipeline import Pipeline
from smdistributed.modelparallel.torch.recording import Recording


class Bucket:
    """Gradients that are reduced together, as communication hooks of PyTorch take them."""

    def __init__(self, index: int, whole: torch.Tensor, parameters: Sequence[torch.Tensor], last: bool) -> None:
        self._index, self._whole, self._parameters, self._last = index, whole, list(parameters), last

    def index(self) -> int:
        """Its number in this step."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, one after the other."""
        return self._whole

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces them."""
        self._whole = tensor

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients they are."""
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        """Each gradient, as a view of the buffer."""
        parts = self._whole.split([parameter.numel() for parameter in self._parameters])
        return [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Whether none comes after it in this step."""
        return self._last


class _Reduced:
    """A reduction in place, as a future."""

    def __init__(self, work: dist.Work, whole: torch.Tensor) -> None:
        self._work, self._whole = work, whole

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._whole


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
        self._left: dict[int, int] = {}
        self._parameters: list[torch.Tensor] = []
        self._stages: dict[int, list[torch.Tensor]] = {}
        self._started: list[tuple[Any, list[torch.Tensor]]] = []
        #: What the script has buckets reduced by, and its state.
        self.hook: tuple[object, Callable[..., Any]] | None = None
        #: With a hook, the newest bucket: it goes when another one comes, or as the last one.
        self._held: list[torch.Tensor] = []
        self._ready: set[int] = set()
        self._skips = False
        #: Whether there are gradients of steps that have not reduced them.
        self._accumulated = False

    def begin(self, pipeline: Pipeline, recordings: Sequence[Recording], parameters: list[torch.Tensor]) -> None:
        """A step whose last microbatch is that of the last recording."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._started, self._held, self._ready, self._stages, self._left = [], [], set(), {}, {}
        self._steps += 1
        self._skips = self._accumulated = self._steps % self._passes != 0
        self._pipeline, self._recording, self._layout = pipeline, recordings[-1], None
        if self._skips or not self._overlapping:
            self._alike = False
            return
        mine = torch.tensor([recordings[-1].digest])
        everybody = torch.empty(len(self._group.ranks or ()), dtype=torch.int64)
        dist.all_gather_into_tensor(everybody, mine, self._group)
        self._alike = bool((everybody == mine).all())

    def stage_is_done(self, number: int, layout: Layout) -> None:
        """The backward of the last microbatch has left a stage."""
        if not self._alike:
            return
        if self._layout is None:
            self._look_at(layout)
        ready = []
        for parameter in self._stages.get(number, ()):
            self._left[id(parameter)] -= 1
            if self._left[id(parameter)] == 0:
                ready.append(parameter)
        self._start(ready)

    def _look_at(self, layout: Layout) -> None:
        """Which stages have a part in which gradient."""
        self._layout = layout
        pipeline, tasks = self._pipeline, self._recording.tasks
        wanted = {id(parameter) for parameter in self._parameters}
        for number, stage in enumerate(layout.stages):
            if stage.rank != pipeline.rank:
                continue
            found: dict[int, torch.Tensor] = {}
            for task_number in stage.tasks:
                task = tasks[task_number]
                used = [] if task.module is None else list(task.module.parameters())
                used += [pipeline.parameters[value.parameter] for value in task.inputs if value.parameter is not None]
                found.update((id(parameter), parameter) for parameter in used if id(parameter) in wanted)
            self._stages[number] = list(found.values())
            for key in found:
                self._left[key] = self._left.get(key, 0) + 1

    def finish(self) -> None:
        """Returns when all gradients are reduced."""
        if not self._skips:
            self._start([parameter for parameter in self._parameters if id(parameter) not in self._ready])
            self._complete()

    def stand_in(self, parameters: list[torch.Tensor], pipelined: bool) -> None:
        """Takes part in what the other replicas reduce: with what this one has accumulated before it ran out, then with
        zeros, and gradients here stay as they are."""
        self._steps += 1
        if self._steps % self._passes:
            return
        if pipelined and self._overlapping:
            # Nobody has recorded this: all is reduced at the end (GRA-1).
            everybody = torch.empty(len(self._group.ranks or ()), dtype=torch.int64)
            dist.all_gather_into_tensor(everybody, torch.tensor([-1]), self._group)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._started, self._held, self._ready = [], [], set()
        if self._accumulated:
            self._accumulated = False
            self._start(self._parameters)
            self._complete()
            return
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._start(self._parameters)
        self._complete()
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient

    def reduce(self, parameters: list[torch.Tensor]) -> None:
        """All gradients, after a step without a pipeline."""
        self._steps += 1
        self._accumulated = self._steps % self._passes != 0
        if self._accumulated:
            return
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._started, self._held, self._ready = [], [], set()
        self._start(self._parameters)
        self._complete()

    def _start(self, parameters: Sequence[torch.Tensor]) -> None:
        bucket: list[torch.Tensor] = []
        size = 0
        for parameter in parameters:
            other = bool(bucket) and (bucket[0].dtype, bucket[0].device) != (parameter.dtype, parameter.device)
            if bucket and (other or size + parameter.nbytes > self._cap):
                self._fill(bucket)
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        if bucket:
            self._fill(bucket)

    def _fill(self, bucket: list[torch.Tensor]) -> None:
        self._ready.update(map(id, bucket))
        if self.hook is None:
            self._start_bucket(bucket, last=False)
            return
        if self._held:
            self._start_bucket(self._held, last=False)
        self._held = bucket

    @torch.no_grad()
    def _start_bucket(self, bucket: list[torch.Tensor], last: bool) -> None:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        if self.hook is None:
            work = dist.all_reduce(whole, ReduceOp.AVERAGE, self._group, async_op=True)
            assert work is not None
            self._started.append((_Reduced(work, whole), bucket))
        else:
            state, hook = self.hook
            self._started.append((hook(state, Bucket(len(self._started), whole, bucket, last)), bucket))

    @torch.no_grad()
    def _complete(self) -> None:
        if self._held:
            bucket, self._held = self._held, []
            self._start_bucket(bucket, last=True)
        # A gradient that no replica has stays none.
        has = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.uint8)
        if len(has):
            dist.all_reduce(has, ReduceOp.MAX, self._group)
        used = {id(parameter) for parameter, flag in zip(self._parameters, has.tolist(), strict=True) if flag}
        for future, bucket in self._started:
            whole = future.wait()
            whole = whole[0] if isinstance(whole, list) else whole
            for parameter, part in zip(bucket, whole.split([each.numel() for each in bucket]), strict=True):
                if id(parameter) not in used:
                    continue
                if parameter.grad is None:
                    parameter.grad = part.view(parameter.shape).clone()
                else:
                    parameter.grad.copy_(part.view(parameter.shape))
        self._started = []
