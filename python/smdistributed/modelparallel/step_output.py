"""The sequence of a step's outputs, one for each microbatch, for any framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

Output = TypeVar("Output")


class MicrobatchOutputs(Generic[Output]):
    """One tensor that the body of a step returns, for each microbatch.

    Indexing, ``len`` and iteration go to the tensors.

    Attributes:
        outputs: The tensors, in the order of the microbatches.
    """

    outputs: list[Output]

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = list(outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> Output:
        return self.outputs[index]

    def __iter__(self) -> Iterator[Output]:
        return iter(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"

    def concat(self) -> Any:
        """Return the rows of all microbatches, one microbatch after the other along axis 0; scalars are stacked."""
        raise NotImplementedError

    def merge(self) -> Any:
        """Return :meth:`concat`; the name for predictions."""
        return self.concat()
