"""Relative position bias (Raffel et al., 2020): scores get a learned number for each head and range of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.nn import initializers
from smdistributed.modelparallel.torch.nn.module import DistributedModule, check_divisible


@dataclass(frozen=True)
class RelativeBias:
    """The division of distances into buckets.

    Attributes:
        num_buckets: Number of buckets. Half of them are for one distance each, and the others for ranges that grow
        with the distance. Without causal attention, the halves of both directions have half of the buckets each.
        max_distance: Distances from here on are in the last bucket.
    """

    num_buckets: int = 32
    max_distance: int = 128

    def buckets(self, length: int, causal: bool, device: torch.device) -> torch.Tensor:
        """Return the bucket of each pair of tokens.

        Args:
            length: Number of tokens.
            causal: Whether tokens attend only to earlier tokens; later ones are in bucket 0.
            device: Device of the result.

        Returns:
            ``[attending token, attended token]``.
        """
        places = torch.arange(length, device=device)
        forward = places[None, :] - places[:, None]
        count = self.num_buckets if causal else self.num_buckets // 2
        first = 0 if causal else (forward > 0).long() * count
        distance = (-forward).clamp(min=0) if causal else forward.abs()
        exact = count // 2
        # In float32, as published models were trained: another rounding would move distances to other buckets.
        growth = torch.log(distance.float() / exact) / math.log(self.max_distance / exact)
        ranged = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, ranged)


class RelativePositionBias(DistributedModule):
    """The biases of the heads of this rank, which all layers of a stack add to their scores.

    Args:
        bias: How distances are divided.
        num_attention_heads: Heads of the whole layer; a multiple of the degree.
        causal: Whether tokens attend only to earlier tokens.
        initializer_range: Standard deviation of initial values.

    Raises:
        SMPValidationError: Heads are not divisible.
    """

    def __init__(self, bias: RelativeBias, num_attention_heads: int, causal: bool, initializer_range: float) -> None:
        super().__init__()
        check_divisible(num_attention_heads, "`num_attention_heads`")
        self.bias, self.causal = bias, causal
        initial = initializers.normal_rows(initializer_range, None)
        self.add_parameter("weight", (bias.num_buckets, num_attention_heads), initial, shard_dim=1)

    def forward(self, length: int) -> torch.Tensor:
        """Return the biases of a sequence.

        Args:
            length: Number of tokens.

        Returns:
            ``[1, local heads, length, length]``, group region.
        """
        buckets = self.bias.buckets(length, self.causal, self.weight.device)
        return functional.embedding(buckets, self.weight).permute(2, 0, 1)[None].contiguous()
