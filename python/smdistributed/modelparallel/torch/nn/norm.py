"""Norms between the products of distributed blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.torch.nn import initializers
from smdistributed.modelparallel.torch.nn.module import DistributedModule, between_products_in_group


class FusedLayerNorm(nn.LayerNorm):
    """A layer norm with the arguments of Apex's; PyTorch's kernel is fused.

    Args:
        normalized_shape: Shape of the normalized dimensions.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight and a bias.
        memory_efficient: Accepted for compatibility with Apex; ``True`` is ignored with a warning.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        if memory_efficient:
            warn_once("`memory_efficient=True` of `FusedLayerNorm` is ignored: PyTorch's kernel keeps its input")
        super().__init__(normalized_shape, eps, elementwise_affine)


class DistributedLayerNorm(DistributedModule):
    """A layer norm over the last dimension inside of distributed blocks.

    Every rank has its parameters. Under ``optimize: memory``, each rank normalizes its share of the group's tokens.

    Args:
        normalized_shape: Size of the last dimension.
        eps: Added to the variance.
        bias: Whether there is a bias.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (normalized_shape,), eps
        in_group = between_products_in_group()
        self.add_parameter("weight", (normalized_shape,), initializers.ones, in_group=in_group)
        if bias:
            self.add_parameter("bias", (normalized_shape,), initializers.zeros, in_group=in_group)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize.

        Args:
            hidden: ``[.., size]``.

        Returns:
            The same shape.
        """
        return functional.layer_norm(hidden, self.normalized_shape, self.weight, self.bias, self.eps)


class DistributedRMSNorm(DistributedModule):
    """A root mean square norm (Zhang and Sennrich, 2019) over the last dimension inside of distributed blocks.

    Args:
        normalized_shape: Size of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (normalized_shape,), eps
        self.add_parameter("weight", (normalized_shape,), initializers.ones, in_group=between_products_in_group())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize; inputs of narrower types are computed in float32.

        Args:
            hidden: ``[.., size]``.

        Returns:
            The same shape.
        """
        return functional.rms_norm(hidden, self.normalized_shape, self.weight, self.eps)


def make_norm(kind: str, size: int, eps: float) -> DistributedModule:
    """Create a norm.

    Args:
        kind: ``layernorm`` or ``rmsnorm``.
        size: Size of the last dimension.
        eps: Its epsilon.

    Returns:
        The norm.
    """
    return DistributedRMSNorm(size, eps) if kind == "rmsnorm" else DistributedLayerNorm(size, eps)
