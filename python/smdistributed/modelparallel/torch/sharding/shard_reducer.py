"""Gradient reduction for sharded optimizer states, at the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph
from smdistributed.modelparallel.torch.sharding.optimizer_shards import OptimizerShards
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.recording import Recording

Named = Iterable[tuple[str, torch.Tensor]]


class ShardReducer:
    """Reduces each gradient to the rank that updates it; the interface of ``GradientReducer``.

    Args:
        passes: After how many steps with a backward gradients are reduced.
    """

    def __init__(self, passes: int) -> None:
        self._passes, self._steps = passes, 0

    @property
    def hook(self) -> tuple[object, Callable[..., object]] | None:
        """There is none: hooks see buckets of whole gradients."""
        return None

    def begin_step(self) -> None:
        """Begins to accumulate gradients after a reduction."""
        if state.optimizer is not None and state.optimizer._shards is not None:
            state.optimizer._shards.begin()

    def begin(self, pipeline: Pipeline, recordings: Sequence[Recording], parameters: Named) -> None:
        """Begins a step of a pipeline."""
        del pipeline, recordings, parameters
        _shards()

    def on_stage_done(self, number: int, graph: StageGraph) -> None:
        """Does nothing: gradients are reduced at the end of the step."""

    def finish(self) -> None:
        """Reduces gradients, unless this step only accumulates them."""
        self._steps += 1
        if self._steps % self._passes == 0:
            _shards().reduce()

    def cancel(self) -> None:
        """Does nothing: a failed rank's peers fail in their reduction."""

    def reduce(self, parameters: Named) -> None:
        """Reduces gradients after a step without a pipeline."""
        del parameters
        self.finish()


def _shards() -> OptimizerShards:
    if state.optimizer is None or state.optimizer._shards is None:
        raise SMPUsageError(
            "`shard_optimizer_state` reduces gradients to the ranks that update them: wrap the optimizer in "
            "`smp.DistributedOptimizer` before the first step with a backward"
        )
    return state.optimizer._shards
