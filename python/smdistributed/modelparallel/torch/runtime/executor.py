"""Executes the stages of recorded microbatches: forwards, backwards and the transfers between stages.

- EXE-1: a stage's inputs are leaves of its own autograd graph, so its backward ends there. Their gradients go to the
  stages that produced them.
- EXE-2: gradients of a value are added in the order of the consumer stages, not in the order of their arrival.
- EXE-3: a stage owns the storages that its tasks write to (``TaskRunner``).
- EXE-4: autocast's copies of parameters serve all microbatches of a program. After a task that writes to parameters,
  they are made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smdistributed.modelparallel.torch.runtime import offloading
from smdistributed.modelparallel.torch.runtime.failures import explaining_changed_tensors
from smdistributed.modelparallel.torch.runtime.fallbacks import note_unsplit_backward
from smdistributed.modelparallel.torch.runtime.offloading import StageBoundary
from smdistributed.modelparallel.torch.runtime.program_run import Program, ProgramRun
from smdistributed.modelparallel.torch.runtime.stage_capture import CapturedStage, StageCapture
from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph
from smdistributed.modelparallel.torch.runtime.stage_timeline import StageTimeline
from smdistributed.modelparallel.torch.runtime.task_execution import casts_are_cached, without_cached_casts
from smdistributed.modelparallel.torch.runtime.task_runner import TaskRunner
from smdistributed.modelparallel.torch.runtime.transfers import PendingReceive, Transfers
from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState
from smdistributed.modelparallel.torch.tracing.recording import Recording

#: Number of receives on CPUs that are posted ahead of their use in the program.
_MAX_POSTED_RECEIVES = 4


class StageState:
    """The tensors of a stage between its forward and the end of its backward, for one microbatch."""

    __slots__ = ("captured", "consumers_done", "exports", "gradients", "leaves", "offloaded", "weights")

    def __init__(
        self,
        leaves: dict[int, torch.Tensor | StageBoundary],
        exports: dict[int, torch.Tensor],
        offloaded: offloading.Batch | None = None,
        captured: CapturedStage | None = None,
    ) -> None:
        self.leaves = leaves
        #: Its CUDA graphs, if it runs with them.
        self.captured = captured
        #: Whether its activations were moved to host memory.
        self.offloaded = offloaded
        #: Output values; once all consumers have them, only gradient edges at which the backward begins.
        self.exports: dict[int, torch.Tensor | GradientEdge | None] = dict(exports)
        #: Gradients of the exports, by value and consumer stage.
        self.gradients: dict[int, dict[int, torch.Tensor]] = {}
        #: The number of consumer stages that have their values.
        self.consumers_done = 0
        #: Weights whose gradients are computed apart from the rest of the backward; ``None`` before the search.
        self.weights: Any = None

    def tensor(self, value: int) -> torch.Tensor:
        """Return an exported tensor that some consumer has not received yet."""
        export = self.exports[value]
        assert isinstance(export, torch.Tensor), "a value is held until all consumers have it"
        return export

    def is_root(self, value: int) -> bool:
        """Return whether a backward can begin at an exported value."""
        if self.captured is not None:
            return value in self.captured.root_gradients
        export = self.exports[value]
        return export is not None and (not isinstance(export, torch.Tensor) or export.requires_grad)

    def find_weights(self) -> None:
        """Find the weights whose gradients can be computed separately, in the graph of the exports."""
        roots = [each for each in self.exports.values() if isinstance(each, torch.Tensor) and each.requires_grad]
        inputs = [leaf for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor)]
        self.weights = torch.classes.smd.WeightGradients(roots, inputs)


class Microbatch:
    """The tensors of one microbatch on this rank."""

    def __init__(self, recording: Recording, graph: StageGraph) -> None:
        self.recording, self.stage_graph = recording, graph
        self.arrived: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.stage_states: dict[int, StageState] = {}
        #: Gradients of stage inputs that are to be sent, by (consumer, producer).
        self.returning: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.results: dict[int, torch.Tensor] = {}

    @property
    def runs_in_turn(self) -> bool:
        """Return whether the next microbatch begins only after this one has ended."""
        return self.stage_graph.runs_in_turn or self.recording.retained.needs_earlier

    def keep_results(self, exports: Mapping[int, torch.Tensor | GradientEdge | None]) -> None:
        """Keep the values that the body returns."""
        for value in self.stage_graph.returned:
            tensor = exports.get(value)
            if isinstance(tensor, torch.Tensor):
                self.results[value] = tensor.detach() if self.recording.detach_outputs else tensor

    def computed(self, value: int) -> torch.Tensor | None:
        """Return the value if a stage on this rank computed it while the step was recorded; else ``None``."""
        for stage_state in self.stage_states.values():
            tensor = stage_state.exports.get(value)
            if isinstance(tensor, torch.Tensor):
                return tensor.detach()
        return None

    def mark_consumed(self, number: int) -> None:
        """Count one more consumer that has received its values; after the last one, the stage's outputs are freed."""
        stage, stage_state = self.stage_graph.stages[number], self.stage_states[number]
        stage_state.consumers_done += 1
        if stage_state.consumers_done < len(stage.outputs) or stage.early:
            return
        if not stage.has_backward:
            del self.stage_states[number]
            return
        for value, tensor in stage_state.exports.items():
            if value not in stage.backward_roots and isinstance(tensor, torch.Tensor):
                stage_state.exports[value] = get_gradient_edge(tensor) if tensor.requires_grad else None


class Executor:
    """Executes this rank's part of a program."""

    def __init__(
        self,
        rank: int,
        transfers: Transfers,
        parameters: Mapping[str, torch.Tensor],
        scale: float,
        modules: ModuleState,
        timeline: StageTimeline,
        early: bool = False,
        offloader: offloading.Offloader | None = None,
        capture: StageCapture | None = None,
    ) -> None:
        self.capture = capture
        self.tasks = TaskRunner(rank, parameters, modules, early)
        self._rank, self._transfers, self._parameters, self._scale = rank, transfers, parameters, scale
        self._modules, self._timeline, self._early, self._offloader = modules, timeline, early, offloader
        #: Stages that have run in this program.
        self._known: set[int] = set()

    # One method for each action. `run` calls them in the order of a program, and the recording for early stages.

    def forward(self, mb: Microbatch, number: int, backward_is_near: bool = False) -> None:
        """Run the forward of a stage whose inputs are here; ``backward_is_near`` prevents offloading (OFF-1)."""
        begin = self._timeline.begin()
        graph, stage = mb.stage_graph, mb.stage_graph.stages[number]
        if self.capture is not None and self._forward_captured(self.capture, mb, number):
            self._timeline.end(begin, "forward", number, mb.recording.microbatch, stage.inputs)
            return
        has_backward = stage.has_backward or self._early
        offloader = self._offloader if has_backward and not backward_is_near else None
        leaves: dict[int, torch.Tensor | StageBoundary] = {}
        env: dict[int, torch.Tensor] = {}
        for producer, values in stage.inputs.items():
            for value, tensor in zip(values, self._inputs_from(mb, producer, number), strict=True):
                home, wants_gradient = graph.values[value].home, graph.values[value].meta.requires_grad
                is_own = wants_gradient and value not in graph.without_graph
                if home is not None and not is_own and graph.stages[producer].rank == self._rank:
                    # Buffers, and parameters without gradient mode, change in place: they stay leaves of the graph.
                    # Stages that write to them run in the order of the body.
                    env[value] = self._parameters[home]
                    continue
                leaf = tensor.detach()
                wanted = has_backward and wants_gradient
                if wanted and offloader is not None:
                    leaves[value] = boundary = StageBoundary(leaf)
                    leaf = boundary.enter(leaf)
                elif wanted:
                    leaves[value] = leaf.requires_grad_()
                    leaf = without_cached_casts(leaf)
                env[value] = leaf
        retained = mb.recording.retained.by_value
        collecting = contextlib.nullcontext() if offloader is None else offloader.collecting()
        tasks = [mb.recording.tasks[each] for each in stage.tasks]
        with collecting as offloaded:
            self.tasks.run(graph, stage, tasks, env, retained, mb.recording.draws)
        for index, retained_tensor in retained.items():
            if retained_tensor.tensor is None and index in env:
                retained_tensor.tensor = env[index].detach()
        # For a stage that runs early, it is not known yet which values are needed.
        exports = env if self._early else {value: env[value] for value in stage.exports}
        if graph.without_graph:
            # Autograd treats these as leaves that are views, at which no backward can begin.
            exports = {
                value: tensor.detach() if value in graph.without_graph else tensor for value, tensor in exports.items()
            }
        if not has_backward:
            exports = {value: tensor.detach() for value, tensor in exports.items()}
        mb.keep_results(exports)
        if has_backward:
            if number not in self._known:
                # The casts of later microbatches use the same autograd nodes (EXE-4).
                self._known.add(number)
                if any(task.context.autocast for task in tasks):
                    torch.ops.smd.accumulate_casts([tensor for tensor in exports.values() if tensor.requires_grad])
            stage_state = mb.stage_states[number] = StageState(leaves, exports, offloaded)
            # For a stage that runs early, not all backward roots are known yet.
            if not self._early:
                stage_state.find_weights()
        elif stage.outputs:
            mb.stage_states[number] = StageState({}, exports)
        for producer in stage.inputs:
            if graph.stages[producer].rank == self._rank:
                mb.mark_consumed(producer)
        self._timeline.end(begin, "forward", number, mb.recording.microbatch, stage.inputs)

    def _inputs_from(self, mb: Microbatch, producer: int, number: int) -> list[torch.Tensor]:
        """Return the inputs that a stage gets from another one, in the order of ``Stage.inputs``."""
        graph = mb.stage_graph
        if graph.stages[producer].rank == self._rank:
            return [mb.stage_states[producer].tensor(value) for value in graph.stages[number].inputs[producer]]
        return mb.arrived.pop((producer, number))

    def _forward_captured(self, capture: StageCapture, mb: Microbatch, number: int) -> bool:
        """Run the forward of a stage by its CUDA graph; return whether it has one that fits."""
        taken = capture.take(mb, number)
        if taken is None:
            return False
        captured, replicated = taken
        graph, stage = mb.stage_graph, mb.stage_graph.stages[number]
        inputs: dict[int, torch.Tensor] = {}
        for producer, values in stage.inputs.items():
            inputs.update(zip(values, self._inputs_from(mb, producer, number), strict=True))
        exports = captured.forward(mb, inputs, replicated)
        draws = [draw for task in stage.tasks for draw in mb.recording.draws.get(task, ())]
        if draws:
            # The generator's state after the other draws of the stage is not known.
            draws[-1].end = draws[-1].generator.state()
        mb.keep_results(exports)
        mb.stage_states[number] = StageState({}, exports, captured=captured)
        for producer in stage.inputs:
            if graph.stages[producer].rank == self._rank:
                mb.mark_consumed(producer)
        return True

    def _backward_captured(self, mb: Microbatch, number: int, stage_state: StageState) -> None:
        """Run the backward of a stage, or its first part, by its CUDA graph."""
        assert stage_state.captured is not None
        found = stage_state.captured.backward(self._root_gradients(mb, number, stage_state))
        for producer in mb.stage_graph.stages[number].inputs:
            values = mb.stage_graph.gradients(producer, number)
            if values:
                self._return_gradients(mb, number, producer, values, [found[value] for value in values])

    def backward(self, mb: Microbatch, number: int) -> None:
        """Run the backward of a stage.

        Accumulate parameter gradients, and store the gradients of its inputs for the producers.
        """
        begin = self._timeline.begin()
        stage = mb.stage_graph.stages[number]
        if stage.has_backward:
            stage_state = mb.stage_states.pop(number)
            if stage_state.captured is not None:
                self._backward_captured(mb, number, stage_state)
                assert self.capture is not None
                self.capture.release(number, stage_state.captured)
            else:
                self._run_backward(mb, number, stage_state, later=False)
        self._timeline.end(begin, "backward", number, mb.recording.microbatch)

    def input_part(self, mb: Microbatch, number: int) -> None:
        """Run the first part of a backward: everything except the gradients of weights."""
        begin = self._timeline.begin()
        stage = mb.stage_graph.stages[number]
        if stage.has_backward:
            stage_state = mb.stage_states[number]
            if stage_state.captured is not None:
                self._backward_captured(mb, number, stage_state)
                unsplit = stage_state.captured.unsplit_node
            else:
                self._run_backward(mb, number, stage_state, later=True)
                unsplit = stage_state.weights.unsplit_node()
            if unsplit:
                note_unsplit_backward(unsplit)
            stage_state.leaves, stage_state.exports = {}, {}
        self._timeline.end(begin, "input", number, mb.recording.microbatch)

    def weight_part(self, mb: Microbatch, number: int) -> None:
        """Run the second part of a backward: the gradients of weights."""
        begin = self._timeline.begin()
        if mb.stage_graph.stages[number].has_backward:
            stage_state = mb.stage_states.pop(number)
            if stage_state.captured is not None:
                stage_state.captured.weight_part()
                assert self.capture is not None
                self.capture.release(number, stage_state.captured)
            else:
                with explaining_changed_tensors(mb.recording.microbatch):
                    stage_state.weights.run()
        self._timeline.end(begin, "weight", number, mb.recording.microbatch)

    def _run_backward(self, mb: Microbatch, number: int, stage_state: StageState, later: bool) -> None:
        """Run autograd for a stage; gradients of weights are computed in parallel, or ``later`` (WGT-1 to WGT-5)."""
        gradients = self._root_gradients(mb, number, stage_state)
        if gradients:
            weights = stage_state.weights
            # PyTorch's stubs require one type for all.
            roots: Any = [stage_state.exports[value] for value in gradients]
            with (
                self._modules.in_backward(mb.recording.backward_modules),
                explaining_changed_tensors(mb.recording.microbatch),
            ):
                inputs = weights.begin(later) if weights.size() else None
                torch.autograd.backward(roots, list(gradients.values()), inputs=inputs)
                if later:
                    weights.end()
        self._store_input_gradients(mb, number, stage_state.leaves)

    def _root_gradients(self, mb: Microbatch, number: int, stage_state: StageState) -> dict[int, torch.Tensor]:
        """Return the gradients of the exported values at which a backward begins."""
        stage = mb.stage_graph.stages[number]
        gradients: dict[int, torch.Tensor] = {}
        root_gradients: dict[int, torch.Tensor] = {}
        for called, gradient in mb.recording.backward_roots:
            if called.index in stage.backward_roots:
                tensor = stage_state.tensor(called.index)
                gradient = torch.ones_like(tensor) if gradient is None else gradient.to(tensor)
                gradient = gradient * self._scale if self._scale != 1.0 else gradient
                before = root_gradients.get(called.index)
                root_gradients[called.index] = gradient if before is None else before + gradient
        for value in stage.exports:
            if not stage_state.is_root(value):
                continue
            # In the order of the consumers (EXE-2).
            parts = [gradient for _, gradient in sorted(stage_state.gradients.get(value, {}).items())]
            if value in root_gradients:
                parts.append(root_gradients[value])
            if not parts:
                continue
            gradient = parts[0]
            for part in parts[1:]:
                gradient = gradient + part
            gradients[value] = gradient
        return gradients

    def _store_input_gradients(
        self, mb: Microbatch, number: int, leaves: Mapping[int, torch.Tensor | StageBoundary]
    ) -> None:
        graph = mb.stage_graph
        for producer in graph.stages[number].inputs:
            values = graph.gradients(producer, number)
            if not values:
                continue
            gradients = []
            for value in values:
                leaf = leaves[value]
                if leaf.grad is None:
                    gradients.append(leaf.zeros() if isinstance(leaf, StageBoundary) else torch.zeros_like(leaf))
                else:
                    # A first gradient is stored without a copy and may share memory with a parameter's `.grad`, to
                    # which later microbatches add in place.
                    gradients.append(leaf.grad.clone() if torch.ops.smd.shares_memory(leaf.grad) else leaf.grad)
            self._return_gradients(mb, number, producer, values, gradients)

    def _return_gradients(
        self, mb: Microbatch, number: int, producer: int, values: Sequence[int], gradients: list[torch.Tensor]
    ) -> None:
        """Store the gradients of a stage's inputs for the stage that produced them."""
        if mb.stage_graph.stages[producer].rank == self._rank:
            self._add_output_gradients(mb, producer, number, values, gradients)
        else:
            mb.returning[number, producer] = gradients

    def _add_output_gradients(
        self, mb: Microbatch, producer: int, consumer: int, values: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            mb.stage_states[producer].gradients.setdefault(value, {})[consumer] = gradient

    def send_forward(self, mb: Microbatch, number: int, consumer: int) -> None:
        """Send values to a consumer stage on another rank."""
        begin = self._timeline.begin()
        stage_state, to = mb.stage_states[number], mb.stage_graph.stages[consumer].rank
        for value in mb.stage_graph.stages[number].outputs[consumer]:
            self._transfers.send(stage_state.tensor(value), to)
        mb.mark_consumed(number)
        self._timeline.end(begin, "send", number, mb.recording.microbatch)

    def receive_forward(self, mb: Microbatch, number: int, producer: int) -> Callable[[], None]:
        """Post the receives of values from a producer stage on another rank; return a function that waits for them."""
        graph = mb.stage_graph
        source = graph.stages[producer].rank
        values = graph.stages[number].inputs[producer]
        pending = self._receive(values, source, number, mb)

        def wait() -> None:
            mb.arrived[producer, number] = self._wait(pending, number, mb)

        return wait

    def send_backward(self, mb: Microbatch, number: int, producer: int) -> None:
        """Send gradients to the stage that computed the values."""
        begin = self._timeline.begin()
        to = mb.stage_graph.stages[producer].rank
        for gradient in mb.returning.pop((number, producer), ()):
            self._transfers.send(gradient, to)
        self._timeline.end(begin, "send", number, mb.recording.microbatch)

    def receive_backward(self, mb: Microbatch, number: int, consumer: int) -> Callable[[], None]:
        """Post the receives of gradients from a consumer stage; return a function that waits for them."""
        graph = mb.stage_graph
        source = graph.stages[consumer].rank
        values = graph.gradients(number, consumer)
        pending = self._receive(values, source, number, mb)

        def wait() -> None:
            self._add_output_gradients(mb, number, consumer, values, self._wait(pending, number, mb))

        return wait

    def _receive(self, values: Sequence[int], source: int, number: int, mb: Microbatch) -> list[PendingReceive]:
        begin = self._timeline.begin()
        pending = [self._transfers.receive(mb.stage_graph.values[value].meta, source) for value in values]
        self._timeline.end(begin, "receive", number, mb.recording.microbatch)
        return pending

    def _wait(self, pending: Sequence[PendingReceive], number: int, mb: Microbatch) -> list[torch.Tensor]:
        begin = self._timeline.begin()
        tensors = [tensor.wait() for tensor in pending]
        self._timeline.end(begin, "wait", number, mb.recording.microbatch)
        return tensors

    def begin(
        self,
        program: Program,
        microbatches: Sequence[Microbatch],
        total: int,
        on_stage_done: Callable[[int, Microbatch], None],
    ) -> ProgramRun:
        """Begin this rank's program for ``total`` microbatches, which may be added to ``microbatches`` later.

        ``on_stage_done`` is called when the parameter gradients of a stage are complete.
        """
        self._known.clear()
        posted = self._transfers.max_posted_receives(_MAX_POSTED_RECEIVES)
        return ProgramRun(self, program, microbatches, total, posted, self._offloader, on_stage_done)

    def run(
        self,
        program: Program,
        microbatches: Sequence[Microbatch],
        on_stage_done: Callable[[int, Microbatch], None],
    ) -> None:
        """Run this rank's program.

        Call ``on_stage_done`` when the parameter gradients of a stage are complete.
        """
        with casts_are_cached(), self._modules.applied():
            self.begin(program, microbatches, len(microbatches), on_stage_done).advance(lambda index: True)
