"""Data parallelism of a partitioned model: the exchange between ranks that hold the same partition."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.torch.join import TRAINING, Join
from smdistributed.modelparallel.torch.partitioning import materialize
from smdistributed.modelparallel.torch.runtime.executor import Microbatch
from smdistributed.modelparallel.torch.runtime.failures import reporting_failures
from smdistributed.modelparallel.torch.runtime.fallbacks import script_level
from smdistributed.modelparallel.torch.runtime.gradients import GradientReducer
from smdistributed.modelparallel.torch.runtime.overlapped_run import OverlappedRun
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.sharding.shard_reducer import ShardReducer
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.tasks import Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel


class Replicas:
    """Averages gradients over the replicas of this rank's partition, and keeps their buffers equal.

    Args:
        group: The ranks that hold the same partition; ``None`` if nothing is reduced.
        rdp_group: The ranks among these that hold the same slices; gradients that are complete on each
        tensor-parallel rank are averaged over them.
        bucket_cap_mb: The size of a gradient bucket in MiB.
        overlapping: Whether buckets are reduced while backward continues.
        passes: Number of steps with a backward after which gradients are reduced.
        average: Whether gradients are averaged over the microbatches, instead of summed.
        broadcast_buffers: Whether the first replica's buffers are broadcast before each step.

    Attributes:
        join_context: The ``model.join()`` context that is open, if there is one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rdp_group: dist.ProcessGroup | None,
        bucket_cap_mb: float,
        overlapping: bool,
        passes: int,
        average: bool,
        broadcast_buffers: bool,
    ) -> None:
        self._group, self._overlapping = group, overlapping
        self._average, self._broadcast_buffers = average, broadcast_buffers
        self._reducer: GradientReducer | ShardReducer | None = None
        if group is not None and (state.cfg.shard_optimizer_state or state.cfg.sharded_data_parallel_degree > 1):
            self._reducer = ShardReducer(passes)
        elif group is not None:
            self._reducer = GradientReducer(group, bucket_cap_mb, overlapping, passes)
        self._has_rdp_group = rdp_group is not group
        #: The reducer of gradients that are averaged over `rdp_group`, if that is another group.
        self._rdp_reducer: GradientReducer | None = None
        # Reducers of sharded gradients store the group of each parameter.
        if self._has_rdp_group and rdp_group is not None and not isinstance(self._reducer, ShardReducer):
            self._rdp_reducer = GradientReducer(rdp_group, bucket_cap_mb, overlapping, passes)
        self.join_context: Join | None = None

    @property
    def are_reduced(self) -> bool:
        """Return whether there are other replicas, with which gradients are reduced."""
        return self._reducer is not None

    def gradient_scale(self, microbatches: int) -> float:
        """Return the factor of each microbatch's gradients. A communication hook averages over microbatches itself."""
        has_hook = self._reducer is not None and self._reducer.hook is not None
        return 1.0 / microbatches if self._average and not has_hook else 1.0

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register the only communication hook; see ``DistributedModel.register_comm_hook``."""
        if isinstance(self._reducer, ShardReducer):
            raise SMPUnsupportedError(
                "`register_comm_hook()` cannot be combined with sharded states: gradients are reduced to shards"
            )
        if self._reducer is None or not self._overlapping:
            raise SMPUsageError(
                "`register_comm_hook()` needs the configuration's `ddp: true`, replicas, and "
                "`overlapping_allreduce=True`"
            )
        if self._has_rdp_group:
            raise SMPUnsupportedError(
                "`register_comm_hook()` with `tensor_parallel_degree` above 1: gradients are averaged over two groups, "
                "but a hook gets one"
            )
        if self._reducer.hook is not None:
            raise SMPUsageError("a communication hook was registered before")
        self._reducer.hook = (state, hook)

    def reduce_in_next_step(self, reduces: bool) -> None:
        """Choose whether the next step with a backward reduces gradients, instead of counting such steps."""
        for reducer in (self._reducer, self._rdp_reducer):
            if reducer is not None:
                reducer.reduces_next = reduces

    def sync_buffers(self, model: DistributedModel) -> None:
        """Begin a step: broadcast the buffers of the first replica that has a batch."""
        if isinstance(self._reducer, ShardReducer):
            self._reducer.begin_step()
        training = TRAINING * model.training
        self.sync_buffers_from(model, [1 + training] if self.join_context is None else self.join_context.round(True))

    def sync_buffers_from(self, model: DistributedModel, active: Sequence[int]) -> None:
        """Copy the buffers of the first active replica, if that replica is in training mode.

        ``active`` is the result of ``Join.round``.
        """
        first = next(place for place, flag in enumerate(active) if flag)
        if self._broadcast_buffers and self._group is not None and model.is_partitioned and active[first] & TRAINING:
            source = state.groups.members["dp"][first]
            materialize.broadcast(list(model.local_buffers()), self._group, source)

    def copy_state_from(self, model: DistributedModel, active: Sequence[int]) -> None:
        """Copy the parameters and buffers of the first active replica."""
        if any(active) and model.is_partitioned and self._group is not None:
            source = state.groups.members["dp"][next(place for place, flag in enumerate(active) if flag)]
            materialize.broadcast([*model.local_parameters(), *model.local_buffers()], self._group, source)

    def must_reduce(self, has_backward: bool) -> bool:
        """Return whether gradients are reduced in this step. Inside of ``model.join()``, the replicas exchange that."""
        return has_backward if self.join_context is None else any(self.join_context.round(has_backward))

    def join_shadow(self, model: DistributedModel) -> None:
        """Take part in the reduction of the other replicas' gradients without own gradients."""
        assert isinstance(self._reducer, GradientReducer)
        self._reducer.join_shadow(model.local_named_parameters())

    def reduce(self, model: DistributedModel) -> None:
        """Reduce all gradients, after a step with one partition."""
        if self._overlapping and isinstance(self._reducer, GradientReducer):
            _core.note_fallback("reduced_after_backward")
            _warn_of_one_partition()
        for reducer, parameters in self._reducers(model):
            reducer.reduce(parameters)

    def _reducers(
        self, model: DistributedModel
    ) -> list[tuple[GradientReducer | ShardReducer, list[tuple[str, torch.Tensor]]]]:
        """Return each reducer with its parameters."""
        assert self._reducer is not None
        found: list[tuple[GradientReducer | ShardReducer, list[tuple[str, torch.Tensor]]]] = [
            (self._reducer, list(model.default_reducer_named_parameters()))
        ]
        if self._rdp_reducer is not None:
            found.append((self._rdp_reducer, list(model.scaled_batch_reducer_named_parameters())))
        return found

    def run_pipeline(
        self,
        model: DistributedModel,
        pipeline: Pipeline,
        recordings: Sequence[Recording],
        returned: Sequence[Sequence[Value]],
        scale: float,
        has_backward: bool,
        overlapped: OverlappedRun | None,
    ) -> list[Microbatch]:
        """Execute the recorded microbatches, including those that ``overlapped`` has begun.

        Gradients are reduced as soon as the last backward has left each stage.
        """
        if self._reducer is None or not self.must_reduce(has_backward):
            return pipeline.run(recordings, returned, scale, _nothing, overlapped)
        begun: list[GradientReducer | ShardReducer] = []

        def on_stage_done(stage: int, last: Microbatch) -> None:
            for reducer in begun:
                reducer.on_stage_done(stage, last)

        try:
            # Ranks of other partitions, which do not take part in these reductions, wait for this one's messages.
            with reporting_failures():
                for reducer, parameters in self._reducers(model):
                    reducer.begin(pipeline, parameters)
                    begun.append(reducer)
            microbatches = pipeline.run(recordings, returned, scale, on_stage_done, overlapped)
            with reporting_failures():
                for reducer in begun:
                    reducer.finish()
        except BaseException:
            for reducer in begun:
                reducer.cancel()
            raise
        return microbatches

    def watch_late_backward(self, model: DistributedModel, tensor: torch.Tensor) -> None:
        """Reject a later backward of a tensor that a step has returned: its gradients would not be reduced."""
        if self._reducer is None or not model.training or tensor.grad_fn is None:
            return

        def refuse(gradient: torch.Tensor) -> None:
            del gradient
            if model.step_run is None:
                raise SMPUsageError(
                    "backward of an output of a `smp.step` function after that function has ended: the gradients would "
                    "not be reduced over the replicas; call `model.backward` inside of the function"
                )

        tensor.register_hook(refuse)


@functools.cache
def _warn_of_one_partition() -> None:
    warnings.warn(
        "with one partition, gradients are reduced when a step has ended, not during its backward: "
        "`smdistributed.dataparallel` and `sharded_data_parallel_degree` reduce them during the backward. "
        "`overlapping_allreduce=False` omits this warning",
        stacklevel=script_level(),
    )


def _nothing(stage: int, last: Microbatch) -> None:
    """Do nothing when a stage is done: without replicas, gradients are not reduced."""
