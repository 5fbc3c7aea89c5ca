"""The slice of a parameter that a rank of the tensor-parallel group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """A parameter that is divided along one dimension into equal slices.

    If the size is not divisible, the last slices end with rows of padding that no computation uses. Slices of equal
    shape cost the same on all ranks, so all ranks compute the same pipeline schedule.

    Attributes:
        dim: The dimension.
        size: The size of the whole parameter in this dimension, without padding.
        count: The number of slices.
    """

    dim: int
    size: int
    count: int

    @property
    def local_size(self) -> int:
        """The size of a slice, with padding."""
        return -(-self.size // self.count)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the bounds of a rank's slice, without padding.

        Args:
            rank: Rank in the group.

        Returns:
            First index, and one past the last index.
        """
        begin = min(rank * self.local_size, self.size)
        return begin, min(begin + self.local_size, self.size)

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the slice of a rank, with padding of zeros.

        Args:
            whole: The whole tensor.
            rank: Rank in the group.

        Returns:
            The slice.
        """
        begin, end = self.bounds(rank)
        part = whole.narrow(self.dim, begin, end - begin)
        if end - begin < self.local_size:
            shape = list(whole.shape)
            shape[self.dim] = self.local_size - (end - begin)
            part = torch.cat([part, part.new_zeros(shape)], self.dim)
        return part

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge slices, without padding.

        Args:
            parts: The slices of all ranks, in order.

        Returns:
            The whole tensor.
        """
        return torch.cat(list(parts), self.dim).narrow(self.dim, 0, self.size)

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Args:
            local: The shape of a slice.

        Returns:
            The shape.
        """
        return (*local[: self.dim], self.size, *local[self.dim + 1 :])

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a slice, with padding.

        Args:
            whole: The shape of the whole.

        Returns:
            The shape.
        """
        return (*whole[: self.dim], self.local_size, *whole[self.dim + 1 :])
