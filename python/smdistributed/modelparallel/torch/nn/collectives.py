"""Differentiable collectives over the tensor-parallel group.

Activations are in one of two regions, and the gradients of each region have a different scale:

- *own*: each rank has different tokens, as outside of distributed modules, or as a share of the group's tokens. The
  gradient of a parameter is partial; the whole gradient is the sum over the group. Such gradients are averaged over
  ``DP_GROUP``.
- *group*: every rank processes the tokens of the whole group, with a slice of the weights. Its gradients are
  complete, and are averaged over ``RDP_GROUP``.

A loss is the mean over the tokens of one rank, and training uses the mean of these losses. So gradients of the own
region are ``tp_size`` times those of the group region (TP-1). The functions that cross the boundary multiply or
divide gradients by this factor, so parameters need no scale of their own, with or without a prescaled batch. In
practice the factor is a power of two, so it does not round.

With one rank in the group, every function returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.state import state


def tp_size() -> int:
    """Return the size of the tensor-parallel group; 1 before ``smp.init``.

    Returns:
        The number of ranks.
    """
    return len(state.groups.members["tp"]) if state.initialized else 1


def tp_rank() -> int:
    """Return the rank in the tensor-parallel group; 0 before ``smp.init``.

    Returns:
        The rank.
    """
    return state.groups.rank_in("tp") if state.initialized else 0


# Collectives without gradients.


def all_gather(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the tensors of all ranks of the group, without a gradient.

    Args:
        tensor: Same shape and type on all ranks.
        dim: The dimension along which they are concatenated.

    Returns:
        The whole.

    Raises:
        MismatchError: The shapes or types differ.
    """
    size = tp_size()
    if size == 1:
        return tensor
    whole = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (size,))
    with errors.translated(CLASSES):
        dist.all_gather_into_tensor(whole, tensor.contiguous(), state.groups.tp_group)
    return whole if dim in (0, -tensor.dim()) else torch.cat(whole.chunk(size), dim)


def all_reduce(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
    """Reduce a tensor over the group into a new one, without a gradient.

    Args:
        tensor: Same shape and type on all ranks.
        op: The reduction.

    Returns:
        The result, the same on all ranks.
    """
    if tp_size() == 1:
        return tensor
    result = tensor.clone(memory_format=torch.contiguous_format)
    with errors.translated(CLASSES):
        dist.all_reduce(result, op, state.groups.tp_group)
    return result


def _reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.new_empty((tensor.shape[0] // tp_size(), *tensor.shape[1:]))
    with errors.translated(CLASSES):
        dist.reduce_scatter_tensor(own, tensor.contiguous(), ReduceOp.SUM, state.groups.tp_group)
    return own


def _all_to_all(tensor: torch.Tensor, split_dim: int, cat_dim: int) -> torch.Tensor:
    """Send part i along ``split_dim`` to rank i, and concatenate the received parts along ``cat_dim``."""
    size = tp_size()
    parts = torch.stack(tensor.chunk(size, split_dim))
    received = torch.empty_like(parts)
    with errors.translated(CLASSES):
        dist.all_to_all_single(received, parts, group=state.groups.tp_group)
    return torch.cat(received.unbind(), cat_dim)


def _slice(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(tp_size(), dim)[tp_rank()].contiguous()


# Collectives with gradients.

#: For each exchange, the operation of the forward and that of the backward. TP-1 explains the factors.
_EXCHANGES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "copy": (lambda x: x.view_as(x), lambda g: all_reduce(g)),
    "reduce": (lambda x: all_reduce(x), lambda g: g),
    "gather": (lambda x: all_gather(x), lambda g: _slice(g) * tp_size()),
    "split": (lambda x: _slice(x), lambda g: all_gather(g) / tp_size()),
    "gather_parallel": (lambda x: all_gather(x), lambda g: _reduce_scatter(g) * tp_size()),
    "reduce_scatter": (lambda x: _reduce_scatter(x), lambda g: all_gather(g) / tp_size()),
    "gather_constant": (lambda x: all_gather(x), lambda g: _slice(g)),
    "gather_features": (lambda x: all_gather(x, -1), lambda g: _slice(g, -1)),
    "split_features": (lambda x: _slice(x, -1), lambda g: all_gather(g, -1)),
    "tokens_to_features": (lambda x: _all_to_all(x, -1, 0), lambda g: _all_to_all(g, 0, -1) * tp_size()),
    "features_to_tokens": (lambda x: _all_to_all(x, 0, -1), lambda g: _all_to_all(g, -1, 0) / tp_size()),
}


class _Exchange(torch.autograd.Function):
    """Runs one row of the table."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return _EXCHANGES[name][0](tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _EXCHANGES[ctx.name][1](gradient), None


def _exchange(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor if tp_size() == 1 else _Exchange.apply(tensor, name)


def copy_to_group(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all ranks have; the backward sums its gradients (Megatron's f).

    Args:
        tensor: A tensor of the group region.

    Returns:
        The same values, as the input of layers with sliced weights.
    """
    return _exchange(tensor, "copy")


def reduce_from_group(tensor: torch.Tensor) -> torch.Tensor:
    """Sum partial results over the group (Megatron's g).

    Args:
        tensor: Partial result, group region.

    Returns:
        The sum, on all ranks.
    """
    return _exchange(tensor, "reduce")


def gather_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Gather tokens along dimension 0: from the own to the group region, where all ranks compute the same.

    Args:
        tensor: ``[tokens, ..]``, own region.

    Returns:
        ``[tp_size * tokens, ..]``.
    """
    return _exchange(tensor, "gather")


def gather_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor without gradients along dimension 0, such as masks and token ids.

    Args:
        tensor: ``[batch, ..]``.

    Returns:
        ``[tp_size * batch, ..]``.
    """
    return _exchange(tensor, "gather_constant")


def split_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of tokens along dimension 0: from the group to the own region.

    Args:
        tensor: ``[tp_size * tokens, ..]``, the same on all ranks.

    Returns:
        ``[tokens, ..]``.
    """
    return _exchange(tensor, "split")


def gather_tokens_for_slices(tensor: torch.Tensor) -> torch.Tensor:
    """Gather tokens as the input of layers with sliced weights; the backward reduce-scatters their gradients.

    Args:
        tensor: ``[tokens, ..]``, own region.

    Returns:
        ``[tp_size * tokens, ..]``, group region.
    """
    return _exchange(tensor, "gather_parallel")


def reduce_scatter_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Sum partial results over the group; each rank gets its share of the tokens.

    Args:
        tensor: ``[tp_size * tokens, ..]``, group region.

    Returns:
        ``[tokens, ..]``, own region.
    """
    return _exchange(tensor, "reduce_scatter")


def gather_features(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate slices of the last dimension, group region.

    Args:
        tensor: ``[.., features / tp_size]``.

    Returns:
        ``[.., features]``.
    """
    return _exchange(tensor, "gather_features")


def split_features(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of the last dimension of a tensor that all ranks have, group region.

    Args:
        tensor: ``[.., features]``.

    Returns:
        ``[.., features / tp_size]``.
    """
    return _exchange(tensor, "split_features")


def tokens_to_features(tensor: torch.Tensor) -> torch.Tensor:
    """Exchange own tokens with all features for all tokens with a slice of the features (all-to-all).

    Args:
        tensor: ``[tokens, .., features]``, own region.

    Returns:
        ``[tp_size * tokens, .., features / tp_size]``, group region.
    """
    return _exchange(tensor, "tokens_to_features")


def features_to_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Exchange all tokens with a slice of the features for own tokens with all features (all-to-all).

    Args:
        tensor: ``[tp_size * tokens, .., features / tp_size]``, group region.

    Returns:
        ``[tokens, .., features]``, own region.
    """
    return _exchange(tensor, "features_to_tokens")


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def partial_in_group(parameter: torch.Tensor) -> torch.Tensor:
    """Mark a whole parameter of which each rank of the group uses a part (TP-1).

    Its gradients are partial as in the own region, so they get the scale of that region.

    Args:
        parameter: A parameter whose gradients are averaged over ``DP_GROUP``.

    Returns:
        The same values.
    """
    return parameter if tp_size() == 1 else _ScaleGradient.apply(parameter, float(tp_size()))
