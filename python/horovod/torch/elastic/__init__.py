"""Training that goes on when workers die or come: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.common.elastic import run_fn
from horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from horovod.torch.elastic.state import TorchState as TorchState
from horovod.torch.mpi_ops import init, shutdown


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function whose first argument is a state: it is called again, with the state of the last commit,
    after a worker has failed, and with the state as it is after hosts have come or gone.

    Args:
        func: Trains; what it returns is returned.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
