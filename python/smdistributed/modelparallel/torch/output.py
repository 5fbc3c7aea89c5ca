"""The output of a step: the tensors of all microbatches."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.step_output import MicrobatchOutputs


class StepOutput(MicrobatchOutputs[torch.Tensor]):
    """One tensor that the body of the step returns, for each microbatch.

    Attributes:
        outputs: The tensors, in the order of the microbatches. Indexing, ``len`` and iteration go to them.
    """

    def reduce_mean(self) -> torch.Tensor:
        """Return the mean over the microbatches."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Return the sum over the microbatches."""
        return self.stack().sum(0)

    def concat(self) -> torch.Tensor:
        """Return the rows of all microbatches in their order, along dimension 0; scalars are stacked."""
        return self.stack() if self.outputs[0].dim() == 0 else torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Return the tensors stacked along a new dimension 0, that of the microbatches."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return the same output with tensors that have no graph; the Trainer of transformers 5 calls it."""
        return StepOutput([each.detach() for each in self.outputs])

    #: The name of the same method for TensorFlow.
    accumulate = reduce_mean
