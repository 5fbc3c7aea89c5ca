"""Indexing by a replicated boolean mask, and repetition by replicated counts.

Every rank knows the shape of the result, because it has the values of the mask or of the counts.

- MSK-1: ``x[mask]`` is recorded as the equivalent ``x[mask.nonzero(as_tuple=True)]``. The shapes of the indices
  determine the shape of the result, so signatures and equal microbatches are found by shapes, as for any other
  operation. Indexing by a mask on a partition is a synchronous call, because the shape follows from its values.
- MSK-2: ``repeat_interleave`` is recorded with its ``output_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording

_GETITEM = torch.Tensor.__getitem__
_MASKED_SELECT = frozenset({torch.masked_select, torch.Tensor.masked_select})
#: Operations whose result's shape depends on a mask's values.
SELECTIONS = frozenset({_GETITEM, *_MASKED_SELECT})
#: Operations whose result's shape depends on counts.
REPETITIONS = frozenset({torch.repeat_interleave, torch.Tensor.repeat_interleave})


def with_output_size(recording: Recording, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments of a repetition, with the output size from replicated counts (MSK-2)."""
    if kwargs.get("output_size") is not None:
        return kwargs
    # ``repeat_interleave(repeats)`` is another overload.
    repeats = kwargs.get("repeats", args[min(len(args), 2) - 1] if args else None)
    if not isinstance(repeats, torch.Tensor) or recording.is_located(repeats) or repeats.dim() != 1:
        return kwargs
    if repeats.is_floating_point() or repeats.is_complex() or repeats.numel() < 2:
        return kwargs
    return {**kwargs, "output_size": int(repeats.sum())}


def with_indices(recording: Recording, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return a selection with replicated masks replaced by indices (MSK-1).

    Args:
        recording: Computes the indices.
        func: One of :data:`SELECTIONS`.
        args: Arguments of the selection.
        kwargs: Keyword arguments of the selection.

    Returns:
        The tensor and the index of an equal ``__getitem__``; ``None`` if there is no replicated mask, or PyTorch
        rejects the mask.
    """
    if func in _MASKED_SELECT:
        return _masked_select(recording, *args, **kwargs)
    tensor, index = args
    if not recording.is_located(tensor):
        return None
    items = index if isinstance(index, tuple) else (index,)
    if not any(_is_mask(recording, item) for item in items):
        return None
    taken = [_dimensions(recording, item) for item in items]
    if None in taken:
        return None
    rest = tensor.dim() - sum(count or 0 for count in taken)
    if rest < 0:
        return None
    place, found = 0, []
    for item, count in zip(items, taken, strict=True):
        if not _is_mask(recording, item):
            found.append(item)
            place += rest if item is Ellipsis else count or 0
            continue
        if item.shape != tensor.shape[place : place + item.dim()]:
            return None
        found += _indices(recording, item)
        place += item.dim()
    return tensor, tuple(found)


def _masked_select(recording: Recording, input: torch.Tensor, mask: Any, *, out: Any = None) -> tuple[Any, Any] | None:
    if out is not None or not recording.is_located(input) or not _is_mask(recording, mask):
        return None
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if input.shape != shape:
        input = recording.operation(torch.Tensor.expand, (input, shape), {})
    return input, tuple(_indices(recording, mask.expand(shape)))


def _is_mask(recording: Recording, item: Any) -> bool:
    """Return whether it is a replicated mask of at least one dimension."""
    return (
        isinstance(item, torch.Tensor)
        and item.dtype is torch.bool
        and item.dim() > 0
        and not recording.is_located(item)
    )


def _dimensions(recording: Recording, item: Any) -> int | None:
    """Return how many dimensions a part of an index uses, 0 for an ellipsis; ``None`` for unsupported parts."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor):
        if item.dtype not in (torch.bool, torch.uint8):
            return 1
        return item.dim() if _is_mask(recording, item) else None
    return 1 if isinstance(item, slice) or type(item) is int else None


def _indices(recording: Recording, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    indices: tuple[torch.Tensor, ...] = recording.operation(torch.Tensor.nonzero, (mask,), {"as_tuple": True})
    return indices
