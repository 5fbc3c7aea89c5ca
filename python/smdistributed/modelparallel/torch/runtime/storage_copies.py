"""Copies of tensors that share a storage, which share a storage again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta


class StoragePart(NamedTuple):
    """A tensor, with its shape and strides in the storage, and its offset there in elements."""

    tensor: torch.Tensor
    meta: TensorMeta
    offset: int

    @property
    def end(self) -> int:
        """Return the offset after the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.meta.shape, self.meta.stride, strict=True))
        return self.offset + last + 1 if 0 not in self.meta.shape else self.offset


def is_whole(base: StoragePart, views: Sequence[StoragePart]) -> bool:
    """Return whether a tensor without gaps between its elements contains all views."""
    size = torch.Size(base.meta.shape).numel()
    return base.end - base.offset == size and all(base.offset <= view.offset and view.end <= base.end for view in views)


def copied(parts: Sequence[StoragePart]) -> list[torch.Tensor]:
    """Return copies of tensors that share a storage; gradients go to the first one that has an element.

    Raises:
        SMPError: Some tensors have a part of their elements in common.
    """
    begin, end = min(part.offset for part in parts), max(part.end for part in parts)
    first = parts[0].tensor
    whole = torch.zeros(end - begin, dtype=first.dtype, device=first.device)
    known = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    for part in sorted(parts, key=lambda part: not part.meta.requires_grad):
        geometry = part.meta.shape, part.meta.stride, part.offset - begin
        elements = known.as_strided(*geometry)
        if elements.all():
            continue
        if elements.any():
            raise SMPError(
                "a task writes in place to a tensor, and another partition computes between the write and the call of "
                f"a module that returned it together with one that shares some of its elements, {part.meta}: write to "
                "a copy"
            )
        whole.as_strided(*geometry).copy_(part.tensor)
        elements.fill_(True)
    plain = whole.detach()
    return [
        (whole if part.meta.requires_grad else plain).as_strided(part.meta.shape, part.meta.stride, part.offset - begin)
        for part in parts
    ]
