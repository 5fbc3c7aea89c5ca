"""From the arguments of a step to those of its microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPValidationError


def split(value: Any, name: str, microbatches: int, axis: int, keep: bool) -> list[Any]:
    """``value`` for each microbatch: tensors in it are cut along ``axis`` unless ``keep``.

    Args:
        value: An argument of the step, or a part of one.
        name: For messages.
        microbatches: How many pieces.
        axis: The batch's.
        keep: Whether every microbatch gets the whole.

    Raises:
        SMPValidationError: it cannot be cut into equal pieces.
    """
    if keep or value is None:
        return [value] * microbatches
    if isinstance(value, torch.Tensor):
        return _pieces(value, name, microbatches, axis)
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(microbatches, index, axis) for index in range(microbatches)]
    if isinstance(value, torch.utils.data.DataLoader):
        raise SMPValidationError(f"`{name}` is a DataLoader: pass its batches")
    if isinstance(value, Mapping) and isinstance(value, dict):
        parts = {key: split(item, f"{name}[{key!r}]", microbatches, axis, False) for key, item in value.items()}
        return [_rebuilt(value, {key: part[index] for key, part in parts.items()}) for index in range(microbatches)]
    if isinstance(value, tuple | list):
        items = [split(item, f"{name}[{place}]", microbatches, axis, False) for place, item in enumerate(value)]
        rows = [[item[index] for item in items] for index in range(microbatches)]
        if hasattr(value, "_fields"):
            return [type(value)(*row) for row in rows]
        return [type(value)(row) for row in rows]
    if isinstance(value, set | frozenset):
        items = [split(item, name, microbatches, axis, False) for item in value]
        return [type(value)(item[index] for item in items) for index in range(microbatches)]
    return [value] * microbatches


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


def _rebuilt(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except TypeError:
        return items


def check_names(names: Collection[str], parameters: Collection[str], what: str) -> None:
    """Refuses names that the function does not have."""
    for name in names:
        if name not in parameters:
            raise SMPValidationError(f"`{what}` names `{name}`, which is no parameter of the function")
