"""Elastic training, which continues when workers fail or join: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.common.elastic import run_fn
from horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from horovod.torch.elastic.state import TorchState as TorchState
from horovod.torch.mpi_ops import init, shutdown


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it continues after workers fail, leave or join.

    The function's first argument is a state. After a worker has failed, the function is called again with the state of
    the last commit. After hosts have joined or left, it is called again with the current state.

    Args:
        func: The training function.

    Returns:
        The decorated function, which returns what ``func`` returns.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, 10):
        ...         train_epoch(state.model, state.optimizer)
        ...         state.commit()
        >>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
