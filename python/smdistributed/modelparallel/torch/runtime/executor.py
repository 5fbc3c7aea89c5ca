"""Runs the stages of recorded microbatches: forwards, backwards and what is sent between them.

- EXE-1: a stage's inputs are leaves of its own autograd graph, so its backward ends there; their gradients go to the
  stages that made them.
- EXE-2: gradients of a value are added up in the order of the stages that took it, whatever came first.
- EXE-3: a storage that a task writes to is the stage's own: inputs are copied when the stage begins, their views are
  views of that copy, and what others need of it from before the write is copied when it is made.
- EXE-4: parameters do not change during a step, so what autocast makes of them serves all microbatches of a program.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smdistributed import _core
from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime import offloading
from smdistributed.modelparallel.torch.runtime.offloading import Entrance
from smdistributed.modelparallel.torch.runtime.stage_graph import Layout, Stage
from smdistributed.modelparallel.torch.runtime.task_execution import Contexts, Simple, casts_are_kept, task_outputs
from smdistributed.modelparallel.torch.runtime.transfers import Arriving, Transfers
from smdistributed.modelparallel.torch.tracing import object_state
from smdistributed.modelparallel.torch.tracing.metadata import Outcome, described_result
from smdistributed.modelparallel.torch.tracing.module_state import ModuleState
from smdistributed.modelparallel.torch.tracing.placeholders import Unread
from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.remote_tensor import Meta, version_of
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value

#: Receives on CPUs that wait for their messages ahead of the program.
_AHEAD = 4


class _Run:
    """A stage of a microbatch between its forward and the end of its backward."""

    __slots__ = ("exports", "gradients", "kept", "leaves", "takers", "weights")

    def __init__(
        self,
        leaves: dict[int, torch.Tensor | Entrance],
        exports: dict[int, torch.Tensor],
        kept: offloading.Batch | None = None,
    ) -> None:
        self.leaves = leaves
        #: What of its activations is in host memory.
        self.kept = kept
        #: Values for others; once they have them, only where their backward begins.
        self.exports: dict[int, torch.Tensor | GradientEdge | None] = dict(exports)
        #: Gradients of exports, by value and the stage that they come from.
        self.gradients: dict[int, dict[int, torch.Tensor]] = {}
        #: Stages that have taken their values.
        self.takers = 0
        #: Weights whose gradients are computed apart from the rest of its backward, once they are looked for.
        self.weights: Any = None

    def find_weights(self) -> None:
        """Looks for them, in what comes before the exports."""
        roots = [each for each in self.exports.values() if isinstance(each, torch.Tensor) and each.requires_grad]
        inputs = [leaf for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor)]
        self.weights = torch.classes.smd.WeightGradients(roots, inputs)


class Microbatch:
    """What one microbatch has of tensors on this rank."""

    def __init__(self, recording: Recording, layout: Layout, detach: bool) -> None:
        self.recording, self.layout, self._detach = recording, layout, detach
        self.arrived: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.runs: dict[int, _Run] = {}
        #: Gradients of this rank's leaves that are to be sent: by the stage that took, the one that made, in order.
        self.returning: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.results: dict[int, torch.Tensor] = {}

    @property
    def runs_in_turn(self) -> bool:
        """Whether the next microbatch begins when this one has ended, instead of beside it."""
        return self.layout.runs_in_turn or self.recording.kept.needs_earlier

    def keep(self, exports: Mapping[int, torch.Tensor]) -> None:
        """Keeps what the body returns."""
        for value in self.layout.returned:
            if value in exports:
                self.results[value] = exports[value].detach() if self._detach else exports[value]

    def made(self, value: int) -> torch.Tensor | None:
        """The numbers of a value of a stage that has run here while the step was recorded; ``None``: it has not."""
        for run in self.runs.values():
            tensor = run.exports.get(value)
            if isinstance(tensor, torch.Tensor):
                return tensor.detach()
        return None

    def taken(self, number: int) -> None:
        """One more stage has what it takes of this one. After the last, nobody needs the numbers."""
        stage, run = self.layout.stages[number], self.runs[number]
        run.takers += 1
        if run.takers < len(stage.gives) or stage.early:
            return
        if not stage.trains:
            del self.runs[number]
            return
        for value, tensor in run.exports.items():
            if value not in stage.seeds and isinstance(tensor, torch.Tensor):
                run.exports[value] = get_gradient_edge(tensor) if tensor.requires_grad else None


class Executor:
    """Does this rank's part."""

    def __init__(
        self,
        rank: int,
        transfers: Transfers,
        parameters: Mapping[str, torch.Tensor],
        scale: float,
        modules: ModuleState,
        early: bool = False,
        offloader: offloading.Offloader | None = None,
    ) -> None:
        self._rank, self._transfers, self._parameters, self._scale = rank, transfers, parameters, scale
        self._modules, self._early, self._offloader = modules, early, offloader
        #: What came out of a task of which nobody knew that: the description, and the tensors.
        self.unknown: Any = None
        #: Stages that have run in this program.
        self._known: set[int] = set()

    # One action each; `run` calls them in the order of a program, and the recording those of stages that run early.

    def forward(self, mb: Microbatch, number: int, soon: bool = False) -> None:
        """The forward of a stage whose inputs are here; ``soon``: its backward is near (OFF-1)."""
        start = _core.timeline_now()
        layout, stage = mb.layout, mb.layout.stages[number]
        trains = stage.trains or self._early
        offloader = self._offloader if trains and not soon else None
        leaves: dict[int, torch.Tensor | Entrance] = {}
        env: dict[int, torch.Tensor] = {}
        for maker, values in stage.takes.items():
            if layout.stages[maker].rank == self._rank:
                tensors = [mb.runs[maker].exports[value] for value in values]
            else:
                tensors = mb.arrived.pop((maker, number))
            for value, tensor in zip(values, tensors, strict=True):
                home, wants_gradient = layout.values[value].home, layout.values[value].meta.requires_grad
                if home is not None and not wants_gradient and layout.stages[maker].rank == self._rank:
                    # A buffer changes where it is, and stages that write to it run in the order of the body.
                    env[value] = self._parameters[home]
                    continue
                leaf = tensor.detach()
                wanted = trains and wants_gradient
                if wanted and offloader is not None:
                    leaves[value] = entrance = Entrance(leaf)
                    leaf = entrance.enter(leaf)
                elif wanted:
                    leaves[value] = leaf.requires_grad_()
                env[value] = leaf
        tasks, kept_values = mb.recording.tasks, mb.recording.kept.by_value
        if layout.written:
            self._own_inputs(layout, stage, tasks, env)
            snapshots: dict[int, torch.Tensor] | None = {}
        else:
            snapshots = None
        modules = self._modules
        gathering = contextlib.nullcontext() if offloader is None else offloader.gathering()
        with gathering as kept, Contexts(modules) as contexts:
            for task_number in stage.tasks:
                task = tasks[task_number]
                contexts.enter(task.context)
                draws = mb.recording.draws.get(task_number, ())
                for draw in draws:
                    draw.start()
                if task.simple is None:
                    task.simple = Simple.of(task)
                if task.simple is False:
                    self._run_task(task, env)
                else:
                    task.simple.run(task, env)
                for draw in draws:
                    draw.stop()
                if snapshots is not None:
                    for value in task.outputs:
                        is_wanted = self._early or value.index in stage.exports or value.index in kept_values
                        if value.storage_key in layout.written and is_wanted:
                            snapshots[value.index] = env[value.index].clone()
        if snapshots:
            env |= snapshots
        for index, kept_tensor in kept_values.items():
            if kept_tensor.tensor is None and index in env:
                kept_tensor.tensor = env[index].detach()
        # Of a stage that runs early, nobody knows yet what is needed.
        exports = env if self._early else {value: env[value] for value in stage.exports}
        if layout.without_graph:
            # Autograd takes them for leaves that are views, where no backward can begin.
            exports = {
                value: tensor.detach() if value in layout.without_graph else tensor for value, tensor in exports.items()
            }
        if not trains:
            exports = {value: tensor.detach() for value, tensor in exports.items()}
        mb.keep(exports)
        if trains:
            if number not in self._known:
                # The casts of later microbatches are the same nodes (EXE-4).
                self._known.add(number)
                if any(tasks[task].context.autocast for task in stage.tasks):
                    torch.ops.smd.add_up_casts([tensor for tensor in exports.values() if tensor.requires_grad])
            run = mb.runs[number] = _Run(leaves, exports, kept)
            # Of a stage that runs early, not all is there that a backward may begin with.
            if not self._early:
                run.find_weights()
        elif stage.gives:
            mb.runs[number] = _Run({}, exports)
        for maker in stage.takes:
            if layout.stages[maker].rank == self._rank:
                mb.taken(maker)
        # All microbatches take the same.
        takes = [list(stage.takes)] if start and mb.recording.microbatch == 0 else []
        _core.timeline_stage("forward", number, mb.recording.microbatch, start, *takes)

    def _own_inputs(self, layout: Layout, stage: Stage, tasks: Sequence[Task], env: dict[int, torch.Tensor]) -> None:
        """Copies inputs whose storage the stage writes to, and makes their views views of the copy (EXE-3)."""
        own: dict[int | str, torch.Tensor] = {}
        for number in stage.tasks:
            for source, _ in tasks[number].writes:
                if not isinstance(source, Value):
                    continue
                if source.base is None or source.storage.rank != self._rank:
                    if source.home is not None and source.rank == self._rank and not source.meta.requires_grad:
                        own[source.storage_key] = self._parameters[source.home]
                    elif source.parameter is not None:
                        own[source.parameter] = self._parameters[source.parameter]
                    elif source.index in env:
                        own[source.index] = env[source.index] = env[source.index].clone()
                    else:
                        # The stage itself makes a view of an input from another partition, and writes to that.
                        for index in itertools.chain(*stage.takes.values()):
                            if index not in own and layout.values[index].storage_key == source.storage_key:
                                own[index] = env[index] = env[index].clone()
        if not own:
            return
        for values in stage.takes.values():
            for index in values:
                value = layout.values[index]
                base = own.get(value.storage_key)
                if value.base is None or base is None:
                    continue
                if base.dtype is not value.meta.dtype:
                    raise SMPError(
                        f"a write in place to a tensor of which the step function holds a view of another dtype, {value.meta}, "
                        "and another partition computes in between: change a copy"
                    )
                if base.requires_grad and not value.meta.requires_grad:
                    base = base.detach()
                offset = base.storage_offset() + value.offset
                env[index] = base.as_strided(value.meta.shape, value.meta.stride, offset)

    def _run_task(self, task: Task, env: dict[int, torch.Tensor]) -> None:
        place = -1
        changed = task.outcome.mutated if task.outcome is not None else ()
        replicated: dict[int, torch.Tensor] = {}
        #: Places of tensors by their identities, where containers among the arguments may keep them.
        given: dict[int, int] = {}

        def leaf(item: Any) -> Any:
            nonlocal place
            place += 1
            if isinstance(item, Value):
                item = self._tensor(item, env)
            else:
                if place in changed or (task.outcome is None and type(item) is torch.Tensor):
                    replicated[place] = item = item.clone()
                elif isinstance(item, torch.Tensor) and not isinstance(item, Unread) and self._early:
                    # The body may write to it before the backward.
                    item = item.clone()
            if task.follows:
                given[id(item)] = place
            return item

        watch = None
        if task.follows:
            copier = object_state.Copier(leaf)
            args = copier.copy(task.args)
            kwargs = {key: copier.copy(item) for key, item in task.kwargs.items()}
            watch = object_state.Watch(copier.copies)
        else:
            args, kwargs = pytree.transform((task.args, task.kwargs), leaf)
        if task.outcome is None:
            versions = {place: version_of(tensor) for place, tensor in replicated.items()}
            result = task.call(*args, **kwargs)
            template, outputs, effects = described_result(result, watch)
            mutated = tuple(place for place, version in versions.items() if version_of(replicated[place]) != version)
            outcome = Outcome(template, tuple(map(Meta.of, outputs)), mutated, (None,) * len(outputs), effects=effects)
            self.unknown = outcome, [*outputs, *(replicated[place] for place in mutated)]
            return
        outputs = task_outputs(task, task.call(*args, **kwargs), watch, given)
        for value, tensor in zip(task.outputs, outputs, strict=False):
            env[value.index] = tensor
        for source, value in task.writes:
            env[value.index] = replicated[source] if isinstance(source, int) else self._tensor(source, env)

    def _tensor(self, value: Value, env: Mapping[int, torch.Tensor]) -> torch.Tensor:
        # Parameters and buffers change where they are.
        return env[value.index] if value.parameter is None else self._parameters[value.parameter]

    def backward(self, mb: Microbatch, number: int) -> None:
        """The backward of a stage: its parameters' gradients are added up, its leaves' are ready to go."""
        start = _core.timeline_now()
        stage = mb.layout.stages[number]
        if stage.trains:
            run = mb.runs.pop(number)
            roots, gradients = self._roots(mb, number, run)
            if roots:
                self._modules.apply(mb.recording.backward_modules)
                _run_backward(roots, gradients, run.weights, later=False)
            self._return_gradients(mb, number, run.leaves)
        _core.timeline_stage("backward", number, mb.recording.microbatch, start)

    def input_part(self, mb: Microbatch, number: int) -> None:
        """The first part of a backward: all but its weights' gradients; its leaves' are ready to go."""
        start = _core.timeline_now()
        stage = mb.layout.stages[number]
        if stage.trains:
            run = mb.runs[number]
            roots, gradients = self._roots(mb, number, run)
            if roots:
                self._modules.apply(mb.recording.backward_modules)
                _run_backward(roots, gradients, run.weights, later=True)
            self._return_gradients(mb, number, run.leaves)
            run.leaves, run.exports = {}, {}
        _core.timeline_stage("input", number, mb.recording.microbatch, start)

    def weight_part(self, mb: Microbatch, number: int) -> None:
        """The second part: its weights' gradients are added up."""
        start = _core.timeline_now()
        if mb.layout.stages[number].trains:
            mb.runs.pop(number).weights.run()
        _core.timeline_stage("weight", number, mb.recording.microbatch, start)

    def _roots(
        self, mb: Microbatch, number: int, run: _Run
    ) -> tuple[list[torch.Tensor | GradientEdge], list[torch.Tensor]]:
        stage = mb.layout.stages[number]
        roots: list[torch.Tensor | GradientEdge] = []
        gradients: list[torch.Tensor] = []
        seeds: dict[int, torch.Tensor] = {}
        for value, gradient in mb.recording.seeds:
            if value.index in stage.seeds:
                tensor = run.exports[value.index]
                gradient = torch.ones_like(tensor) if gradient is None else gradient.to(tensor)
                gradient = gradient * self._scale if self._scale != 1.0 else gradient
                before = seeds.get(value.index)
                seeds[value.index] = gradient if before is None else before + gradient
        for value in stage.exports:
            root = run.exports[value]
            if root is None or (isinstance(root, torch.Tensor) and not root.requires_grad):
                continue
            # EXE-2
            parts = [gradient for _, gradient in sorted(run.gradients.get(value, {}).items())]
            if value in seeds:
                parts.append(seeds[value])
            if not parts:
                continue
            gradient = parts[0]
            for part in parts[1:]:
                gradient = gradient + part
            roots.append(root)
            gradients.append(gradient)
        return roots, gradients

    def _return_gradients(self, mb: Microbatch, number: int, leaves: Mapping[int, torch.Tensor | Entrance]) -> None:
        layout = mb.layout
        for maker in layout.stages[number].takes:
            values = layout.gradients(maker, number)
            if not values:
                continue
            gradients = []
            for value in values:
                leaf = leaves[value]
                if leaf.grad is None:
                    gradients.append(leaf.zeros() if isinstance(leaf, Entrance) else torch.zeros_like(leaf))
                else:
                    gradients.append(leaf.grad)
            if layout.stages[maker].rank == self._rank:
                self._take_gradients(mb, maker, number, values, gradients)
            else:
                mb.returning[number, maker] = gradients

    def _take_gradients(
        self, mb: Microbatch, maker: int, taker: int, values: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            mb.runs[maker].gradients.setdefault(value, {})[taker] = gradient

    def send_forward(self, mb: Microbatch, number: int, taker: int) -> None:
        """Values for a stage elsewhere."""
        start = _core.timeline_now()
        run, to = mb.runs[number], mb.layout.stages[taker].rank
        for value in mb.layout.stages[number].gives[taker]:
            self._transfers.send(run.exports[value], to)
        mb.taken(number)
        _core.timeline_stage("send", number, mb.recording.microbatch, start)

    def receive_forward(self, mb: Microbatch, number: int, maker: int) -> Callable[[], None]:
        """Begins to receive values of a stage elsewhere; what it returns waits for them."""
        layout = mb.layout
        source = layout.stages[maker].rank
        values = layout.stages[number].takes[maker]
        arriving = self._receive(values, source, number, mb)

        def wait() -> None:
            mb.arrived[maker, number] = self._wait(arriving, number, mb)

        return wait

    def send_backward(self, mb: Microbatch, number: int, maker: int) -> None:
        """Gradients for the stage that made the values."""
        start = _core.timeline_now()
        to = mb.layout.stages[maker].rank
        for gradient in mb.returning.pop((number, maker), ()):
            self._transfers.send(gradient, to)
        _core.timeline_stage("send", number, mb.recording.microbatch, start)

    def receive_backward(self, mb: Microbatch, number: int, taker: int) -> Callable[[], None]:
        """Begins to receive gradients of a stage elsewhere."""
        layout = mb.layout
        source = layout.stages[taker].rank
        values = layout.gradients(number, taker)
        arriving = self._receive(values, source, number, mb)

        def wait() -> None:
            self._take_gradients(mb, number, taker, values, self._wait(arriving, number, mb))

        return wait

    def _receive(self, values: Sequence[int], source: int, number: int, mb: Microbatch) -> list[Arriving]:
        start = _core.timeline_now()
        arriving = [self._transfers.receive(mb.layout.values[value].meta, source) for value in values]
        _core.timeline_stage("receive", number, mb.recording.microbatch, start)
        return arriving

    def _wait(self, arriving: Sequence[Arriving], number: int, mb: Microbatch) -> list[torch.Tensor]:
        start = _core.timeline_now()
        tensors = [tensor.here() for tensor in arriving]
        _core.timeline_stage("wait", number, mb.recording.microbatch, start)
        return tensors

    def run(
        self,
        program: Sequence[tuple[str, int, int, int | None]],
        microbatches: Sequence[Microbatch],
        done: Callable[[int], None],
    ) -> None:
        """This rank's list of a program. ``done(stage)`` hears of each stage whose parameters' gradients are complete."""
        self._known.clear()
        with casts_are_kept(), self._modules.applied():
            self._run(program, microbatches, done)

    def _run(
        self,
        program: Sequence[tuple[str, int, int, int | None]],
        microbatches: Sequence[Microbatch],
        done: Callable[[int], None],
    ) -> None:
        receives = deque(
            (place, action)
            for place, action in enumerate(program)
            if action[0] in ("RF", "RB") and self._real(action, microbatches)
        )
        ahead = self._transfers.ahead(_AHEAD)
        waiting: deque[tuple[int, Callable[[], None]]] = deque()
        last = len(microbatches) - 1
        loads = offloading.Loads(self._offloader, program)
        for place, action in enumerate(program):
            while receives and (len(waiting) < ahead or receives[0][0] == place):
                at, (kind, number, index, peer) = receives.popleft()
                begin = self.receive_forward if kind == "RF" else self.receive_backward
                assert peer is not None
                waiting.append((at, begin(microbatches[index], number, peer)))
            kind, number, index, peer = action
            mb = microbatches[index]
            if kind in "FBIW":
                loads.begin(microbatches)
            if kind == "F":
                if not mb.layout.stages[number].early:
                    self.forward(mb, number, loads.are_soon(number, index))
            elif kind == "B":
                self.backward(mb, number)
                if index == last:
                    done(number)
            elif kind == "I":
                self.input_part(mb, number)
            elif kind == "W":
                self.weight_part(mb, number)
                if index == last:
                    done(number)
            elif waiting and waiting[0][0] == place:
                waiting.popleft()[1]()
            elif kind in ("SF", "SB") and self._real(action, microbatches):
                assert peer is not None
                (self.send_forward if kind == "SF" else self.send_backward)(mb, number, peer)

    def _real(self, action: tuple[str, int, int, int | None], microbatches: Sequence[Microbatch]) -> bool:
        """Whether there is something to send or to receive."""
        kind, number, index, peer = action
        layout = microbatches[index].layout
        assert peer is not None
        if kind == "SF":
            return not layout.stages[peer].early
        if kind == "RF":
            return not layout.stages[number].early
        return bool(layout.gradients(number, peer) if kind == "RB" else layout.gradients(peer, number))


def _run_backward(
    roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor], weights: Any, later: bool
) -> None:
    """A backward; the gradients of ``weights`` (`torch_ext/weights.h`) are computed beside it, or ``later``."""
    torch.autograd.backward(roots, gradients, inputs=weights.begin(later) if weights.size() else None)
    if later:
        weights.end()
