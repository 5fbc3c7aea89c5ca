"""What a step returns: the tensors of all microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


class StepOutput:
    """One tensor that the body of the step returns, for each microbatch.

    Attributes:
        outputs: The tensors, in the order of the microbatches. Indexing, ``len`` and iteration go to them.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.outputs[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"

    def reduce_mean(self) -> torch.Tensor:
        """Their mean."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Their sum."""
        return self.stack().sum(0)

    def concat(self) -> torch.Tensor:
        """All rows of dimension 0, one microbatch after the other; of numbers, a tensor of them."""
        return self.stack() if self.outputs[0].dim() == 0 else torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """With a new dimension 0, of the microbatches."""
        return torch.stack(self.outputs)

    #: The names of the same in TensorFlow.
    merge = concat
    accumulate = reduce_mean
