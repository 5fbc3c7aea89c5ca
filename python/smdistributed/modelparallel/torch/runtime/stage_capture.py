"""CUDA graphs of this rank's stages, with the option ``cuda_graphs``.

A graph launches all kernels of a stage's forward or backward at once, so the host no longer limits a pipeline of many
small kernels. See "Constraints" in https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs for what a graph
cannot contain.

- CAPTURE-1: a stage has as many copies of its graphs as it has active microbatches. Each copy has its own memory for
  what the forward leaves to the backward, its own inputs and outputs, because graphs that share memory must run in the
  order of their capture, and microbatches overlap. A backward leaves nothing to another graph unless it is split, so
  backwards of several copies share a memory pool, whatever their order. That of an only copy uses the memory of its
  forward again. Gradients of inputs stay allocated in the pool, and are copied right after the backward.
- CAPTURE-2: all ranks capture before the first message of a step. Capturing waits for the device, and two ranks that
  wait for each other's messages in it would wait forever.
- CAPTURE-3: a graph adds to the same ``.grad`` tensors in each step. Where the script has set ``.grad`` to ``None``,
  they begin with zeros; where it has set another tensor, with a copy of it.
- CAPTURE-4: a graph holds addresses and numbers, so stages are captured again if a parameter, a buffer or an attribute
  of their modules has changed since.
- CAPTURE-5: the backward computes results of pointwise operations again (`runtime/recomputation.py`), unless the stage
  can be captured only without that, or the script asks for speed.
- CAPTURE-6: a replay draws the random numbers that its operations would draw without a graph, because PyTorch passes it
  the state of the device's generator and moves that on.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn

from smdistributed import _core
from smdistributed.modelparallel.torch.runtime.call_plan import CallPlan
from smdistributed.modelparallel.torch.runtime.capture_inputs import (
    Buffer,
    Replicated,
    is_replicated,
    may_take_replicated,
)
from smdistributed.modelparallel.torch.runtime.fallbacks import script_level
from smdistributed.modelparallel.torch.runtime.program_run import Action
from smdistributed.modelparallel.torch.runtime.recomputation import recomputed_pointwise_results
from smdistributed.modelparallel.torch.runtime.shared_casts import SharedCasts, cast_dtypes
from smdistributed.modelparallel.torch.runtime.task_execution import without_cached_casts
from smdistributed.modelparallel.torch.runtime.task_runner import TaskRunner
from smdistributed.modelparallel.torch.tracing.attributes.captured_state import (
    GLOBAL_HOOKS,
    HOOKS,
    address_of,
    captured_state,
)
from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState
from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter
from smdistributed.modelparallel.torch.tracing.retained_tensors import RetainedTensor
from smdistributed.modelparallel.torch.tracing.state_order import writes_trained_parameter
from smdistributed.modelparallel.torch.tracing.tasks import Task

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.executor import Microbatch
    from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph

#: Steps that have graphs at the same time. Each keeps the memory of its activations.
_MAX_PROGRAMS = 4
#: A step whose modules change more often runs without graphs, because capturing takes longer than a step.
_MAX_CAPTURES = 4


class CapturedStage:
    """One copy of the graphs of a stage: of the forward, the backward and, if it is split, the gradients of weights.

    Args:
        mb: A microbatch like those that will run; its values are not used.
        number: The stage.
        is_split: Whether gradients of weights are a graph of their own.
        modules: The attributes of modules.
        parameters: Parameters and buffers by their paths.
        stream: The stream on which graphs are captured.
        backward_pool: The memory pool that backwards of several copies share (CAPTURE-1).
        casts: Autocast's copies of parameters, to which those that are missing are added; ``None`` to let the graph
            cast.
        recomputes: Whether the backward computes results of pointwise operations again (CAPTURE-5).

    Attributes:
        root_gradients: Memory for the gradients of outputs, by value.
        unsplit_node: As that of ``torch.classes.smd.WeightGradients``.
    """

    def __init__(
        self,
        mb: Microbatch,
        number: int,
        is_split: bool,
        modules: ModuleState,
        parameters: Mapping[str, torch.Tensor],
        stream: torch.cuda.Stream,
        backward_pool: Any | None,
        casts: SharedCasts | None,
        recomputes: bool,
    ) -> None:
        graph, stage = mb.stage_graph, mb.stage_graph.stages[number]
        pool, self._stream = torch.cuda.graph_pool_handle(), stream
        tasks = [mb.recording.tasks[task] for task in stage.tasks]
        replicated = Replicated.of(tasks)
        self._replicated = [Buffer.like(tensor) for tensor in replicated.tensors]
        self._layout = replicated.layout()
        self._inputs: dict[int, Buffer] = {}
        leaves: dict[int, torch.Tensor] = {}
        for producer, values in stage.inputs.items():
            for value in values:
                meta = graph.values[value].meta
                if graph.stages[producer].rank == stage.rank:
                    self._inputs[value] = Buffer(meta.shape, meta.stride, meta.dtype, meta.device)
                else:
                    # What another rank has sent is contiguous.
                    self._inputs[value] = Buffer.like(torch.empty(meta.shape, dtype=meta.dtype, device=meta.device))
                leaves[value] = self._inputs[value].tensor.detach().requires_grad_(meta.requires_grad)
        found: dict[int, torch.Tensor] = {}
        #: Values to which the body still refers when it has ended.
        self._kept: dict[int, torch.Tensor] = {}
        places = iter(replicated.places)
        tasks = [self._with_buffers(task, places) for task in tasks]
        runner, retained = TaskRunner(stage.rank, parameters, modules), mb.recording.retained.by_value
        drawing: list[str] = []
        draws = {each: [_ObservedDraw(mb.recording.tasks[each].name, drawing)] for each in mb.recording.draws}

        def forward() -> None:
            env = {value: without_cached_casts(leaf) if leaf.requires_grad else leaf for value, leaf in leaves.items()}
            if casts is None:
                # Casts of other graphs are not computed when this one runs.
                torch.clear_autocast_cache()
            else:
                casts.fill_cache()
            with (
                _without_generator_states(drawing),
                recomputed_pointwise_results(is_split) if recomputes else contextlib.nullcontext(),
            ):
                runner.run(graph, stage, tasks, env, retained, draws)
            found.update((value, env[value]) for value in stage.exports)
            kept = (value for value in retained if value in env)
            self._kept.update((value, env[value].detach()) for value in kept)

        self._forward = self._capture(forward, pool)
        self._exports = {value: tensor.detach() for value, tensor in found.items()}
        wanted = set(stage.backward_roots).union(*(graph.gradients(number, other) for other in stage.outputs))
        roots = {value: found[value] for value in stage.exports if value in wanted and found[value].requires_grad}
        if casts is not None:
            casts.add(list(roots.values()))
            torch.ops.smd.accumulate_casts(list(roots.values()))
        with torch.no_grad():
            self.root_gradients = {value: torch.zeros_like(tensor) for value, tensor in roots.items()}
        weights = torch.classes.smd.WeightGradients(
            list(roots.values()), [leaf for leaf in leaves.values() if leaf.requires_grad]
        )
        self.unsplit_node: str = weights.unsplit_node()

        def backward() -> None:
            inputs = weights.begin(is_split) if weights.size() else None
            mixed: Any = list(roots.values())
            with _without_generator_states(drawing):
                torch.autograd.backward(mixed, list(self.root_gradients.values()), inputs=inputs)
            if is_split:
                weights.end()

        self._backward = self._capture(backward, backward_pool or pool) if roots else None
        self._weights = self._capture(weights.run, pool) if is_split and weights.size() else None
        #: Of inputs on which no root depends, zeros.
        self._input_gradients = {
            value: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for value, leaf in leaves.items()
            if leaf.requires_grad
        }

    def _with_buffers(self, task: Task, places: Iterable[int]) -> Task:
        """Return the task with the buffers of the graph in place of its replicated tensors."""
        if not may_take_replicated(task):
            return task
        numbers = iter(places)
        copy = task.copy()
        copy.outputs = task.outputs
        copy.replace_leaves(lambda leaf: self._replicated[next(numbers)].tensor if is_replicated(leaf) else leaf)
        return copy

    def _capture(self, run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Threads of this library and of NCCL query events meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    _end_capture(graph, pool)
                raise
            _end_capture(graph, pool)
        return graph

    def misfit(self, mb: Microbatch, number: int, replicated: Replicated) -> str | None:
        """Return why the graph does not fit a microbatch; ``None`` if it does."""
        if replicated.layout() != self._layout:
            return "the body passes tensors with other strides, or shares them in another way"
        tasks = mb.recording.tasks
        computed = {value.index for task in mb.stage_graph.stages[number].tasks for value in tasks[task].outputs}
        if not self._kept.keys() >= computed & mb.recording.retained.by_value.keys():
            return "the body refers to other tensors when it has ended"
        return None

    def forward(
        self, mb: Microbatch, inputs: Mapping[int, torch.Tensor], replicated: Replicated
    ) -> dict[int, torch.Tensor]:
        """Run the forward; return the exports."""
        for value, buffer in self._inputs.items():
            buffer.fill(inputs[value])
        for buffer, tensor in zip(self._replicated, replicated.tensors, strict=True):
            buffer.fill(tensor)
        self._forward.replay()
        # Copies, because messages may still read them when the next microbatch runs.
        exports = {value: tensor.clone() for value, tensor in self._exports.items()}
        for value, retained in mb.recording.retained.by_value.items():
            if value in self._kept and retained.tensor is None:
                retained.tensor = exports[value] if value in exports else self._kept[value].clone()
        return exports

    def backward(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the backward, or its first part; return the gradients of the inputs."""
        for value, memory in self.root_gradients.items():
            if value in gradients:
                memory.copy_(gradients[value])
            else:
                memory.zero_()
        if self._backward is not None:
            self._backward.replay()
        return {value: found.clone() for value, found in self._input_gradients.items()}

    def weight_part(self) -> None:
        """Compute the gradients of weights, if they are a graph of their own."""
        if self._weights is not None:
            self._weights.replay()


class _Program:
    """The captured stages of one program.

    Attributes:
        state: What they depend on (CAPTURE-4).
        stages: The copies of each stage; empty if the program runs without graphs.
        gradients: Parameters to whose gradients the graphs add, with these gradients.
        casts: Autocast's copies of parameters, if there are any.
        captures: How often the program was captured.
    """

    def __init__(self) -> None:
        self.state: Any = None
        self.stages: dict[int, list[CapturedStage]] = {}
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.casts: SharedCasts | None = None
        self.captures = 0

    def forget(self) -> None:
        """Forget the stages."""
        self.state, self.stages, self.gradients, self.casts = None, {}, [], None


class StageCapture:
    """The captured stages of this rank.

    Args:
        modules: The attributes of modules.
        recomputes: Whether backwards compute results of pointwise operations again, where they can (CAPTURE-5).
    """

    def __init__(self, modules: ModuleState, recomputes: bool) -> None:
        self._modules, self._recomputes = modules, recomputes
        self._programs: dict[Any, _Program] = {}
        self._version = 0
        #: The copies that no microbatch of this step uses.
        self._free: dict[int, list[CapturedStage]] = {}
        #: Autocast's copies of parameters by their type; all programs use the same ones.
        self._casts: dict[torch.dtype, SharedCasts] = {}
        #: Gradients by the id of their parameter; all programs add to the same ones.
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._warned: set[str] = set()

    @property
    def num_graphs(self) -> int:
        """The number of captured copies of stages."""
        return sum(len(copies) for program in self._programs.values() for copies in program.stages.values())

    def begin_step(
        self, key: Any, version: int, actions: Sequence[Action], mb: Microbatch, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Capture the stages of a program, unless they are (CAPTURE-2), and let gradients begin (CAPTURE-3).

        Count a step that runs without graphs.

        Args:
            key: Equal for equal programs.
            version: Another number after parameters have begun or stopped to require a gradient.
            actions: The program of this rank.
            mb: The first microbatch of the step.
            parameters: The parameters and buffers of all ranks.
        """
        self._free = {}
        if not any(stage.has_backward for stage in mb.stage_graph.stages):
            return
        self._prepare(key, version, actions, mb, parameters)
        if not self._free and any(action[0] in ("B", "I") for action in actions):
            _core.note_fallback("without_cuda_graph")

    def _prepare(
        self, key: Any, version: int, actions: Sequence[Action], mb: Microbatch, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        if version != self._version:
            self._version = version
            self._programs.clear()
            self._casts.clear()
        program = self._programs.get(key)
        if program is None:
            if sum(bool(each.stages) for each in self._programs.values()) == _MAX_PROGRAMS:
                self._warn(
                    f"`cuda_graphs`: {_MAX_PROGRAMS} different steps have graphs, whose memory they keep; others, such "
                    "as batches of another shape, run without"
                )
                return
            if sum(not each.stages for each in self._programs.values()) >= _MAX_PROGRAMS:
                self._warn(
                    f"`cuda_graphs`: {_MAX_PROGRAMS} different steps have no graphs; other steps are not captured"
                )
                return
            program = self._programs[key] = _Program()
        own = [each for each in parameters.values() if not isinstance(each, MetaParameter)]
        numbers = sorted({action[1] for action in actions if action[0] == "F"})
        called = [mb.recording.tasks[task].module for number in numbers for task in mb.stage_graph.stages[number].tasks]
        state = (captured_state(each for each in called if each is not None), tuple(map(address_of, own)))
        if state != program.state:
            program.forget()
            if program.captures == _MAX_CAPTURES:
                self._warn(
                    f"`cuda_graphs`: attributes or hooks of modules, or addresses of parameters, have changed in "
                    f"{_MAX_CAPTURES - 1} steps, which were captured again each time; the step runs without graphs now"
                )
                return
            try:
                self._capture(program, numbers, actions, mb, parameters)
            except _UncapturableError as obstacle:
                self._warn(f"`cuda_graphs` has no effect on this rank's part of the step: {obstacle}")
                program.forget()
            except BaseException:
                program.forget()
                raise
            finally:
                self._casts = {dtype: each for dtype, each in self._casts.items() if self._is_used(each)}
            program.captures += 1
            program.state = state
        self._free = {number: list(copies) for number, copies in program.stages.items()}
        for parameter, gradient in program.gradients:
            _begin_gradient(parameter, gradient)
        if program.casts is not None:
            program.casts.update()

    def _is_used(self, casts: SharedCasts) -> bool:
        return any(program.casts is casts for program in self._programs.values())

    def _warn(self, text: str) -> None:
        """Warn once of each reason why a step runs without graphs."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=script_level())

    def _capture(
        self,
        program: _Program,
        numbers: Iterable[int],
        actions: Sequence[Action],
        mb: Microbatch,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        # In all stages, so that all ranks give the same reason. A failed capture concerns this rank alone: messages do
        # not depend on graphs.
        for number, stage in enumerate(mb.stage_graph.stages):
            reason = _obstacle(mb.stage_graph, number, mb.recording, parameters) if stage.has_backward else None
            if reason is not None:
                self._warn(f"`cuda_graphs` has no effect on this step: {reason}")
                return
        splits = {
            number: any(action[0] == "I" and action[1] == number for action in actions)
            for number in numbers
            if mb.stage_graph.stages[number].has_backward
        }
        # The first capture finds the parameters that get a gradient.
        own = [each for each in parameters.values() if not isinstance(each, MetaParameter)]
        before = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        try:
            casts = self._shared_casts(splits, mb)
            kept: dict[int, str] = {}
            self._captured(splits, dict.fromkeys(splits, 1), mb, parameters, casts, kept)
        finally:
            trained = [parameter for parameter in own if parameter.grad is not None]
            is_sparse = any(each.grad is not None and each.grad.layout is not torch.strided for each in trained)
            for parameter, gradient in zip(own, before, strict=True):
                parameter.grad = gradient
        if is_sparse:
            self._warn("`cuda_graphs` has no effect on this step: a parameter has sparse gradients")
            return
        self._gradients = {id(each): self._gradients[id(each)] for each in own if id(each) in self._gradients}
        for parameter in trained:
            known = self._gradients.get(id(parameter))
            if known is None or not _is_like(known[1], parameter):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                known = self._gradients[id(parameter)] = parameter, gradient
            _begin_gradient(*known)
            program.gradients.append(known)
        program.casts = casts
        if casts is not None:
            casts.keep(each for each in own if each.requires_grad)
        copies = {number: _most_active(actions, number) for number in splits}
        try:
            program.stages = self._captured(splits, copies, mb, parameters, casts, kept)
        except BaseException:
            for parameter, gradient in zip(own, before, strict=True):
                parameter.grad = gradient
            raise
        for number, reason in kept.items():
            self._warn(
                f"`cuda_graphs`: stage {number} keeps all tensors that its backward needs and computes none again, "
                f"because it cannot be captured otherwise: {reason}"
            )

    def _shared_casts(self, numbers: Iterable[int], mb: Microbatch) -> SharedCasts | None:
        """Return autocast's copies of parameters for some stages; ``None`` if they share none."""
        dtypes = cast_dtypes(mb.recording.tasks[task] for each in numbers for task in mb.stage_graph.stages[each].tasks)
        if len(dtypes) > 1:
            self._warn("`cuda_graphs`: autocast has several types in this step, so each graph casts all its parameters")
        if len(dtypes) != 1:
            return None
        dtype = dtypes.pop()
        return self._casts.setdefault(dtype, SharedCasts(dtype))

    def _captured(
        self,
        splits: Mapping[int, bool],
        copies: Mapping[int, int],
        mb: Microbatch,
        parameters: Mapping[str, torch.Tensor],
        casts: SharedCasts | None,
        kept: dict[int, str],
    ) -> dict[int, list[CapturedStage]]:
        """Capture the stages.

        Args:
            splits: The stages, and whether gradients of weights are a graph of their own.
            copies: The number of copies of each.
            mb: See :class:`CapturedStage`, also of the next two.
            parameters: As there.
            casts: As there.
            kept: Stages that keep all saved tensors, with the reason. Stages that cannot be captured otherwise are
                added.
        """
        stream, backward_pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stages: dict[int, list[CapturedStage]] = {}
        # Graphs allocate from memory pools of their own. They cannot use the free blocks that PyTorch keeps, so these
        # are returned to the device.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for number, is_split in splits.items():
            shared = backward_pool if copies[number] > 1 and not is_split else None
            settings = mb, number, is_split, self._modules, parameters, stream, shared, casts
            try:
                if self._recomputes and number not in kept:
                    try:
                        stages[number] = [CapturedStage(*settings, True) for _ in range(copies[number])]
                        continue
                    except (_UncapturableError, torch.OutOfMemoryError):
                        raise
                    except RuntimeError as error:
                        kept[number] = str(error)
                    torch.clear_autocast_cache()
                    gc.collect()
                    torch.cuda.empty_cache()
                stages[number] = [CapturedStage(*settings, False) for _ in range(copies[number])]
            except (_UncapturableError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                tasks = mb.stage_graph.stages[number].tasks
                first, last = (mb.recording.tasks[tasks[place]].name for place in (0, -1))
                text = f"what runs from `{first}` to `{last}` cannot be captured: {error}"
                raise _UncapturableError(text) from error
            finally:
                torch.clear_autocast_cache()
        return stages

    def take(self, mb: Microbatch, number: int) -> tuple[CapturedStage, Replicated] | None:
        """Return a free copy of a stage's graphs for a microbatch, and the microbatch's replicated tensors.

        ``None`` if the stage has no graphs, or if they do not fit the microbatch: then it runs without them.
        """
        free = self._free.get(number)
        if not free:
            return None
        replicated = Replicated.of(mb.recording.tasks[task] for task in mb.stage_graph.stages[number].tasks)
        reason = free[-1].misfit(mb, number, replicated)
        if reason is None:
            return free.pop(), replicated
        _core.note_fallback("without_cuda_graph")
        self._warn(
            f"stage {number} of a microbatch runs without its CUDA graph: {reason} than the microbatch with which it "
            "was captured"
        )
        return None

    def release(self, number: int, stage: CapturedStage) -> None:
        """Give a copy back when the microbatch no longer needs it."""
        self._free[number].append(stage)


class _UncapturableError(RuntimeError):
    """A stage cannot be captured, as was found in its capture."""


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture, also if CUDA has ended it before with an error, as after an operation that waits."""
    try:
        graph.capture_end()
    except RuntimeError:
        # PyTorch has left neither the memory pool nor the capture of its generator. Another capture ends the latter.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        with contextlib.suppress(RuntimeError):
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            other.capture_end()
        raise


class _ObservedDraw:
    """Stores the name of a task that draws random numbers while it is captured."""

    def __init__(self, name: str, names: list[str]) -> None:
        self._name, self._names = name, names

    def start(self) -> None:
        """Begin the task."""
        self._names.append(self._name)

    def stop(self) -> None:
        """End the task."""
        self._names.pop()


@contextlib.contextmanager
def _without_generator_states(drawing: Sequence[str]) -> Iterator[None]:
    """Let checkpoints of modules store no state of the device's generator, because a capture cannot read it.

    Args:
        drawing: The task that draws random numbers at present, if any. A second forward in the backward's graph would
            draw others, so a checkpoint in such a task raises :class:`_UncapturableError`.
    """
    module = torch.utils.checkpoint
    own = module.get_device_states

    def get_device_states(*_: Any) -> tuple[list[int], list[torch.Tensor]]:
        if drawing:
            raise _UncapturableError(f"`{drawing[-1]}` draws random numbers in a module with activation checkpointing")
        return [], []

    module.get_device_states = get_device_states
    try:
        yield
    finally:
        module.get_device_states = own


def _is_like(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        gradient.shape == parameter.shape and gradient.dtype is parameter.dtype and gradient.device == parameter.device
    )


def _begin_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let a parameter's gradient be the tensor to which graphs add, with the value that it has (CAPTURE-3)."""
    if parameter.grad is gradient:
        return
    if parameter.grad is None:
        gradient.zero_()
    else:
        gradient.copy_(parameter.grad)
    parameter.grad = gradient


def _obstacle(
    graph: StageGraph, number: int, recording: Recording, parameters: Mapping[str, torch.Tensor]
) -> str | None:
    """Return why a stage cannot be captured; ``None`` if it can."""
    stage = graph.stages[number]
    if graph.without_graph:
        return "the body takes a view of a tensor without gradients and trains with it"
    if not recording.detach_outputs:
        return "the step's outputs keep their graph (`detach_outputs=False`)"
    if any(GLOBAL_HOOKS):
        return "there are hooks for all modules, which a graph would not call"
    for value in (graph.values[value] for values in stage.inputs.values() for value in values):
        if value.home is not None:
            return f"the buffer or parameter `{value.home}` is used on another partition"
        if value.meta.device.type != "cuda":
            return f"a stage takes a tensor on the {value.meta.device.type}"
    for place in stage.tasks:
        task = recording.tasks[place]
        if task.plan is None:
            task.plan = CallPlan.of(task)
        for draw in recording.draws.get(place, ()):
            if draw.generator.kind != "cuda":
                return f"`{task.name}` draws random numbers on the host"
        if isinstance(getattr(task.call, "__self__", None), RetainedTensor):
            return "the body uses a tensor of an earlier step"
        if task.known_spec.effects or task.has_containers:
            return f"`{task.name}` takes or returns lists or objects that it changes"
        for path in filter(None, (value.parameter for value in task.inputs)):
            parameter = parameters[path]
            if isinstance(parameter, MetaParameter):
                continue
            if parameter.device.type != "cuda":
                return f"`{task.name}` takes `{path}`, which is on the {parameter.device.type}"
            if _has_hook(parameter):
                return f"`{path}`, which `{task.name}` takes, has a hook on its gradient, which a graph would not call"
        for meta in task.known_spec.metas:
            if meta.device.type != "cuda":
                return f"`{task.name}` returns a tensor on the {meta.device.type}"
        for leaf in task.leaves():
            if is_replicated(leaf) and (leaf.device.type != "cuda" or leaf.layout is not torch.strided):
                return f"`{task.name}` takes a tensor on the {leaf.device.type}, or a sparse one"
            if is_replicated(leaf) and leaf.requires_grad:
                return f"`{task.name}` takes a tensor of the body that requires a gradient"
        if writes_trained_parameter(task) and any(each.context.autocast for each in recording.tasks):
            return f"`{task.name}` writes to a parameter in a step with autocast"
        spec = task.known_spec
        for path, name in (*spec.attributes, *spec.plain_attributes):
            return f"`{task.name}` sets the attribute `{name}` of its module `{path}`"
        if spec.changed_state:
            return f"`{task.name}` changes a list, a dictionary or a tensor in an attribute"
        if task.module is not None:
            reason = _hook_of(task.module, task.name)
            if reason is not None:
                return reason
    return None


def _hook_of(called: nn.Module, name: str) -> str | None:
    """Return which hook of a module a graph would not call."""
    for path, module in called.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            return f"the module `{path}` of `{name}` has a hook, which a graph would not call"
    for path, parameter in called.named_parameters():
        if isinstance(parameter, MetaParameter):
            continue
        if _has_hook(parameter):
            return f"the parameter `{path}` of `{name}` has a hook on its gradient, which a graph would not call"
    return None


def _has_hook(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _most_active(actions: Sequence[Action], number: int) -> int:
    """Return the number of microbatches of a stage that are between its forward and the end of its backward."""
    counts: collections.Counter[str] = collections.Counter()
    most = 0
    for kind, stage, *_ in actions:
        if stage == number and kind in ("F", "B", "W"):
            counts["active"] += 1 if kind == "F" else -1
            most = max(most, counts["active"])
    return most
