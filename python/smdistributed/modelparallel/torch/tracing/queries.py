"""Queries of a step's body that a tensor does not answer itself: versions, offsets, gradients, autograd's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.functions import (
    GRADIENT,
    GRADIENT_FUNCTION,
    GRAPH_READS,
    IS_LEAF,
    VERSION,
)
from smdistributed.modelparallel.torch.tracing.remote_tensor import (
    GraphNode,
    InvalidatedValue,
    RemoteTensor,
    version_of,
)
from smdistributed.modelparallel.torch.tracing.tasks import Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


def of_first_rank(recording: Recording, func: Any, tensor: torch.Tensor) -> int:
    """Return a replicated tensor's version or storage offset on the first rank, which other ranks may not have.

    Raises:
        SMPUsageError: The version is that of a tensor on a partition.
    """
    pipeline = recording.pipeline
    if not recording.is_located(tensor):
        if func != VERSION:
            return pipeline.from_first_rank(recording, func(tensor))
        is_written = pipeline.stale_storages.has_storage(tensor)
        version = pipeline.from_first_rank(recording, None if is_written else version_of(tensor))
        if version is None:
            raise SMPUsageError(
                "`_version` of a tensor, inside of a `smp.step` function, whose storage the function changes in "
                "place with values of a partition: these writes run when the function has returned"
            )
        return version
    if func == VERSION:
        raise SMPUsageError(
            "`_version` of a tensor on a partition, inside of a `smp.step` function: what changes it in place "
            "runs when the function has returned"
        )
    return tensor.value.offset if type(tensor) is RemoteTensor and type(tensor.value) is Value else func(tensor)


def set_requires_grad(recording: Recording, tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Freeze or unfreeze a parameter, as the body requests."""
    pipeline = recording.pipeline
    if tensor.requires_grad is not wanted:
        value = pipeline.located[id(tensor)]
        changing = pipeline.module_state.changing(tensor, "requires_grad", value.parameter)
        with changing, torch._C.DisableTorchFunctionSubclass():
            tensor.requires_grad_(wanted)
        recording.located[id(tensor)] = pipeline.relocate(tensor)
    return tensor


def of_graph(recording: Recording, func: Any, tensor: torch.Tensor) -> Any:
    """Answer a query of autograd's graph, which is created later on the partitions; ``None`` if the tensor knows it.

    Raises:
        SMPUsageError: The answer is not known yet.
    """
    value = tensor.value if type(tensor) is RemoteTensor else recording.located[id(tensor)]
    if isinstance(value, InvalidatedValue) or value.parameter is not None:
        value = None
    if func == IS_LEAF:
        return None if value is None else not value.meta.requires_grad
    if func == GRADIENT and not recording.copy_on_write.has_backward:
        return None
    if func == GRADIENT_FUNCTION:
        return GraphNode() if value is not None and value.meta.requires_grad else None
    raise SMPUsageError(
        f"`{GRAPH_READS[func]}` of a tensor on a partition, inside of a `smp.step` function: the graph is made, "
        "and gradients are there, when the function has returned"
    )
