"""A model that is divided over the ranks of a pipeline."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from smdistributed._common import errors
from smdistributed.modelparallel import partition_file
from smdistributed.modelparallel.exceptions import (
    CLASSES,
    SMPCheckpointError,
    SMPPartitionError,
    SMPUnsupportedError,
    SMPUsageError,
    SMPValidationError,
)
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import communication, norms
from smdistributed.modelparallel.torch.checkpoint import state_dicts
from smdistributed.modelparallel.torch.compat import documented_spellings
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.join import TRAINING, Join
from smdistributed.modelparallel.torch.partition import materialize
from smdistributed.modelparallel.torch.partition.placement import Placement, manual_assignment
from smdistributed.modelparallel.torch.runtime import offloading
from smdistributed.modelparallel.torch.runtime.executor import Microbatch
from smdistributed.modelparallel.torch.runtime.gradients import GradientReducer, GradientSnapshot, warn_of_sums
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.runtime.rng import Randomness
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.remote_tensor import Absent
from smdistributed.modelparallel.torch.tracing.tasks import Value


class Removable:
    """What undoes a registration."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Undoes it; a second time does nothing."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class DistributedModel(nn.Module):
    """Wraps the model of a script.

    With several partitions, the first call inside of a ``smp.step`` function divides it: from then on a rank holds the
    parameters of its partition only. With one, it does so at once. The model is called, and ``backward`` too, inside of
    ``smp.step`` functions; with one partition also outside.

    Args:
        module: The model.
        trace_device: Where the model is looked at to divide it; by default with tensors that take no memory.
        trace_execution_times: Whether to measure its modules for that, instead of estimating.
        overlapping_allreduce: With ``ddp``, whether gradients are reduced as they become complete.
        backward_passes_per_step: With ``ddp``, after how many steps with a backward gradients are reduced.
        average_grads_across_microbatches: Whether gradients are those of the mean over microbatches, or of their sum.
        bucket_cap_mb: With ``ddp``, the size of the pieces in which gradients are reduced.
        trace_memory_usage: Accepted; what modules keep is counted from what autograd saves in any case.
        broadcast_buffers: With ``ddp``, whether buffers follow those of the first replica before each step.
        gradient_as_bucket_view: Accepted; gradients keep their own memory.
        find_unused_parameters: Accepted; unused parameters are found anyway.

    Attributes:
        module: The model.
        pipeline: What executes it, if it is divided.
        randomness: What the body and the modules of this rank draw from.
        offloader: What moves activations to the host, if the configuration has it so.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        cfg = state.cfg
        if isinstance(module, DistributedModel) or state.model is not None:
            raise SMPUsageError("there is a `smp.DistributedModel` already: a script has one")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise SMPUsageError(
                "the model is wrapped in torch's DistributedDataParallel: with `ddp: true`, `smp.DistributedModel` reduces "
                "gradients itself"
            )
        if trace_device not in ("cpu", "gpu"):
            raise SMPValidationError(f"`trace_device` is {trace_device!r}: expected 'cpu' or 'gpu'")
        if trace_execution_times and trace_device == "cpu":
            raise SMPValidationError(
                "`trace_execution_times` needs the device of the training, not `trace_device='cpu'`"
            )
        del trace_memory_usage, gradient_as_bucket_view, find_unused_parameters
        self.module = module
        state.end_delay()
        documented_spellings(module)
        self._trace_execution_times = trace_execution_times
        self.post_partition_hooks: list[Callable[..., Any]] = []
        self.post_step_hooks: list[Callable[..., Any]] = []
        self.pipeline: Pipeline | None = None
        self.recording: Recording | None = None
        self.in_step = False
        self.when_divided: Callable[[], None] | None = None
        self._placement: Placement | None = None
        # That of a checkpoint, which wins.
        self._assignment: Mapping[str, int] | None = None
        self._average, self._passes = average_grads_across_microbatches, backward_passes_per_step
        self._broadcast_buffers, self._overlapping = broadcast_buffers, overlapping_allreduce
        #: Around steps of replicas with different numbers of batches.
        self.joining: Join | None = None
        #: Each rank has the whole model again.
        self._is_whole = False
        self._scale = 1.0
        self._has_backward = False
        self._before: GradientSnapshot | None = None
        self.randomness = Randomness()
        self._deferred: list[Callable[[], None]] = []
        self.offloader = offloading.make(cfg.offload_activations, current_device(), cfg.activation_loading_horizon)
        reduces = cfg.ddp and state.groups.data is not None
        self._reducer = (
            GradientReducer(state.groups.data, bucket_cap_mb, overlapping_allreduce, backward_passes_per_step)
            if reduces
            else None
        )
        state.model = self
        try:
            if cfg.pipeline_parallel_degree == 1:
                self._settle(Placement(module, {"": 0}))
        except BaseException:
            # The script may try again.
            state.model = None
            raise

    # Division.

    @property
    def is_partitioned(self) -> bool:
        """Whether it is known which rank has which module."""
        return self._placement is not None

    @property
    def partitioned(self) -> bool:
        """As :attr:`is_partitioned`."""
        return self.is_partitioned

    def partition_of(self, module_path: str) -> int:
        """The partition of the module with this path, ``""`` being the model."""
        return self.placement.of_path(module_path)

    @property
    def placement(self) -> Placement:
        """The partition of every module.

        Raises:
            SMPUsageError: it is not known yet.
        """
        if self._placement is None:
            raise SMPUsageError(
                "the model is divided in the first call of a `smp.step` function, which is still to come"
            )
        return self._placement

    def divide_by_hand(self) -> None:
        """Divides the model if that takes no trace of a call, because the script or a checkpoint says where modules are. A division
        that failed in an earlier step goes on where it failed."""
        cfg = state.cfg
        if self._is_whole:
            return
        if self._placement is not None:
            with self.randomness.own():
                self._complete_division()
        elif self._assignment is not None or not (cfg.auto_partition or (cfg.load_partition and cfg.partition_file)):
            with self.randomness.own():
                self._divide((), {})

    def _divide(self, args: Any, kwargs: Any) -> None:
        cfg = state.cfg
        if self._assignment is not None:
            self._settle(Placement(self.module, {"": cfg.default_partition, **self._assignment}))
            return
        manual = manual_assignment(self.module)
        assignment = {"": cfg.default_partition, **manual}
        if cfg.auto_partition or (cfg.load_partition and cfg.partition_file):
            from smdistributed.modelparallel.torch.partition.assignment import auto_partition

            state.tracing = True
            try:
                found = auto_partition(
                    self.module, args, kwargs, cfg, manual, measure_times=self._trace_execution_times
                )
            except ValueError as error:
                raise SMPPartitionError(str(error)) from error
            finally:
                state.tracing = False
            if self._trace_execution_times:
                # Everybody measures other times: those of the first rank count.
                found = communication.allgather(found, CommGroup.WORLD)[0]
            # What the script said wins, for modules inside as well.
            assignment = {path: index for path, index in found.items() if _nearest(path, manual) is None} | manual
        self._settle(Placement(self.module, assignment))

    def _settle(self, placement: Placement) -> None:
        """Makes the model what ``placement`` says."""
        groups, cfg = state.groups, state.cfg
        if cfg.partition_file and not cfg.load_partition:
            # First: a file that cannot be written leaves the model whole.
            decision = {path: placement.of_path(path) for path, _ in self.module.named_modules()}
            partition_file.write(cfg.partition_file, decision)
        replaced = materialize.settle(self.module, placement, groups.rank_in("pp"), current_device())
        self._placement = placement
        if state.optimizer is not None:
            state.optimizer.localize(replaced)
        self._complete_division()

    def _complete_division(self) -> None:
        """What follows once each rank holds its partition: states that were loaded before, the values of the first replica, the
        pipeline. What fails here is tried again in the next step, so no step runs without it."""
        groups, cfg, device = state.groups, state.cfg, current_device()
        self._run_deferred()
        if groups.data is not None:
            with errors.translated(CLASSES):
                materialize.broadcast(self._local_tensors(), groups.data, groups.members["dp"][0])
        if groups.pipe is not None:
            bounds = cfg.active_microbatches, cfg.activation_memory_bytes
            norms.follow_torch()
            self.pipeline = Pipeline(self.module, self.placement, groups, device, cfg.pipeline, *bounds, self.offloader)
        for hook in list(self.post_partition_hooks):
            _call_hook(hook, self)

    def _run_deferred(self) -> None:
        """Runs what has waited for the division, in order; an action that fails stays.

        Raises:
            SMPCheckpointError: An action failed in another replica; the same text on all ranks.
        """
        has_replicas = state.groups.data is not None and state.groups.pipe is not None
        is_left = bool(self._deferred) or has_replicas
        while is_left:
            failure: Exception | None = None
            try:
                for action in self._deferred[:1]:
                    action()
                    del self._deferred[0]
            except Exception as error:
                failure = error
            is_left = bool(self._deferred)
            if has_replicas:
                # A state is of one replica, and the replicas go on together or not at all.
                answers = communication.allgather((None if failure is None else str(failure), is_left), CommGroup.WORLD)
                texts = [text for text, _ in answers if text is not None]
                if texts and str(failure) != texts[0]:
                    raise SMPCheckpointError(texts[0]) from failure
                is_left = any(more for _, more in answers)
            if failure is not None:
                raise failure

    def divide_as(self, assignment: Mapping[str, int]) -> None:
        """When the model is divided, it is so: module path to partition."""
        self._assignment = dict(assignment)

    def when_partitioned(self, action: Callable[[], None]) -> None:
        """Runs ``action`` when the model has been divided; at once if it has, and nothing else waits."""
        if self.is_partitioned and not self._deferred:
            action()
        else:
            self._deferred.append(action)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> Removable:
        """Runs ``hook(model, optimizer)`` after the division and before the first forward; at once if that is past. It
        gets as many of the two as it takes.

        Returns:
            What has ``remove()``.
        """
        if self.is_partitioned:
            _call_hook(hook, self)
        self.post_partition_hooks.append(hook)
        return Removable(self.post_partition_hooks, hook)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> Removable:
        """Run ``hook(model, optimizer)`` once, when the next call of a ``smp.step`` function has ended.

        The model is divided by then and has its gradients, so the hook can load the state of the optimizer before the first
        ``optimizer.step()``.

        Args:
            hook: A function of as many of the two arguments as it takes.

        Returns:
            A handle whose ``remove()`` takes back a hook that has not run.
        """
        self.post_step_hooks.append(hook)
        return Removable(self.post_step_hooks, hook)

    # Forward and backward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        if self._is_whole:
            if self.in_step:
                raise SMPUsageError("the model is on CPUs, as a whole: there are no steps after `model.cpu()`")
        elif state.cfg.pipeline_parallel_degree > 1:
            if not self.in_step:
                raise SMPUsageError("with several partitions, the model is called inside of `smp.step` functions")
            if self.pipeline is None:
                with self.randomness.own():
                    self._divide(args, kwargs)
                begin, self.when_divided = self.when_divided, None
                assert begin is not None
                begin()
        elif self._reducer is not None and not self.in_step and self.training and torch.is_grad_enabled():
            # Nobody would reduce the gradients of a backward there.
            raise SMPUsageError("with replicas, a model that is trained is called inside of `smp.step` functions")
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """``torch.autograd.backward``, over all partitions.

        Args:
            tensors: A loss, or several tensors.
            grad_tensors: Their gradients; 1 for a loss.
        """
        self._has_backward = True
        if self.recording is not None:
            self.recording.backward(tensors, grad_tensors)
            return
        if state.cfg.pipeline_parallel_degree > 1:
            raise SMPUsageError("with several partitions, `model.backward` is called inside of `smp.step` functions")
        if self._reducer is not None and not self.in_step:
            raise SMPUsageError(
                "with replicas, `model.backward` is called inside of `smp.step` functions: outside, its gradients would not be "
                "reduced"
            )
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        gradients = [None] * len(tensors) if grad_tensors is None else grad_tensors
        gradients = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
        if self._scale != 1.0:
            gradients = [
                torch.full_like(tensor, self._scale) if gradient is None else gradient * self._scale
                for tensor, gradient in zip(tensors, gradients, strict=True)
            ]
        torch.autograd.backward(tensors, gradients)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a ``smp.step`` function's microbatches."""
        self.in_step, self._has_backward = True, False
        if self._reducer is not None and self.pipeline is None and self.is_partitioned:
            self._before = GradientSnapshot(self.local_parameters())
        try:
            self.follow_buffers([1 + TRAINING * self.training] if self.joining is None else self.joining.round(True))
            yield
        finally:
            self.in_step, self._scale, self.when_divided, self._before = False, 1.0, None, None
        hooks, self.post_step_hooks[:] = list(self.post_step_hooks), ()
        for hook in hooks:
            _call_hook(hook, self)

    def begin_microbatch(self, count: int) -> None:
        """The body runs for one of so many microbatches."""
        # A communication hook averages over microbatches as well.
        hooked = self._reducer is not None and self._reducer.hook is not None
        self._scale = 1.0 / count if self._average and not hooked else 1.0

    def end_recording(self) -> None:
        """The body has run for a microbatch."""
        self.recording = None

    def finish_alone(self) -> None:
        """All microbatches have run here."""
        if self._reducer is None:
            return
        if self._before is not None and not self._has_backward and self._before.has_changed(self.local_parameters()):
            # `loss.backward()`, or gradients that the body has set.
            self._has_backward = True
            if self._scale != 1.0:
                warn_of_sums()
        if self.reduces():
            self._reducer.reduce(self.local_named_parameters())

    def leaves_step(self, tensor: torch.Tensor) -> None:
        """A tensor leaves a step with its graph: gradients of a later backward would not be reduced."""
        if self._reducer is not None and self.training and tensor.grad_fn is not None:
            tensor.register_hook(self._refuse_late_backward)

    def _refuse_late_backward(self, gradient: torch.Tensor) -> None:
        del gradient
        if not self.in_step:
            raise SMPUsageError(
                "backward of what a `smp.step` function returned, after that function has ended: its gradients would not be "
                "reduced over the replicas; call `model.backward` inside of the function"
            )

    def execute(self, recordings: Sequence[Recording], returned: Sequence[Sequence[Value]]) -> list[Microbatch]:
        """Runs what was recorded on all partitions; then the gradients are there, and reduced."""
        assert self.pipeline is not None
        if self._reducer is None or not self.reduces():
            return self.pipeline.run(recordings, returned, self._scale, lambda stage, layout: None)
        reducer = self._reducer
        reducer.begin(self.pipeline, recordings, self.local_named_parameters())
        try:
            microbatches = self.pipeline.run(recordings, returned, self._scale, reducer.stage_is_done)
            reducer.finish()
        except BaseException:
            reducer.give_up()
            raise
        return microbatches

    def reduces(self) -> bool:
        """Whether the replicas reduce gradients in this step."""
        return self._has_backward if self.joining is None else any(self.joining.round(self._has_backward))

    # What is here.

    def _local_tensors(self) -> list[torch.Tensor]:
        return [*self.local_parameters(), *self.local_buffers()]

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of this rank's partition, with their paths."""
        mine = state.groups.rank_in("pp")
        for path, module in self.module.named_modules():
            if self.placement.of(module) == mine:
                yield path, module

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules of this rank's partition."""
        for _, module in self.local_named_modules():
            yield module

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this rank holds, each once, with their names in the model."""
        self.placement  # noqa: B018 - refuses before the division
        for name, parameter in self.module.named_parameters():
            if not isinstance(parameter, Absent):
                yield name, parameter

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds, each once."""
        for _, parameter in self.local_named_parameters():
            yield parameter

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that this rank holds, each once, with their names in the model."""
        self.placement  # noqa: B018
        for name, buffer in self.module.named_buffers():
            if not isinstance(buffer, Absent):
                yield name, buffer

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers that this rank holds, each once."""
        for _, buffer in self.local_named_buffers():
            yield buffer

    # State: `state_dicts.py` says how it is gathered, split and named.

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The whole model's, on every rank of one replica, all of which call it.

        Args:
            gather_to_rank0: Whether only the first rank gets it; the others get an empty one.

        Raises:
            SMPCheckpointError: A rank cannot give its part; the same on all ranks of the replica.
        """
        return state_dicts.full_model(self, gather_to_rank0)

    def local_state_dict(self) -> dict[str, Any]:
        """What this rank holds, and ``_smp_is_partial``."""
        return state_dicts.local_model(self)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> None:
        """Takes a whole state or this rank's part of one; before the division, when the model is divided. All ranks of one replica
        call it.

        Args:
            state_dict: Of :meth:`state_dict` or :meth:`local_state_dict`, or of the model outside of this library.
            strict: Whether its names must be those of the model.
            same_partition_load: Whether a part is known to be of the same division.

        Raises:
            SMPCheckpointError: The state does not fit, on any rank of the replica; the same on all of them, when all has been tried.
        """
        found = dict(state_dict)
        self.when_partitioned(lambda: state_dicts.load_model(self, found, strict, same_partition_load))

    def get_module(self) -> nn.Module:
        """The model of the script."""
        return self.module

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What DistributedDataParallel, PyTorch's and this package's, asks a model first."""
        raise SMPUsageError(
            "a `smp.DistributedModel` is not wrapped in DistributedDataParallel: with `ddp: true` it reduces gradients itself"
        )

    # Devices: where a partition is, is not the script's choice.

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Changes types; devices are ignored, since each partition is on its rank's device."""
        _, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            if self.pipeline is not None:
                raise SMPUnsupportedError("the model is divided: change its type before the first step")
            self.module.to(dtype=dtype, non_blocking=non_blocking)
        return self

    def cuda(self, device: Any = None) -> DistributedModel:
        """Ignored: each partition is on its rank's device."""
        del device
        return self

    def cpu(self) -> DistributedModel:
        """Gives every rank of a pipeline the whole model, on CPUs; all of them call it. Steps are over then."""
        if self.pipeline is None:
            self.module.cpu()
            return self
        materialize.gather(self.module, communication.allgather(self._content(), CommGroup.PP_GROUP))
        self.pipeline, self._is_whole = None, True
        return self

    def _content(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().cpu()
            for name, tensor in (*self.local_named_parameters(), *self.local_named_buffers())
        }

    def join(self) -> Join:
        """A context for replicas with different numbers of batches: around all steps, on all ranks. Who has no batch left
        takes part in the reductions of the others with zeros, and has their parameters in the end."""
        if not state.cfg.ddp:
            raise SMPUsageError("`join()` is for replicas: it needs the configuration's `ddp: true`")
        return Join(self, state.groups.data)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """From now on, replicas reduce gradients by ``hook(state, bucket)``, whose future has the reduced buffer. It also
        averages them: over replicas, and over microbatches.

        Raises:
            SMPUsageError: there is nothing to reduce, or gradients are not reduced as they get ready.
        """
        if self._reducer is None or not self._overlapping:
            raise SMPUsageError(
                "`register_comm_hook()` needs the configuration's `ddp: true`, replicas, and `overlapping_allreduce=True`"
            )
        if self._reducer.hook is not None:
            raise SMPUsageError("a communication hook was registered before")
        self._reducer.hook = (state, hook)

    def follow_buffers(self, active: Sequence[int]) -> None:
        """Takes over the buffers of the first replica that is active, if that one trains."""
        first = next(place for place, flag in enumerate(active) if flag)
        if self._broadcast_buffers and self._reducer is not None and self.is_partitioned and active[first] & TRAINING:
            source = state.groups.members["dp"][first]
            materialize.broadcast(list(self.local_buffers()), state.groups.data, source)

    def follow(self, active: Sequence[int]) -> None:
        """Takes over all that the first replica that is active has."""
        if any(active) and self.is_partitioned:
            source = state.groups.members["dp"][next(place for place, flag in enumerate(active) if flag)]
            materialize.broadcast(self._local_tensors(), state.groups.data, source)

    def stand_in(self) -> None:
        """Takes part in the reduction of the other replicas' gradients, without any."""
        assert self._reducer is not None
        self._reducer.stand_in(self.local_named_parameters())

    _register_comm_hook = register_comm_hook

    # Of tensor parallelism, which is not there yet: no module is divided itself.

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules that tensor parallelism divides: none."""
        return iter(())

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether tensor parallelism divides it."""
        del parameter
        return False

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether tensor parallelism divides it."""
        del buffer
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether it sees the batches of several ranks."""
        del parameter
        return False

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Whether it sees the batches of several ranks."""
        del buffer
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are reduced over the ranks of ``smp.get_dp_group()``: all."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are reduced over the ranks of ``smp.get_rdp_group()``: none."""
        return iter(())


def _nearest(path: str, manual: dict[str, int]) -> int | None:
    """What the script said of the module with this path, or of the one nearest above it."""
    while path:
        if path in manual:
            return manual[path]
        path = path.rpartition(".")[0]
    return manual.get("")


def _call_hook(hook: Callable[..., Any], model: DistributedModel) -> None:
    arguments = (model, state.optimizer)
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        hook(*arguments)
        return
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        hook(*arguments)
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    hook(*arguments[: len(positional)])
