"""Data parallelism of a partitioned model: the exchange between ranks that hold the same partition."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.torch.join import TRAINING, Join
from smdistributed.modelparallel.torch.partitioning import materialize
from smdistributed.modelparallel.torch.runtime.executor import Microbatch
from smdistributed.modelparallel.torch.runtime.failures import reporting_failures
from smdistributed.modelparallel.torch.runtime.gradients import BackwardOverlap, GradientReducer
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
        has_stages = state.cfg.pipeline_parallel_degree > 1
        if group is not None and (state.cfg.shard_optimizer_state or state.cfg.sharded_data_parallel_degree > 1):
            self._reducer = ShardReducer(passes)
        elif group is not None:
            self._reducer = GradientReducer(group, bucket_cap_mb, overlapping, passes, has_stages)
        self._has_rdp_group = rdp_group is not group
        #: The reducer of gradients that are averaged over `rdp_group`, if that is another group.
        self._rdp_reducer: GradientReducer | None = None
        # Reducers of sharded gradients store the group of each parameter.
        if self._has_rdp_group and rdp_group is not None and not isinstance(self._reducer, ShardReducer):
            self._rdp_reducer = GradientReducer(rdp_group, bucket_cap_mb, overlapping, passes, has_stages)
        overlaps = overlapping and not has_stages and isinstance(self._reducer, GradientReducer)
        self._overlap = BackwardOverlap() if overlaps else None
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

    def begin_step_alone(self, step: Hashable) -> None:
        """Begin a call of a step function with one partition."""
        if self._overlap is not None:
            self._overlap.begin_step(step)

    def run_last_backward(self, model: DistributedModel, run: Callable[[], None]) -> None:
        """Run a backward of the last microbatch of a step with one partition, and reduce its gradients (GRA-2)."""
        if self._active_overlap is None:
            run()
        else:
            self._active_overlap.backward(run, cast("list[tuple[GradientReducer, Any]]", self._reducers(model)))

    def cancel_step_alone(self) -> None:
        """End a failed step with one partition."""
        if self._overlap is not None:
            self._overlap.cancel()

    def reduce(self, model: DistributedModel) -> None:
        """Reduce all gradients that are not reduced yet, after a step with one partition."""
        overlap = self._active_overlap
        is_reduced, has_changed = (False, False) if overlap is None else overlap.end_step()
        if not is_reduced:
            for reducer, parameters in self._reducers(model):
                reducer.reduce(parameters)
        if overlap is None or not all(reducer.has_reduced for reducer in self._gradient_reducers()):
            return
        # A body may have changed gradients after they were reduced (GRA-2).
        late = torch.tensor([int(is_reduced and has_changed)], dtype=torch.int32, device="cpu")
        dist.all_reduce(late, ReduceOp.MAX, self._group)
        if late.item():
            for reducer in self._gradient_reducers():
                reducer.reduce_again()

    @property
    def _active_overlap(self) -> BackwardOverlap | None:
        """What reduces gradients during backwards; ``None`` in ``model.join()``, and with a communication hook."""
        has_hook = self._reducer is not None and self._reducer.hook is not None
        return None if has_hook or self.join_context is not None else self._overlap

    def _gradient_reducers(self) -> list[GradientReducer]:
        return [each for each in (self._reducer, self._rdp_reducer) if isinstance(each, GradientReducer)]

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


def _nothing(stage: int, last: Microbatch) -> None:
    """Do nothing when a stage is done: without replicas, gradients are not reduced."""
