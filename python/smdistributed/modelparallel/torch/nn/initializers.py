"""Initial values of whole parameters."""

from __future__ import annotations

import math

import torch
from torch import nn

from smdistributed.modelparallel.torch.nn.module import Initializer


def weight(std: float, use_normal: bool) -> Initializer:
    """Return the initializer of a matrix.

    Args:
        std: Standard deviation of the normal distribution.
        use_normal: Whether it is used; otherwise that of ``torch.nn.Linear``.

    Returns:
        The initializer.
    """
    if use_normal:
        return lambda whole: nn.init.normal_(whole, std=std)
    return lambda whole: nn.init.kaiming_uniform_(whole, a=math.sqrt(5))


def bias(fan_in: int, use_normal: bool) -> Initializer:
    """Return the initializer of a bias.

    Args:
        fan_in: Input features of the layer.
        use_normal: Whether it is zero; otherwise as in ``torch.nn.Linear``.

    Returns:
        The initializer.
    """
    if use_normal:
        return zeros
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    return lambda whole: nn.init.uniform_(whole, -bound, bound)


def zeros(whole: torch.Tensor) -> None:
    """Set a tensor to zeros.

    Args:
        whole: The tensor.
    """
    whole.zero_()


def ones(whole: torch.Tensor) -> None:
    """Set a tensor to ones.

    Args:
        whole: The tensor.
    """
    whole.fill_(1.0)


def normal_rows(std: float, padding_idx: int | None) -> Initializer:
    """Return the initializer of an embedding.

    Args:
        std: Standard deviation.
        padding_idx: A row of zeros, if any.

    Returns:
        The initializer.
    """

    def initialize(whole: torch.Tensor) -> None:
        nn.init.normal_(whole, std=std)
        if padding_idx is not None:
            whole[padding_idx].zero_()

    return initialize
