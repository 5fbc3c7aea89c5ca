"""Small functions that published scripts import."""

from __future__ import annotations

import torch

from smdistributed import _core
from smdistributed.modelparallel.torch.nn.module import shards
from smdistributed.modelparallel.torch.state import state


def rmsg(message: object) -> str:
    """Return a log message with the rank in front.

    Args:
        message: The message.

    Returns:
        The text; with the global rank, once the job has been initialized.
    """
    return f"[{_core.rank()}] {message}" if _core.is_initialized() else str(message)


def get_distribution_axis(parameter: torch.Tensor) -> int | None:
    """Return the dimension along which tensor parallelism divides a parameter.

    Args:
        parameter: A parameter of the wrapped model.

    Returns:
        The dimension; ``None`` if every rank of the tensor-parallel group has the whole parameter.
    """
    shard = shards(state.require_model().module).get(id(parameter))
    return None if shard is None else shard.dim
