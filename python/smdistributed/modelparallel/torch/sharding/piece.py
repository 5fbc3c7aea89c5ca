"""The part of a parameter that an optimizer sees on this rank."""

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
        is_shard: Whether other ranks hold the rest; the optimizer's tensor is one-dimensional then, and may be padded.
    """

    name: str
    start: int
    end: int
    shape: tuple[int, ...]
    is_shard: bool

    @classmethod
    def whole(cls, name: str, parameter: torch.Tensor) -> Piece:
        """The piece of a parameter that is not sharded."""
        return cls(name, 0, parameter.numel(), tuple(parameter.shape), False)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, a tensor like the whole parameter, as this rank's elements of it."""
        return value.reshape(-1)[self.start : self.end] if self.is_shard else value

    def padded(self, value: torch.Tensor, elems: int) -> torch.Tensor:
        """This rank's elements with zeros behind them, as the optimizer's tensor of so many elements has."""
        if not self.is_shard or value.dim() != 1 or value.numel() != self.end - self.start:
            return value
        return torch.nn.functional.pad(value, (0, elems - value.numel()))

    def trimmed(self, value: torch.Tensor, elems: int) -> torch.Tensor:
        """The opposite: a tensor like the optimizer's of so many elements, without its padding."""
        if not self.is_shard or value.dim() != 1 or value.numel() != elems:
            return value
        return value[: self.end - self.start]
