"""Splits a step's arguments into those of its microbatches."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel import splitting
from smdistributed.modelparallel.exceptions import SMPValidationError


def split(value: Any, name: str, microbatches: int, axis: int, keep: bool) -> list[Any]:
    """Return ``value`` for each microbatch: tensors in it are split along ``axis`` unless ``keep``.

    Args:
        value: An argument of the step, or a part of one.
        name: Its name in errors.
        microbatches: The number of pieces.
        axis: The batch's axis.
        keep: Whether every microbatch gets the whole value.

    Raises:
        SMPValidationError: A tensor cannot be split into equal pieces.
    """

    def split_tensor(item: Any, item_name: str) -> list[Any] | None:
        if isinstance(item, torch.utils.data.DataLoader):
            raise SMPValidationError(f"`{item_name}` is a DataLoader: pass its batches")
        return _pieces(item, item_name, microbatches, axis) if isinstance(item, torch.Tensor) else None

    return splitting.split(value, name, microbatches, axis, keep, split_tensor)


def _pieces(tensor: torch.Tensor, name: str, microbatches: int, axis: int) -> list[torch.Tensor]:
    if tensor.dim() == 0:
        raise SMPValidationError(f"`{name}` has no axis to split: name it in `non_split_inputs`")
    if not -tensor.dim() <= axis < tensor.dim():
        raise SMPValidationError(f"`{name}` has {tensor.dim()} axes, and its `input_split_axes` is {axis}")
    size = tensor.shape[axis]
    if size % microbatches:
        raise SMPValidationError(
            f"`{name}` has {size} rows along axis {axis}, which {microbatches} microbatches cannot divide evenly"
        )
    if microbatches == 1:
        return [tensor]
    return list(tensor.chunk(microbatches, axis)) if size else [tensor] * microbatches
