"""The pipeline of a partitioned model: recorded steps are compared between ranks, planned and executed."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import CLASSES, SMPMismatchError, SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import communication
from smdistributed.modelparallel.torch.groups import TorchGroups
from smdistributed.modelparallel.torch.partitioning.placement import Placement, own_tensors
from smdistributed.modelparallel.torch.runtime.executor import Executor, Microbatch
from smdistributed.modelparallel.torch.runtime.failures import reporting_failures
from smdistributed.modelparallel.torch.runtime.fallbacks import Fallbacks, script_level
from smdistributed.modelparallel.torch.runtime.offloading import Offloader
from smdistributed.modelparallel.torch.runtime.overlapped_run import Expectation, OverlappedRun, obstacle
from smdistributed.modelparallel.torch.runtime.program_run import Program
from smdistributed.modelparallel.torch.runtime.rng import RngState
from smdistributed.modelparallel.torch.runtime.stage_capture import StageCapture
from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph
from smdistributed.modelparallel.torch.runtime.stage_timeline import StageTimeline
from smdistributed.modelparallel.torch.runtime.task_execution import modes_of_the_body_left
from smdistributed.modelparallel.torch.runtime.transfers import Transfers
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing import task_order
from smdistributed.modelparallel.torch.tracing.attributes.attribute_views import AttributeViews
from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState
from smdistributed.modelparallel.torch.tracing.constants import Constants
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec, OutputSpecs
from smdistributed.modelparallel.torch.tracing.recording import Recording, active
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter, TensorMeta
from smdistributed.modelparallel.torch.tracing.replay import Call
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages
from smdistributed.modelparallel.torch.tracing.state_order import refuse_parameter_writes
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value, digest_of

#: Largest number of cached plans and digests.
_LIMIT = 1 << 12
#: Calls of a step function in a row with unexpected microbatches, after which a warning says that it has no graphs.
_MISSES = 3


class Pipeline:
    """Records, compares, plans and executes the steps of a partitioned model.

    Attributes:
        output_specs: The output specs of calls, by their signatures.
        located: The values of parameters and buffers, by the ids of their tensors on this rank.
        version: A number that changes whenever a parameter begins or stops to require a gradient.
    """

    def __init__(
        self,
        root: nn.Module,
        placement: Placement,
        groups: TorchGroups,
        device: torch.device,
        schedule: str,
        active_microbatches: int | None,
        memory_bytes: int | None,
        offloader: Offloader | None,
        cuda_graphs: bool,
        recomputes: bool,
    ) -> None:
        assert groups.pp_group is not None, "a pipeline has several ranks"
        self.root, self.placement = root, placement
        self.rank, self.size = groups.rank_in("pp"), len(groups.members["pp"])
        self._schedule, self._bounds = schedule, (active_microbatches, memory_bytes)
        self.output_specs = OutputSpecs()
        self.constants = Constants()
        self.stale_storages = StaleStorages()
        #: Attributes that share memory with parameters or buffers.
        self.attribute_views = AttributeViews(placement, self.rank, self.stale_storages)
        #: Attributes of the modules that run in tasks.
        self.module_state = self._state_of_modules(root)
        #: Synchronous calls.
        self.fallbacks = Fallbacks()
        self._device, self._offloader = device, offloader
        has_graphs = cuda_graphs and device.type == "cuda"
        self._capture = StageCapture(self.module_state, recomputes) if has_graphs else None
        if cuda_graphs and self._capture is None:
            warn_once(f"`cuda_graphs` has no effect on the device {device.type}")
        #: Step functions that were called with a backward; those that are not overlapped, of which the user was told.
        self._called: weakref.WeakSet[Any] = weakref.WeakSet()
        self._not_overlapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.transfers = Transfers(groups.pp_group, groups.members["pp"], self.rank, device)
        self.timeline = StageTimeline(device)
        self.parameters: dict[str, torch.Tensor] = {}
        self.located: dict[int, Value] = {}
        self.paths = {id(module): path for path, module in root.named_modules()}
        #: References to the modules, so that the ids of removed ones are not reused.
        self._initial_modules = list(root.modules())
        #: Ids of modules and of their parameters and buffers, as of the last step.
        self._contents: list[list[int]] = []
        self.version: int = 0
        #: Parameters and buffers to which calls or the bodies of steps write.
        self.written_state: set[str] = set()
        #: Classes that define `__call__`.
        self.callers = {nn.Module}
        for module in root.modules():
            kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
            self.callers.update(kind for kind in kinds if "__call__" in vars(kind))
        #: Calls of the last microbatch of each step function.
        self.calls: weakref.WeakKeyDictionary[Any, list[Call]] = weakref.WeakKeyDictionary()
        self._seen: list[tuple[dict[str, Any], str, torch.Tensor, TensorMeta]] = []
        #: The expectations of step functions; and the step functions whose microbatches depend on each other.
        self._expectations: weakref.WeakKeyDictionary[Any, Expectation] = weakref.WeakKeyDictionary()
        self._never_overlapped: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The execution during the recording, while it runs.
        self.overlapped: OverlappedRun | None = None
        self._digests: dict[Any, int] = {}
        self._plans: dict[Any, Program] = {}
        self._stage_graphs: dict[Any, StageGraph] = {}
        #: For recordings that were reordered to match the first rank, by their digests: the order, and the new
        #: digest.
        self._orders: dict[Any, list[tuple[list[int], int]]] = {}
        #: The same for each recording, by its digest before it was reordered.
        self._order_of: dict[int, tuple[list[int], int]] = {}
        #: Calls of a step function in a row in which no microbatch has matched the expectation.
        self._misses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: Values of parameters whose `requires_grad` the body has changed, by id and `requires_grad`.
        self._relocated: dict[tuple[int, bool], Value] = {}
        self._unknown: Any = None
        #: Operations that read values of replicated tensors (REC-7), and whether they accept integers instead.
        self.number_readers: dict[Any, bool] = {}

    def _state_of_modules(self, root: nn.Module) -> ModuleState:
        """Return the attributes of all modules that are on one partition with their submodules."""
        found: dict[int, tuple[str, nn.Module]] = {}
        ranks: dict[int, int] = {}
        for path, module in root.named_modules():
            if id(module) in self.placement.whole:
                for below, part in module.named_modules(prefix=path):
                    found.setdefault(id(part), (below, part))
                    ranks.setdefault(id(part), self.placement.whole[id(module)])
        paths = {identity: path for identity, (path, _) in found.items()}
        others = [module for module in root.modules() if id(module) not in found]
        return ModuleState([part for _, part in found.values()], paths, ranks, others, self.attribute_views)

    def relocate(self, parameter: torch.Tensor) -> Value:
        """Return the value of a parameter whose ``requires_grad`` the body has changed."""
        known = self.located[id(parameter)]
        key = (id(parameter), parameter.requires_grad)
        value = self._relocated.get(key)
        if value is None:
            self._relocated[id(parameter), known.meta.requires_grad] = known
            meta = known.meta._replace(requires_grad=parameter.requires_grad)
            value = self._relocated[key] = Value(-1, known.rank, 0, meta, known.parameter, known.owner)
        self.located[id(parameter)] = value
        return value

    @property
    def rng_state(self) -> RngState:
        """The generators from which the body and the tasks draw."""
        return state.require_model().rng_state

    def refresh(self) -> None:
        """Update the values of parameters and buffers before a step."""
        self.stale_storages.forget_freed()
        with reporting_failures():
            self.attribute_views.check_sent()
        with torch._C.DisableTorchFunctionSubclass():
            contents = [
                [id(module), *map(id, module._parameters.values()), *map(id, module._buffers.values())]
                for module in self.root.modules()
            ]
            if contents == self._contents and all(_is_as_it_was(*each) for each in self._seen):
                return
        for path, module in self.root.named_modules():
            if id(module) not in self.paths:
                raise SMPUsageError(
                    f"the module `{path}`, a {type(module).__name__}, was added after the model was "
                    "partitioned: it is on "
                    "no partition"
                )
        self._contents = contents
        self._relocated.clear()
        located: dict[int, Value] = {}
        flags = []
        self._seen.clear()
        owners: dict[int, set[int]] = {}
        absent: dict[int, MetaParameter] = {}
        self.calls.clear()
        self._expectations.clear()
        for path, module in self.root.named_modules():
            rank = self.placement.of(module)
            for table, name, tensor in own_tensors(module):
                full = f"{path}.{name}" if path else name
                if rank != self.rank and not isinstance(tensor, MetaParameter):
                    # The script has replaced it since the last step. This rank would not see it changed.
                    if id(tensor) not in absent:
                        absent[id(tensor)] = MetaParameter(tensor, full, rank, self._device)
                    tensor = table[name] = absent[id(tensor)]
                self._seen.append((table, name, tensor, TensorMeta.of(tensor)))
                flags.append(tensor.requires_grad)
                owners.setdefault(id(tensor), set()).add(id(module))
                value = located.get(id(tensor))
                if value is None:
                    known = self.located.get(id(tensor))
                    meta = TensorMeta.of(tensor)
                    if known is None or known.meta != meta:
                        known = Value(-1, rank, 0, meta, full, id(module))
                    value = known
                    located[id(tensor)] = value
                self.parameters[value.parameter or full] = tensor
        if absent:
            self._contents = []
        self.attribute_views.locate(located, owners)
        self.located = located
        self.module_state.shared.set_owners(owners)
        self.version = hash(tuple(flags))

    # Methods that recordings call.

    def digest(self, key: Any, inputs: Any) -> int:
        """Return a digest of a task that is equal on all ranks."""
        known = self._digests.get((key, inputs))
        if known is None:
            if len(self._digests) > _LIMIT * 16:
                self._digests.clear()
            known = self._digests[key, inputs] = digest_of((key, inputs))
        return known

    def depends_on_numbers(self, module: nn.Module) -> bool:
        """Return whether the structure of a module's result may depend on the values of its inputs."""
        module = getattr(module, "_orig_mod", module)
        return not any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())

    def run_unknown(self, recording: Recording, task: Task) -> OutputSpec:
        """Run the tasks recorded so far, to find the output spec of the last one."""
        self._flush(recording)
        spec = None
        if task.rank == self.rank:
            draws = recording.draws.get(recording.tasks.index(task), ())
            drawn = frozenset(draw.generator.kind for draw in draws if draw.has_drawn)
            spec = dataclasses.replace(self._unknown[0], draws=drawn)
        active.recording = None
        try:
            owner_spec = communication.allgather(spec, CommGroup.PP_GROUP)[task.rank]
        finally:
            active.recording = recording
        # The device's index may differ on this rank.
        own = self._device
        metas = [meta._replace(device=own) if meta.device.type == own.type else meta for meta in owner_spec.metas]
        return dataclasses.replace(owner_spec, metas=tuple(metas))

    def adopt(self, recording: Recording, task: Task) -> None:
        """Add the outputs of such a task to the recording as values."""
        mb = self._microbatch(recording)
        number = mb.stage_graph.set_outputs(recording.tasks.index(task), task.outputs)
        if task.rank == self.rank:
            _, tensors = self._unknown
            exports = mb.stage_states[number].exports
            for value, tensor in zip(task.outputs, tensors, strict=True):
                exports[value.index] = tensor.detach() if value.index in mb.stage_graph.without_graph else tensor
            self._unknown = None

    def fetch(self, recording: Recording, value: Value) -> torch.Tensor:
        """Return the tensor of a value on every rank."""
        if value.parameter is not None:
            if any(each.order.changes_state for each in (*recording.earlier, recording)):
                # Tasks that write to it may not have run yet.
                self._flush(recording)
            tensor = self.parameters[value.parameter] if value.rank == self.rank else None
            return self._broadcast(tensor, value)
        mb = self._flush(recording)
        held: torch.Tensor | GradientEdge | None = None
        if value.rank == self.rank:
            held = mb.stage_states[mb.stage_graph.stage_of(value.index)].exports[value.index]
        assert not isinstance(held, GradientEdge), "a value is held until all consumers have it"
        return self._broadcast(held, value)

    def from_first_rank(self, recording: Recording, value: Any) -> Any:
        """Return the value that the body has on the pipeline's first rank."""
        active.recording = None
        try:
            return communication.allgather(value, CommGroup.PP_GROUP)[0]
        finally:
            active.recording = recording

    def _broadcast(self, tensor: torch.Tensor | None, value: Value) -> torch.Tensor:
        meta = value.meta
        with reporting_failures():
            whole = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
            if tensor is not None:
                whole.copy_(tensor.detach())
            self.transfers.broadcast(whole, value.rank)
        return whole

    def _flush(self, recording: Recording) -> Microbatch:
        """Run the tasks that a microbatch has recorded and that have not run.

        Earlier microbatches whose state or tensors it may read run first.
        """
        if self.overlapped is not None:
            self.overlapped.complete()
        if recording.microbatch and recording.copy_on_write.has_backward:
            before = (task for each in recording.earlier for task in each.tasks)
            refuse_parameter_writes(recording.tasks[recording.num_executed :], before)
        if recording.retained.needs_earlier or any(
            each.order.changes_state for each in (*recording.earlier, recording)
        ):
            for earlier in recording.earlier:
                if earlier.num_executed < len(earlier.tasks):
                    self._flush(earlier)
        active.recording = None
        try:
            self.agree([recording], recording.microbatch + 1)
            mb = self._microbatch(recording)
            if recording.num_executed < len(recording.tasks):
                with modes_of_the_body_left(), self.module_state.hidden(), self.module_state.applied():
                    self._run_early(mb)
            return mb
        finally:
            active.recording = recording

    def _microbatch(self, recording: Recording) -> Microbatch:
        mb = recording.executed
        if mb is None:
            mb = recording.executed = Microbatch(recording, StageGraph())
        return mb

    def _run_early(self, mb: Microbatch) -> None:
        recording = mb.recording
        graph = mb.stage_graph
        start = _core.timeline_now()
        executor = self.executor(1.0, early=True)
        new = graph.extend(recording.tasks, recording.num_executed, early=True)
        with reporting_failures():
            self.transfers.open(graph.edges(new))
            for number in new:
                stage = graph.stages[number]
                for producer in stage.inputs:
                    if graph.stages[producer].rank == stage.rank:
                        continue
                    if graph.stages[producer].rank == self.rank:
                        executor.send_forward(mb, producer, number)
                    elif stage.rank == self.rank:
                        executor.receive_forward(mb, number, producer)()
                if stage.rank == self.rank:
                    with self.rng_state.own():
                        executor.forward(mb, number)
        self._unknown = executor.tasks.unknown
        self.transfers.finish()
        if new:
            _core.timeline_stage("synchronous", new[-1], recording.microbatch, start)
        recording.close_level()

    # Methods of a step.

    def expectation(self, step: Any) -> Expectation | None:
        """Return the expected recording of a step function's microbatches, from its last call (OVL-1)."""
        self.refresh()
        return self._expectations.get(step)

    def begin_overlapped(self, expectation: Expectation, scale: float) -> OverlappedRun:
        """Begin to execute microbatches while later ones are recorded."""
        self.overlapped = OverlappedRun(self, expectation, self.executor(scale, capture=self._capture))
        return self.overlapped

    def expect_again(self, step: Any, microbatches: Sequence[Microbatch], overlapped: OverlappedRun | None) -> None:
        """Store the recording of a call of a step function as the expectation for the next one."""
        self._expectations.pop(step, None)
        if overlapped is not None and overlapped.was_interrupted:
            # The next call would also be interrupted, after each microbatch.
            self._never_overlapped.add(step)
        first = microbatches[0]
        if self._offloader is not None:
            reason: str | None = "`offload_activations` is set"
        elif step in self._never_overlapped:
            reason = "its body reads values, or writes to tensors that tasks have taken"
        else:
            reason = obstacle(microbatches)
        has_backward = bool(first.recording.backward_roots)
        # In its first call, a step may run calls whose results are not known yet one after the other.
        is_first = step not in self._called
        self._called.add(step)
        if reason is not None and not is_first:
            self._note_not_overlapped(step, reason, microbatches)
        if overlapped is not None:
            self._misses[step] = 0 if overlapped.num_matched else self._misses.get(step, 0) + 1
            if self._misses[step] >= _MISSES:
                changed = "its microbatches make other calls than in the step before"
                self._note_not_overlapped(step, changed, microbatches)
        if reason is None:
            key = (first.recording.digest, tuple(first.stage_graph.returned), len(microbatches), has_backward)
            program = self._plans.get(key)
            if program is not None:
                self._expectations[step] = Expectation(key[0], key[1], len(microbatches), first.stage_graph, program)

    def _note_not_overlapped(self, step: Any, reason: str, microbatches: Sequence[Microbatch]) -> None:
        """Count a step that was recorded before its first microbatch ran; the first time, warn with the reason."""
        are_unlike = any(mb.stage_graph is not microbatches[0].stage_graph for mb in microbatches)
        if len(microbatches) > 1:
            _core.note_fallback("unlike_microbatches" if are_unlike else "recorded_before_run")
        is_uncaptured = self._capture is not None and bool(microbatches[0].recording.backward_roots)
        if is_uncaptured:
            _core.note_fallback("without_cuda_graph")
        if step in self._not_overlapped:
            return
        self._not_overlapped.add(step)
        if is_uncaptured:
            warnings.warn(f"`cuda_graphs` has no effect on this step: {reason}", stacklevel=script_level())
        elif are_unlike:
            text = "microbatches of this step make different calls, so they go through the pipeline one after the other"
            warnings.warn(text, stacklevel=script_level())
        elif len(microbatches) > 1 and step not in self._never_overlapped and not microbatches[0].runs_in_turn:
            # Other warnings name the reason of the excluded steps.
            text = f"this step is recorded completely before its first microbatch runs, and devices wait: {reason}"
            warnings.warn(text, stacklevel=script_level())

    def executor(self, scale: float, early: bool = False, capture: StageCapture | None = None) -> Executor:
        """Return an executor of this rank's part."""
        return Executor(
            self.rank, self.transfers, self.parameters, scale, self.module_state, self.timeline, early,
            self._offloader, capture,
        )  # fmt: skip

    def agree(self, recordings: Sequence[Recording], phase: int) -> None:
        """Compare the recordings of all ranks.

        Ranks with the same calls in different orders adopt the order of the first rank (SAME-1).

        Raises:
            SMPMismatchError: The recordings differ; raised on all ranks, with the first task that differs.
        """
        key = (phase, tuple(recording.digest for recording in recordings))
        known = self._orders.get(key)
        if known is not None:
            for recording, (order, digest) in zip(recordings, known, strict=True):
                self._reorder(recording, order, digest)
        if self._are_alike(recordings, phase):
            return
        contents = [task_order.content_digests(self, recording) for recording in recordings]
        gathered = communication.allgather((phase, contents), CommGroup.PP_GROUP)
        is_reordered = False
        if all(other[0] == phase and len(other[1]) == len(contents) for other in gathered):
            found = [
                [task_order.places(own, first) for own, first in zip(other[1], gathered[0][1], strict=True)]
                for other in gathered
            ]
            is_reordered = not any(None in orders for orders in found)
            if is_reordered:
                orders = []
                for recording, places in zip(recordings, found[self.rank], strict=True):
                    assert places is not None, "checked above"
                    self._reorder(recording, places)
                    orders.append((places, recording.digest))
                if self._are_alike(recordings, phase):
                    if len(self._orders) > _LIMIT:
                        self._orders.clear()
                        self._order_of.clear()
                    if known is None:
                        self._orders[key] = orders
                    return
        texts = [[str(task) for task in recording.tasks] + [_ending(recording)] for recording in recordings]
        story = communication.allgather((phase, texts), CommGroup.PP_GROUP)
        text = _difference(story)
        if not is_reordered and all(_same_calls(other[1], gathered[0][1]) for other in gathered):
            text += (
                ". The ranks make the same calls in different orders, and some of these draw random numbers or "
                "change something: Python orders sets of strings differently in each process, so iterate over a "
                "list, or over `sorted(..)`"
            )
        raise SMPMismatchError(text)

    def reorder_as_before(self, recording: Recording, digest: int) -> None:
        """Put a complete recording into the order in which an equal one matched the first rank's (SAME-1).

        Only if it has ``digest`` then: others would renumber values of microbatches that run at present.
        """
        known = self._order_of.get(recording.digest)
        if known is not None and known[1] == digest:
            self._reorder(recording, *known)

    def _reorder(self, recording: Recording, places: list[int], digest: int | None = None) -> None:
        task_order.reorder(recording, places)
        recorded = recording.digest
        recording.digest = task_order.digest(self, recording) if digest is None else digest
        if recording.executed is not None:
            # A part of its tasks, which does not overlap.
            return
        if recording.reordered is not None:
            recorded, before = recording.reordered
            places = [before[place] for place in places]
        recording.reordered = recorded, places
        self._order_of[recorded] = places, recording.digest

    def _are_alike(self, recordings: Sequence[Recording], phase: int) -> bool:
        """Return whether all ranks have equal recordings."""
        counts = sum(len(recording.tasks) for recording in recordings)
        digest = 0
        for recording in recordings:
            digest = (digest * 31 + recording.digest) & 0x7FFF_FFFF_FFFF_FFFF
        gathered = self.transfers.compare([phase, counts, digest])
        return all(other == gathered[0] for other in gathered)

    def run(
        self,
        recordings: Sequence[Recording],
        returned: Sequence[Sequence[Value]],
        scale: float,
        on_stage_done: Callable[[int, Microbatch], None],
        overlapped: OverlappedRun | None = None,
    ) -> list[Microbatch]:
        """Execute recorded microbatches, after those that ``overlapped`` executes.

        Call ``on_stage_done`` when the parameter gradients of a stage are complete.
        """
        microbatches: list[Microbatch] = []
        if overlapped is not None:
            self.overlapped = None
            microbatches = overlapped.finish(on_stage_done)
        begin = len(microbatches)
        if begin < len(recordings):
            self.agree(recordings[begin:], 0)
            for recording in recordings[begin:]:
                recording.retained.keep_living()
            microbatches += [
                self._build_stages(recording, values)
                for recording, values in zip(recordings[begin:], returned[begin:], strict=True)
            ]
        while begin < len(microbatches):
            # Equal microbatches go through the pipeline together, unless each one depends on state that the previous
            # one changes.
            end = begin + 1
            in_turn = microbatches[begin].runs_in_turn
            alike = (microbatches[begin].recording.digest, microbatches[begin].stage_graph.returned)
            while (
                end < len(microbatches)
                and not in_turn
                and alike
                == (
                    microbatches[end].recording.digest,
                    microbatches[end].stage_graph.returned,
                )
            ):
                end += 1
            part = microbatches[begin:end]
            is_last = end == len(microbatches)
            program = self._plan(part)
            notify = on_stage_done if is_last else _ignore
            with reporting_failures():
                self.executor(scale).run(program, part, notify)
            begin = end
        self.transfers.finish()
        return microbatches

    def _build_stages(self, recording: Recording, returned: Sequence[Value]) -> Microbatch:
        roots = [value.index for value, _ in recording.backward_roots]
        results = sorted({value.index for value in returned})
        mb = recording.executed
        if mb is None:
            key = (recording.digest, tuple(results))
            graph = self._stage_graphs.get(key)
            if graph is None:
                if len(self._stage_graphs) > _LIMIT:
                    self._stage_graphs.clear()
                graph = self._stage_graphs[key] = StageGraph()
                graph.extend(recording.tasks, 0, early=False)
                graph.finish(roots, results)
            return Microbatch(recording, graph)
        mb.stage_graph.extend(recording.tasks, recording.num_executed, early=False)
        mb.stage_graph.finish(roots, results)
        for number, stage_state in mb.stage_states.items():
            # Now the values that are needed after the forwards are known.
            stage = mb.stage_graph.stages[number]
            stage_state.exports = {value: stage_state.exports[value] for value in stage.exports}
            mb.keep_results(stage_state.exports)
            if stage.has_backward:
                stage_state.find_weights()
        return mb

    def _plan(self, part: Sequence[Microbatch]) -> Program:
        recording = part[0].recording
        has_backward = bool(recording.backward_roots)
        key = (recording.digest, tuple(part[0].stage_graph.returned), len(part), has_backward)
        program = self._plans.get(key)
        if program is None:
            if len(self._plans) > _LIMIT:
                self._plans.clear()
            graph = part[0].stage_graph
            schedule = self._schedule if has_backward else "_only_forward"
            # Costs may differ between ranks, because attributes of modules have their tensors on one partition only.
            # The programs of all ranks therefore come from the first rank's costs: sends and receives match.
            with errors.translated(CLASSES):
                programs = self.transfers.programs_of_first_rank(
                    lambda rank: graph.plan(rank, self.size, len(part), schedule, *self._bounds)
                )
            program = self._plans[key] = Program.of(self.rank, programs, len(part))
            with reporting_failures():
                self.transfers.open(graph.edges(range(len(graph.stages))))
        return program

    def results(self, microbatches: Sequence[Microbatch], detach: bool) -> list[dict[int, torch.Tensor]]:
        """Return the tensors that the body returns, for every microbatch, on every rank.

        Each rank sends all of its tensors in one message.
        """
        results: list[dict[int, torch.Tensor]] = [{} for _ in microbatches]
        wanted: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, int, TensorMeta]]] = {}
        for place, mb in enumerate(microbatches):
            for index in mb.stage_graph.returned:
                value = mb.stage_graph.values[index]
                meta = value.meta
                wanted.setdefault((value.rank, meta.dtype, meta.device), []).append((place, index, meta))
        # Sorted in the same order on all ranks; the indices of devices differ.
        for rank, dtype, device in sorted(wanted, key=lambda key: (key[0], str(key[1]), key[2].type)):
            entries = wanted[rank, dtype, device]
            sizes = [torch.Size(meta.shape).numel() for _, _, meta in entries]
            whole = torch.empty(sum(sizes), dtype=dtype, device=device)
            parts = whole.split(sizes)
            if rank == self.rank:
                for (place, index, _), part in zip(entries, parts, strict=True):
                    part.copy_(microbatches[place].results[index].detach().reshape(-1))
            self.transfers.broadcast(whole, rank)
            for (place, index, meta), part in zip(entries, parts, strict=True):
                tensor = part.view(meta.shape)
                if rank == self.rank and not detach:
                    tensor = microbatches[place].results[index]
                results[place][index] = tensor
        return results


def _is_as_it_was(table: dict[str, Any], name: str, tensor: torch.Tensor, meta: TensorMeta) -> bool:
    return (
        name in table
        and table[name] is tensor
        and tensor.requires_grad is meta.requires_grad
        and tensor.dtype is meta.dtype
        and tensor.shape == meta.shape
    )


def _ignore(stage: int, last: Microbatch) -> None:
    """Ignore a completed stage: gradients are not complete before the last microbatches of the step."""


def _ending(recording: Recording) -> str:
    if not recording.backward_roots:
        return "no backward"
    return "backward of " + ", ".join(f"%{value.index}: {value.meta}" for value, _ in recording.backward_roots)


def _difference(story: Sequence[tuple[int, list[list[str]]]]) -> str:
    """Describe the first place in which the ranks differ."""
    first = story[0]
    for rank, other in enumerate(story):
        if other == first:
            continue
        for microbatch, (ours, theirs) in enumerate(zip(first[1], other[1], strict=False)):
            for place in range(max(len(ours), len(theirs))):
                mine = ours[place] if place < len(ours) else "nothing more"
                yours = theirs[place] if place < len(theirs) else "nothing more"
                if mine != yours:
                    return (
                        f"the ranks of the pipeline run different steps: task {place} of microbatch {microbatch} is "
                        f"{mine} on partition 0 and {yours} on partition {rank}"
                    )
        if len(first[1]) != len(other[1]) or first[0] != other[0]:
            return (
                f"the ranks of the pipeline run different steps: partition 0 is {_phase(first)} and partition {rank} "
                f"is {_phase(other)}"
            )
    return "the ranks of the pipeline run different steps: their tasks have the same names and different arguments"


def _same_calls(own: Sequence[Any], first: Sequence[Any]) -> bool:
    """Return whether recordings have the same tasks, in any order."""
    return len(own) == len(first) and all(
        sorted(digest for digest, _ in mine) == sorted(digest for digest, _ in theirs)
        for mine, theirs in zip(own, first, strict=True)
    )


def _phase(story: tuple[int, list[list[str]]]) -> str:
    phase, texts = story
    tasks = sum(map(len, texts))
    if phase:
        return f"reading values in microbatch {phase - 1}, after {tasks} tasks"
    return f"at the end of {len(texts)} microbatches with {tasks} tasks"
