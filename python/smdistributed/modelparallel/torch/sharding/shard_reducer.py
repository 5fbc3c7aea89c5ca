"""Gradient reduction to shards, at the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from smdistributed import _core
from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.runtime.executor import Microbatch
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.sharding.optimizer_shards import OptimizerShards
from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel
from smdistributed.modelparallel.torch.state import state

Named = Iterable[tuple[str, torch.Tensor]]


class ShardReducer:
    """Reduces each gradient to the rank that updates it; the interface of ``GradientReducer``.

    Args:
        passes: Number of steps with a backward after which gradients are reduced.
    """

    def __init__(self, passes: int) -> None:
        self._passes, self._steps = passes, 0
        #: Whether the next step reduces gradients; ``None``: as ``passes`` says.
        self.reduces_next: bool | None = None

    @property
    def hook(self) -> tuple[object, Callable[..., object]] | None:
        """Return ``None``: hooks need buckets of whole gradients."""
        return None

    def begin_step(self) -> None:
        """Begin to accumulate gradients after a reduction."""
        if state.model is not None and state.model.sharded is not None:
            state.model.sharded.begin_step()
        elif state.optimizer is not None and state.optimizer._shards is not None:
            state.optimizer._shards.begin_step()

    def begin(self, pipeline: Pipeline, parameters: Named) -> None:
        """Begin a step of a pipeline."""
        del pipeline, parameters
        _target()

    def on_stage_done(self, number: int, last: Microbatch) -> None:
        """Do nothing: gradients are reduced at the end of the step."""

    def finish(self) -> None:
        """Reduce gradients over replicas, unless this step only accumulates them."""
        if state.model is not None and state.model.sharded is not None:
            state.model.sharded.finish_backward()
        self._steps += 1
        reduces, self.reduces_next = self.reduces_next, None
        if self._steps % self._passes == 0 if reduces is None else reduces:
            target = _target()
            if isinstance(target, OptimizerShards):
                _core.note_fallback("reduced_after_backward")
                warn_once(
                    "`shard_optimizer_state` reduces all gradients after the backward of a step, and other ranks wait "
                    "for that: `sharded_data_parallel_degree` reduces them during the backward"
                )
            target.reduce_gradients()

    def cancel(self) -> None:
        """Do nothing: the peers of a failed rank get an error in their reduction."""

    def reduce(self, parameters: Named) -> None:
        """Reduce gradients after a step without a pipeline."""
        del parameters
        self.finish()


def _target() -> OptimizerShards | ShardedModel:
    """Return the object that reduces gradients: that of sharded parameters, or of sharded optimizer states."""
    model, optimizer = state.model, state.optimizer
    if model is not None and model.sharded is not None:
        return model.sharded
    if optimizer is None or optimizer._shards is None:
        raise SMPUsageError(
            "`shard_optimizer_state` reduces gradients to the ranks that update them: wrap the optimizer in "
            "`smp.DistributedOptimizer` before the first step with a backward"
        )
    return optimizer._shards
