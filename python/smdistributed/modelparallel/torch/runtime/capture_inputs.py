"""Memory at fixed addresses for what captured stages take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.tracing.placeholders import UnreadTensor
from smdistributed.modelparallel.torch.tracing.tasks import Task


class Buffer:
    """Memory at a fixed address for tensors of one shape. Strides of 0 stay, as in masks that were expanded."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
        self._stride = list(stride)
        self._memory = torch.empty_strided(self._shape, self._stride, dtype=dtype, device=device)
        self.tensor = self._memory.expand(shape)

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Buffer:
        """Return memory for tensors like this one."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of this shape."""
        with torch.no_grad():
            # Of a dimension with stride 0, all places are equal; the tensor may have other strides.
            self._memory.copy_(tensor[tuple(slice(size) for size in self._shape)])


class Replicated(NamedTuple):
    """The replicated tensors among the arguments of a stage's tasks.

    Attributes:
        tensors: Each tensor once.
        places: For each place among the arguments, the tensor's number.
    """

    tensors: list[torch.Tensor]
    places: list[int]

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Replicated:
        """Return those of the tasks of one microbatch."""
        numbers: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        places = []
        for task in tasks:
            if not may_take_replicated(task):
                continue
            for leaf in task.leaves():
                if is_replicated(leaf):
                    if id(leaf) not in numbers:
                        numbers[id(leaf)] = len(tensors)
                        tensors.append(leaf)
                    places.append(numbers[id(leaf)])
        return cls(tensors, places)

    def layout(self) -> tuple[Any, ...]:
        """Return a key that is equal where the same graph fits."""
        return (*self.places, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in self.tensors))


def may_take_replicated(task: Task) -> bool:
    """Return whether replicated tensors may be among the arguments of a task."""
    return not task.plan or task.plan.has_replicated


def is_replicated(leaf: Any) -> bool:
    """Return whether a leaf of a task's arguments is a tensor that every rank has."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, UnreadTensor)
