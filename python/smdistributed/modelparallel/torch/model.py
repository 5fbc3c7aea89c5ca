"""A model that is partitioned over the ranks of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

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
from smdistributed.modelparallel.torch.compat import add_documented_aliases, warn_of_arguments
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.hooks import Removable, call_hook
from smdistributed.modelparallel.torch.join import Join
from smdistributed.modelparallel.torch.nn.module import DistributedModule, reduced_over_rdp, shards
from smdistributed.modelparallel.torch.nn.random import streams
from smdistributed.modelparallel.torch.nn.replacement import replace_marked
from smdistributed.modelparallel.torch.partitioning import materialize
from smdistributed.modelparallel.torch.partitioning.placement import Placement, manual_assignment
from smdistributed.modelparallel.torch.precision import half_model
from smdistributed.modelparallel.torch.runtime import offloading
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.runtime.replicas import Replicas
from smdistributed.modelparallel.torch.runtime.rng import RngState
from smdistributed.modelparallel.torch.sharding.division import shard_model
from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.step_run import StepRun


class DistributedModel(nn.Module):
    """Wraps the model of a script.

    With several partitions, the first call inside of a ``smp.step`` function partitions the model: from then on, a
    rank holds only the parameters of its partition. With one partition, this happens at once. The model and
    ``backward`` are called inside of ``smp.step`` functions; with one partition also outside.

    Args:
        module: The model.
        trace_device: ``"cpu"`` is ignored with a warning: the trace takes no memory of any device.
        trace_execution_times: Whether the execution times of modules are measured for the partition, instead of
        estimated.
        overlapping_allreduce: With ``ddp`` and several partitions, whether gradients are reduced as they become
            complete. With one partition, they are reduced at the end of the step, with a warning.
        backward_passes_per_step: With ``ddp``, the number of steps with a backward after which gradients are reduced.
        average_grads_across_microbatches: Whether gradients are averaged or summed over microbatches.
        bucket_cap_mb: With ``ddp``, the size of the buckets in which gradients are reduced, in MiB.
        trace_memory_usage: Ignored with a warning: memory is always counted, from the tensors that autograd saves.
        broadcast_buffers: With ``ddp``, whether the first replica's buffers are broadcast before each step.
        gradient_as_bucket_view: Ignored with a warning; gradients keep their own memory.
        find_unused_parameters: Ignored with a warning; unused parameters are always found.

    Attributes:
        module: The model.
        pipeline: Executes the model, if it is partitioned over several ranks.
        step_run: The running call of a step function, ``None`` between steps.
        sharded: The shards of the parameters, under sharded data parallelism.
        replicas: The reduction of gradients over the ranks that hold the same partition.
        rng_state: The random state of the body and of this rank's modules.
        offloader: Moves activations to the host, if the configuration enables it.
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
                "the model is wrapped in torch's DistributedDataParallel: with `ddp: true`, `smp.DistributedModel` "
                "reduces gradients itself"
            )
        if trace_device not in ("cpu", "gpu"):
            raise SMPValidationError(f"`trace_device` is {trace_device!r}: expected 'cpu' or 'gpu'")
        if trace_execution_times and trace_device == "cpu":
            raise SMPValidationError(
                "`trace_execution_times` needs the device of the training, not `trace_device='cpu'`"
            )
        warn_of_arguments(
            cfg, trace_device=trace_device, trace_memory_usage=trace_memory_usage,
            gradient_as_bucket_view=gradient_as_bucket_view, find_unused_parameters=find_unused_parameters,
            trace_execution_times=trace_execution_times, overlapping_allreduce=overlapping_allreduce,
            backward_passes_per_step=backward_passes_per_step, bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
        )  # fmt: skip
        given = module
        self.module = module = replace_marked(given)
        if module is not given:
            # The Trainer makes its optimizer of the parameters of the model that it has.
            for table in ("_parameters", "_buffers", "_modules"):
                given.__dict__[table] = module.__dict__[table]
        self._half = half_model.model_dtype(cfg)
        if self._half is not None:
            half_model.cast_module(module, self._half)
        elif cfg.fp16_params:
            half_model.halve_distributed_modules(module)
        state.end_delay()
        add_documented_aliases(module)
        self._trace_execution_times = trace_execution_times
        self.post_partition_hooks: list[Callable[..., Any]] = []
        self.post_step_hooks: list[Callable[..., Any]] = []
        self.pipeline: Pipeline | None = None
        self.step_run: StepRun | None = None
        self._placement: Placement | None = None
        # The partition of a checkpoint; it takes precedence.
        self._assignment: Mapping[str, int] | None = None
        #: Whether each rank has the whole model again, after `cpu()`.
        self._is_whole = False
        self.sharded: ShardedModel | None = None
        self.rng_state = RngState()
        self._deferred: list[Callable[[], None]] = []
        self.offloader = offloading.make_offloader(
            cfg.offload_activations, current_device(), cfg.activation_loading_horizon
        )
        self.replicas = Replicas(
            state.groups.dp_group if cfg.ddp else None,
            state.groups.rdp_group if cfg.ddp else None,
            bucket_cap_mb,
            overlapping_allreduce,
            backward_passes_per_step,
            average_grads_across_microbatches,
            broadcast_buffers,
        )
        state.model = self
        try:
            if cfg.pipeline_parallel_degree == 1:
                self._materialize(Placement(module, {"": 0}))
        except BaseException:
            # The script may create a model again.
            state.model = None
            raise

    # Partition.

    @property
    def is_partitioned(self) -> bool:
        """Whether the partition of every module is known."""
        return self._placement is not None

    @property
    def partitioned(self) -> bool:
        """The same as :attr:`is_partitioned`."""
        return self.is_partitioned

    def partition_of(self, module_path: str) -> int:
        """Return the partition of a module.

        Args:
            module_path: Path of the module in the model; ``""`` is the model itself.

        Returns:
            The partition, from 0.
        """
        return self.placement.of_path(module_path)

    @property
    def placement(self) -> Placement:
        """The partition of every module.

        Raises:
            SMPUsageError: The model is not partitioned yet.
        """
        if self._placement is None:
            raise SMPUsageError(
                "the model is partitioned in the first call of a `smp.step` function, which is still to come"
            )
        return self._placement

    def _partition_manually(self) -> None:
        """Partition the model if the script or a checkpoint assigns all modules, so that no trace is needed.

        A partition that failed in an earlier step is continued.
        """
        cfg = state.cfg
        if self._is_whole:
            return
        if self._placement is not None:
            with self.rng_state.own():
                self._finish_partitioning()
        elif self._assignment is not None or not (cfg.auto_partition or (cfg.load_partition and cfg.partition_file)):
            with self.rng_state.own():
                self._partition((), {})

    def _partition(self, args: Any, kwargs: Any) -> None:
        cfg = state.cfg
        if self._assignment is not None:
            self._materialize(Placement(self.module, {"": cfg.default_partition, **self._assignment}))
            return
        manual = manual_assignment(self.module)
        assignment = {"": cfg.default_partition, **manual}
        if cfg.auto_partition or (cfg.load_partition and cfg.partition_file):
            from smdistributed.modelparallel.torch.partitioning import assignment as assignments

            state.tracing = True
            try:
                found = assignments.auto_partition(
                    self.module,
                    args,
                    kwargs,
                    cfg,
                    manual,
                    measure_times=self._trace_execution_times,
                    memory_bytes=assignments.device_memory(),
                )
            except ValueError as error:
                raise SMPPartitionError(str(error)) from error
            finally:
                state.tracing = False
            if self._trace_execution_times:
                # Measured times differ between ranks, so those of the first rank are used.
                found = communication.allgather(found, CommGroup.WORLD)[0]
            # Assignments of the script take precedence, also for submodules.
            assignment = assignments.with_manual(self.module, found, manual, cfg)
        self._materialize(Placement(self.module, assignment))

    def _materialize(self, placement: Placement) -> None:
        """Keep this rank's part of the model, as ``placement`` assigns it."""
        groups, cfg = state.groups, state.cfg
        if cfg.partition_file and not cfg.load_partition:
            # Written first: if the file cannot be written, the model stays whole.
            decision = {path: placement.of_path(path) for path, _ in self.module.named_modules()}
            partition_file.write(cfg.partition_file, decision)
        device, replaced = current_device(), {}
        if groups.sharding is None or groups.pp_group is not None:
            replaced = materialize.materialize(self.module, placement, groups.rank_in("pp"), device, placement.shared)
        if groups.sharding is not None:
            assert groups.slice_sharding is not None
            self.sharded, sharded = shard_model(self.module, groups.sharding, groups.slice_sharding, cfg, device)
            replaced |= sharded
        self._placement = placement
        if state.optimizer is not None:
            state.optimizer._localize(replaced)
        self._finish_partitioning()

    def _finish_partitioning(self) -> None:
        """Complete the partition once each rank holds its parameters.

        Load deferred states, broadcast the values of the first replica and create the pipeline. If this fails, the
        next step retries it, so no step runs without it.
        """
        groups, cfg, device = state.groups, state.cfg, current_device()
        self._run_deferred()
        if groups.dp_group is not None:
            sliced = shards(self.module)
            # Shards have the values of the first replica already.
            tensors = self._local_tensors() if self.sharded is None else list(self.local_buffers())
            slices = [each for each in tensors if id(each) in sliced]
            others = [each for each in tensors if id(each) not in sliced]
            with errors.translated(CLASSES):
                materialize.broadcast(others, groups.dp_group, groups.members["dp"][0])
                if groups.rdp_group is not None:
                    materialize.broadcast(slices, groups.rdp_group, groups.members["rdp"][0])
            if state.optimizer is not None:
                state.optimizer._parameters_changed()
        if groups.tp_group is not None:
            streams.start()
        if groups.mp_group is not None or groups.sharding is not None:
            norms.follow_torch()
        if groups.pp_group is not None:
            bounds = cfg.active_microbatches, cfg.activation_memory_bytes
            parts = self.module, self.placement, groups, device, cfg.pipeline
            graphs = cfg.cuda_graphs, cfg.optimize == "memory"
            self.pipeline = Pipeline(*parts, *bounds, self.offloader, *graphs)
            self.pipeline.attribute_views.send_values()
        for hook in list(self.post_partition_hooks):
            call_hook(hook, self)

    def _run_deferred(self) -> None:
        """Run the actions that waited for the partition, in order; an action that fails stays in the list.

        Raises:
            SMPCheckpointError: An action failed in another replica; the same text on all ranks.
        """
        has_replicas = state.groups.dp_group is not None and state.groups.mp_group is not None
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
                # A state is loaded by all replicas or by none.
                answers = communication.allgather((None if failure is None else str(failure), is_left), CommGroup.WORLD)
                texts = [text for text, _ in answers if text is not None]
                if texts and str(failure) != texts[0]:
                    raise SMPCheckpointError(texts[0]) from failure
                is_left = any(more for _, more in answers)
            if failure is not None:
                raise failure

    def _set_assignment(self, assignment: Mapping[str, int]) -> None:
        """Set the partitions of a checkpoint, which are used when the model is partitioned."""
        self._assignment = dict(assignment)

    def _when_partitioned(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the partition; at once if the model is partitioned and no earlier action waits."""
        if self.is_partitioned and not self._deferred:
            action()
        else:
            self._deferred.append(action)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> Removable:
        """Call a hook after the model has been partitioned and before the first forward; at once if it is partitioned.

        Args:
            hook: Called as ``hook(model, optimizer)``, or with as many of both as it takes.

        Returns:
            A handle with ``remove()``.
        """
        if self.is_partitioned:
            call_hook(hook, self)
        self.post_partition_hooks.append(hook)
        return Removable(self.post_partition_hooks, hook)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> Removable:
        """Run ``hook(model, optimizer)`` once, when the next call of a ``smp.step`` function has ended.

        The model is partitioned by then and has its gradients, so the hook can load the state of the optimizer before
        the first ``optimizer.step()``.

        Args:
            hook: A function of both arguments, or of as many as it accepts.

        Returns:
            A handle whose ``remove()`` takes back a hook that has not run.
        """
        self.post_step_hooks.append(hook)
        return Removable(self.post_step_hooks, hook)

    # Forward and backward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with several partitions, only inside of a ``smp.step`` function.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The result of the model.

        Raises:
            SMPUsageError: The model must not be called here.
        """
        if self._half is not None:
            args, kwargs = half_model.cast_inputs((args, kwargs), self._half)
        if self._is_whole:
            if self.step_run is not None:
                raise SMPUsageError("the model is on CPUs, as a whole: there are no steps after `model.cpu()`")
        elif state.cfg.pipeline_parallel_degree > 1:
            if self.step_run is None:
                raise SMPUsageError("with several partitions, the model is called inside of `smp.step` functions")
            if self.pipeline is None:
                with self.rng_state.own():
                    self._partition(args, kwargs)
                self.step_run.model_was_partitioned()
        elif self.replicas.are_reduced and self.step_run is None and self.training and torch.is_grad_enabled():
            # Gradients of a backward outside of a step would not be reduced.
            raise SMPUsageError("with replicas, a model that is trained is called inside of `smp.step` functions")
        with contextlib.nullcontext() if self.sharded is None else self.sharded.running():
            output = self.module(*args, **kwargs)
        return output if self._half is None else half_model.cast_outputs(output, self._half)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Run ``torch.autograd.backward`` over all partitions.

        Args:
            tensors: A loss, or several tensors.
            grad_tensors: Their gradients; 1 for a loss.
        """
        run = self.step_run
        if state.optimizer is not None:
            state.optimizer._loss_is_scaled()
        if run is not None:
            run.has_backward = True
            if run.recording is not None:
                run.recording.backward(tensors, grad_tensors)
                return
        if state.cfg.pipeline_parallel_degree > 1:
            raise SMPUsageError("with several partitions, `model.backward` is called inside of `smp.step` functions")
        if self.replicas.are_reduced and run is None:
            raise SMPUsageError(
                "with replicas, `model.backward` is called inside of `smp.step` functions: outside, its gradients "
                "would not be reduced"
            )
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        gradients = [None] * len(tensors) if grad_tensors is None else grad_tensors
        gradients = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
        scale = state.loss_scale if run is None else run.scale
        if scale != 1.0:
            gradients = [
                torch.full_like(tensor, scale) if gradient is None else gradient * scale
                for tensor, gradient in zip(tensors, gradients, strict=True)
            ]
        torch.autograd.backward(tensors, gradients)

    def _call_post_step_hooks(self) -> None:
        """Call the hooks of :meth:`register_post_step_hook`, each once."""
        hooks, self.post_step_hooks[:] = list(self.post_step_hooks), ()
        for hook in hooks:
            call_hook(hook, self)

    # The part on this rank.

    def _local_tensors(self) -> list[torch.Tensor]:
        return [*self.local_parameters(), *self.local_buffers()]

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of this rank's partition, with their paths."""
        mine = state.groups.rank_in("pp")
        for path, module in self.module.named_modules():
            if self.placement.of(module) == mine:
                yield path, module

    def local_modules(self) -> Iterator[nn.Module]:
        """Yield the modules of this rank's partition."""
        for _, module in self.local_named_modules():
            yield module

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank holds, each once, with their names in the model."""
        self.placement  # noqa: B018 - raises before the partition
        for name, parameter in self.module.named_parameters():
            if not isinstance(parameter, MetaParameter):
                yield name, parameter

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank holds, each once."""
        for _, parameter in self.local_named_parameters():
            yield parameter

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parts of parameters that this rank updates, with the parameters' names.

        Without ``shard_optimizer_state``, these are the parameters that this rank holds.
        """
        shards = None if state.optimizer is None else state.optimizer._shards
        yield from self.local_named_parameters() if shards is None else shards.named()

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that this rank holds, each once, with their names in the model."""
        self.placement  # noqa: B018
        for name, buffer in self.module.named_buffers():
            if not isinstance(buffer, MetaParameter):
                yield name, buffer

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers that this rank holds, each once."""
        for _, buffer in self.local_named_buffers():
            yield buffer

    # State dicts; `checkpoint/state_dicts.py` gathers, splits and names the entries.

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return the state of the whole model on every rank of one replica, all of which call it.

        Args:
            gather_to_rank0: Whether only the first rank gets it; the others get an empty dict.

        Raises:
            SMPCheckpointError: A rank could not provide its part; raised on all ranks of the replica.
        """
        return state_dicts.full_model(self, gather_to_rank0)

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, marked by ``_smp_is_partial``."""
        return state_dicts.local_model(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> None:
        """Load a full state or this rank's part of one.

        Before the model is partitioned, the load waits for the partition. All ranks of one replica call it.

        Args:
            state_dict: The result of :meth:`state_dict` or :meth:`local_state_dict`, or a state of the unwrapped
            model.
            strict: Whether the names must be exactly those of the model.
            same_partition_load: Whether the part is known to be from the same partition.

        Raises:
            SMPCheckpointError: The state does not fit on some rank of the replica; raised on all of them, after all
            values that fit have been loaded.
        """
        found = dict(state_dict)
        self._when_partitioned(lambda: state_dicts.load_model(self, found, strict, same_partition_load))

    def get_module(self) -> nn.Module:
        """Return the model of the script."""
        return self.module

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """The first attribute that DistributedDataParallel reads, both PyTorch's and this package's."""
        raise SMPUsageError(
            "a `smp.DistributedModel` is not wrapped in DistributedDataParallel: with `ddp: true` it reduces gradients "
            "itself"
        )

    # Devices: a partition is on its rank's device, which the script cannot change.

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Change the type of parameters and buffers before the first step.

        Devices are ignored, because each partition is on its rank's device.

        Args:
            *args: Arguments of ``torch.nn.Module.to``.
            **kwargs: Keyword arguments of ``torch.nn.Module.to``.

        Returns:
            This model.

        Raises:
            SMPUnsupportedError: The model has been partitioned already.
        """
        _, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            if self.pipeline is not None:
                raise SMPUnsupportedError("the model is partitioned: change its type before the first step")
            self.module.to(dtype=dtype, non_blocking=non_blocking)
        return self

    def cuda(self, device: Any = None) -> DistributedModel:
        """Do nothing, because each partition is on its rank's device.

        Args:
            device: Ignored.

        Returns:
            This model.
        """
        del device
        return self

    def cpu(self) -> DistributedModel:
        """Gather the whole model on every rank of a pipeline, on CPUs; all of them call it. No step may follow."""
        if self.sharded is not None or state.groups.tp_group is not None:
            kind = "sharded" if self.sharded is not None else "tensor-parallel"
            raise SMPUnsupportedError(f"`model.cpu()` does not support {kind} parameters: use `model.state_dict()`")
        if self.pipeline is None:
            self.module.cpu()
            return self
        materialize.gather(self.module, communication.allgather(self._content(), CommGroup.PP_GROUP))
        self.pipeline.timeline.finish()
        self.pipeline, self._is_whole = None, True
        return self

    def _content(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().cpu()
            for name, tensor in (*self.local_named_parameters(), *self.local_named_buffers())
        }

    def join(self) -> Join:
        """Return a context, around all steps on all ranks, for replicas with different numbers of batches.

        A replica without a batch contributes zeros to the reductions of the others, and has their parameters at the
        end.
        """
        if not state.cfg.ddp:
            raise SMPUsageError("`join()` is for replicas: it needs the configuration's `ddp: true`")
        if state.cfg.shard_optimizer_state or self.sharded is not None:
            raise SMPUnsupportedError(
                "`join()` cannot be combined with sharded states: a replica without a batch would not update its part"
            )
        if state.groups.tp_group is not None:
            raise SMPUnsupportedError(
                f"`join()` with `tensor_parallel_degree` {state.cfg.tensor_parallel_degree}: ranks of a "
                "tensor-parallel group need each other in every step"
            )
        return Join(self, state.groups.dp_group)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook with which replicas reduce gradients from now on.

        Args:
            state: First argument of the hook.
            hook: Called as ``hook(state, bucket)``. It returns a future of the reduced buffer, averaged over replicas
                and over microbatches.

        Raises:
            SMPUsageError: There are no gradients to reduce, or they are reduced only after the step.
        """
        self.replicas.register_comm_hook(state, hook)

    _register_comm_hook = register_comm_hook

    # Tensor parallelism.

    def distributed_modules(self) -> Iterator[DistributedModule]:
        """Modules that are divided over the ranks of ``smp.get_tp_group()``."""
        for module in self.module.modules():
            if isinstance(module, DistributedModule):
                yield module

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether tensor parallelism divides a parameter.

        Args:
            parameter: The parameter.

        Returns:
            Whether this rank holds a slice of it.
        """
        return id(parameter) in shards(self.module)

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Return whether tensor parallelism divides a buffer.

        Args:
            buffer: The buffer.

        Returns:
            ``False``: no distributed module has buffers.
        """
        del buffer
        return False

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter works on the batch of the whole tensor-parallel group.

        Args:
            parameter: The parameter.

        Returns:
            Whether its gradients are averaged over the ranks of ``smp.get_rdp_group()``.
        """
        return id(parameter) in reduced_over_rdp(self.module)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Return whether a buffer works on the batch of the whole tensor-parallel group.

        Args:
            buffer: The buffer.

        Returns:
            ``False``: no distributed module has buffers.
        """
        del buffer
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank whose gradients are averaged over the ranks of ``smp.get_dp_group()``."""
        others = reduced_over_rdp(self.module)
        for name, parameter in self.local_named_parameters():
            if id(parameter) not in others:
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank whose gradients are averaged over the ranks of ``smp.get_rdp_group()``."""
        found = reduced_over_rdp(self.module)
        for name, parameter in self.local_named_parameters():
            if id(parameter) in found:
                yield name, parameter
