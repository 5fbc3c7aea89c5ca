"""Cross entropy of logits that are divided by vocabulary and never gathered."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.modelparallel.torch.nn import collectives


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Computes the losses of tokens from slices of their logits; all ranks have all tokens.

    The scheme of Megatron-LM (Shoeybi et al., 2019, section 3), with three all-reduces of one number a token.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, begin: int) -> torch.Tensor:
        tokens, width = logits.shape
        # In a small vocabulary, the slice of the last ranks may be padding only.
        largest = logits.amax(1) if width else logits.new_full((tokens,), -torch.inf)
        shifted = logits - collectives.all_reduce(largest, ReduceOp.MAX)[:, None]
        powers = shifted.exp()
        sums = collectives.all_reduce(powers.sum(1))
        local = targets - begin
        is_here = (local >= 0) & (local < width)
        local = local.masked_fill(~is_here, 0)
        own = shifted.gather(1, local[:, None])[:, 0] if width else logits.new_zeros(tokens)
        found = collectives.all_reduce(own.masked_fill(~is_here, 0.0))
        ctx.save_for_backward(powers.div_(sums[:, None]), local, is_here)
        return sums.log() - found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, local, is_here = ctx.saved_tensors
        result = probabilities * gradient[:, None]
        if result.shape[1]:
            result.scatter_add_(1, local[:, None], -(gradient * is_here)[:, None])
        return result, None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Compute the cross entropy of each token from slices of logits.

    Args:
        logits: ``[tokens, local vocabulary]``, group region; columns from ``end - begin`` on are padding.
        targets: ``[tokens]``, token ids in the whole vocabulary; for a negative id the loss is undefined.
        begin: The first id of this rank's slice.
        end: The last id plus 1.

    Returns:
        ``[tokens]``, the same on all ranks.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return _VocabParallelCrossEntropy.apply(logits[:, : end - begin], targets, begin)
