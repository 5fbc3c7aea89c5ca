"""Buffers that the forward of a divided module replaces while a step is recorded.

- BUF-1: where the forward replaces a buffer by a tensor of the same shape and dtype, the buffer is written in place.
  Where it replaces a buffer by a cast of itself, the buffer stays and each microbatch casts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.functions import CASTS
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


def set_buffer(recording: Recording, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Handle a divided module's forward that assigns a located tensor to one of the module's buffers (BUF-1).

    Raises:
        SMPUsageError: The tensor has another shape or type than the buffer, or a graph.
    """
    buffer = module._buffers[name]
    assert buffer is not None
    known, new = (
        each.value if type(each) is RemoteTensor else recording.located[id(each)] for each in (buffer, tensor)
    )  # fmt: skip
    is_same_memory = new.storage is known.storage and new.offset == known.offset
    if is_same_memory and new.meta == known.meta:
        return
    producer = next((task for task in reversed(recording.tasks) if new in task.outputs), None)
    if producer is not None and producer.call in CASTS and producer.inputs == [known]:
        recording.cast_buffers.append((module, name, buffer))
        module._buffers[name] = tensor
        return
    path = f"{recording.pipeline.paths[id(module)]}.{name}".removeprefix(".")
    if type(buffer) is RemoteTensor or (new.meta.shape, new.meta.dtype) != (known.meta.shape, known.meta.dtype):
        raise SMPUsageError(
            f"the forward of a module that is spread over partitions replaces the buffer `{path}`, {known.meta}, "
            f"by {new.meta}: give the buffer this shape and dtype before the first step"
        )
    if new.meta.requires_grad:
        raise SMPUsageError(
            f"the forward of a module that is spread over partitions sets the buffer `{path}` to a tensor with a "
            "graph, through which the next microbatch cannot run backward: assign `tensor.detach()`"
        )
    recording.operation(torch.Tensor.copy_, (buffer, tensor), {})
