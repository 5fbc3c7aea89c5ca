"""The part of a parameter that the optimizer of this rank updates."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Elements of a flattened parameter.

    Attributes:
        name: The parameter's name in the model.
        start: First element.
        end: One past the last.
        shape: The parameter's shape.
        is_shard: Whether other ranks hold the rest. The optimizer's tensor is then one-dimensional and may be padded.
    """

    name: str
    start: int
    end: int
    shape: tuple[int, ...]
    is_shard: bool

    @classmethod
    def whole(cls, name: str, parameter: torch.Tensor) -> Piece:
        """Return the piece of a parameter that is not sharded."""
        return cls(name, 0, parameter.numel(), tuple(parameter.shape), False)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of ``value``, a tensor like the whole parameter."""
        return value.reshape(-1)[self.start : self.end] if self.is_shard else value

    def padded(self, value: torch.Tensor, elems: int) -> torch.Tensor:
        """Return this rank's elements followed by zeros, like the optimizer's tensor of ``elems`` elements."""
        if not self.is_shard or value.dim() != 1 or value.numel() != self.end - self.start:
            return value
        return torch.nn.functional.pad(value, (0, elems - value.numel()))

    def trimmed(self, value: torch.Tensor, elems: int) -> torch.Tensor:
        """Return the elements of a tensor like the optimizer's without its padding."""
        if not self.is_shard or value.dim() != 1 or value.numel() != elems:
            return value
        return value[: self.end - self.start]
