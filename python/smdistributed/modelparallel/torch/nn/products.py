"""Products with sliced weights, which run while their inputs and results are exchanged.

- :func:`column_products` multiplies one input by rows of several weights. If ranks have shares of the tokens, each
  begins with its own tokens while those of the others arrive. In the backward, the sum of the input's gradient over
  the group runs beside the products for the gradients of the weights.
- :func:`row_product` multiplies slices of an input by columns of a weight. It is divided into chunks of tokens: a chunk
  is summed over the group while the next one is computed. The first steps measure how many chunks are fastest.

The operations are in ``torch_ext/tensor_parallel``. A compiler takes each of them as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.nn import collectives, layout
from smdistributed.modelparallel.torch.state import state

#: A slice of a weight ``[local features, H]``, and of its bias.
Slice = tuple[torch.Tensor, torch.Tensor | None]


def column_products(hidden: torch.Tensor, batch: int, length: int, slices: Sequence[Slice]) -> list[torch.Tensor]:
    """Multiply an input by slices of weights, as the first products of a block.

    Args:
        hidden: Activations in the layout between products (:mod:`layout`).
        batch: ``N``.
        length: ``S``.
        slices: This rank's rows of each weight, with those of the biases.

    Returns:
        For each weight ``[N, S, local features]``, group region.
    """
    if _are_separate():
        tokens = layout.enter_product(hidden, batch, length)
        return [functional.linear(tokens, *each) for each in slices]
    hidden, *flat = _cast(hidden, *(tensor for each in slices for tensor in each))
    with torch.autocast(hidden.device.type, enabled=False):
        return list(_ColumnProducts.apply(hidden, (batch, length), *flat))


def row_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply slices of an input by a slice of a weight, and sum over the group.

    Args:
        input: ``[N, S, local features]``, group region.
        weight: This rank's columns of the weight, ``[H, local features]``.

    Returns:
        Activations in the layout between products (:mod:`layout`).
    """
    if _are_separate():
        return layout.leave_product(functional.linear(input, weight))
    input, weight = _cast(input, weight)
    with torch.autocast(input.device.type, enabled=False):
        return _RowProduct.apply(input, weight)


def _are_separate() -> bool:
    """Return whether products and collectives are separate operations."""
    if collectives.tp_size() == 1:
        return True
    # A zero-bubble schedule divides the backward of each product itself.
    return state.cfg.pipeline_parallel_degree > 1 and state.cfg.pipeline == "zero_bubble"


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors in the type of autocast, if that is enabled."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(None if tensor is None else _narrow(tensor, torch.get_autocast_dtype(device)) for tensor in tensors)


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Autocast leaves float64 as it is.
    if tensor.dtype == torch.float64:
        return tensor
    if type(tensor) is not nn.Parameter or torch.compiler.is_compiling():
        return tensor.to(dtype)
    # From autocast's cache, so that all microbatches share the cast.
    return torch.ops.smd.autocast_cast(tensor)


def _group() -> int:
    """Return the core's number of the tensor-parallel group."""
    group = state.groups.tp_group
    assert group is not None, "before `smp.init`"
    assert group.id is not None, "every rank is in a tensor-parallel group"
    return group.id


def _gathered_products(
    own: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], rows: int
) -> list[torch.Tensor]:
    """Return the rows of all ranks, and their products with each weight."""
    with errors.translated(CLASSES):
        return torch.ops.smd.gathered_products(own, list(weights), list(biases), rows, _group())


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, shape: tuple[int, int], *flat: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        batch, length = shape
        weights, biases = flat[::2], flat[1::2]
        if layout.has_token_shares():
            ctx.share = hidden.shape[0]
            tokens, *products = _gathered_products(hidden, weights, biases, batch * length)
            results = [product.view(batch, length, -1) for product in products]
        else:
            ctx.share, tokens = -1, hidden
            results = [functional.linear(tokens, *each) for each in zip(weights, biases, strict=True)]
        ctx.save_for_backward(tokens, *weights)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2::2]]
        with errors.translated(CLASSES):
            results = torch.ops.smd.products_backward(list(gradients), tokens, weights, needs, ctx.share, _group())
        hidden, *products = (result if needed else None for result, needed in zip(results, needs, strict=True))
        if hidden is not None and ctx.share >= 0:
            # Gradients of the own region are larger by this factor (TP-1).
            hidden = hidden * collectives.tp_size()
        found: list[torch.Tensor | None] = []
        for at, (product, gradient) in enumerate(zip(products, gradients, strict=True)):
            needs_bias = ctx.needs_input_grad[3 + 2 * at]
            found += [product, gradient.flatten(0, -2).sum(0) if needs_bias else None]
        return hidden, None, *found


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        with errors.translated(CLASSES):
            return torch.ops.smd.summed_product(input, weight, layout.has_token_shares(), _group())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        rows = input.flatten(0, -2)
        if layout.has_token_shares():
            # Gradients of the own region are larger by this factor (TP-1).
            own = gradient / collectives.tp_size()
            gradient, of_input = _gathered_products(own, [weight.t()], [None], rows.shape[0])
            of_input = of_input.view(input.shape) if ctx.needs_input_grad[0] else None
        else:
            gradient = gradient.flatten(0, -2)
            of_input = (gradient @ weight).view(input.shape) if ctx.needs_input_grad[0] else None
        return of_input, gradient.t() @ rows if ctx.needs_input_grad[1] else None
