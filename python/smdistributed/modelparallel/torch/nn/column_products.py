"""Products of one input with several sliced weights, whose backward communicates while it computes.

The gradient of the input is the sum over the ranks of the group. Its reduction starts as soon as this rank's part is
complete, and runs on a stream of its own beside the products for the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
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
    is_alone = collectives.tp_size() == 1
    # A compiler takes operations apart itself, and so does a zero-bubble schedule.
    if is_alone or torch.compiler.is_compiling() or state.cfg.pipeline_parallel_degree > 1:
        tokens = layout.enter_product(hidden, batch, length)
        return [functional.linear(tokens, *each) for each in slices]
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        narrow = torch.get_autocast_dtype(device)
        hidden = hidden.to(narrow)
        slices = [(weight.to(narrow), None if bias is None else bias.to(narrow)) for weight, bias in slices]
    flat = [tensor for each in slices for tensor in each]
    with torch.autocast(device, enabled=False):
        return list(_ColumnProducts.apply(hidden, (batch, length), *flat))


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, shape: tuple[int, int], *flat: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        batch, length = shape
        tokens = hidden
        if layout.has_token_shares():
            tokens = collectives.all_gather(hidden)[: batch * length].view(batch, length, -1)
        ctx.shared_rows = hidden.shape[0] if layout.has_token_shares() else None
        weights = flat[::2]
        ctx.save_for_backward(tokens, *weights)
        return tuple(
            functional.linear(tokens, weight, bias)  # type: ignore[arg-type]
            for weight, bias in zip(weights, flat[1::2], strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        partial = work = None
        if ctx.needs_input_grad[0]:
            partial = rows[0] @ weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                partial.addmm_(row, weight)
            partial, work = _begin_reduction(partial.view(tokens.shape), ctx.shared_rows)
        inputs = tokens.reshape(-1, tokens.shape[-1])
        found: list[torch.Tensor | None] = []
        for at, row in enumerate(rows):
            needs_weight, needs_bias = ctx.needs_input_grad[2 + 2 * at : 4 + 2 * at]
            found += [row.t() @ inputs if needs_weight else None, row.sum(0) if needs_bias else None]
        if work is not None:
            with errors.translated(CLASSES):
                work.wait()
            if ctx.shared_rows is not None:
                # Gradients of the own region are larger by this factor (TP-1).
                partial = partial * collectives.tp_size()
        return partial, None, *found


def _begin_reduction(partial: torch.Tensor, shared_rows: int | None) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to sum gradients of an input over the group; with ``shared_rows``, each rank gets those of its tokens."""
    group = state.groups.tp_group
    with errors.translated(CLASSES):
        if shared_rows is None:
            return partial, dist.all_reduce(partial, ReduceOp.SUM, group, async_op=True)
        whole = partial.view(-1, partial.shape[-1])
        padding = shared_rows * collectives.tp_size() - whole.shape[0]
        whole = functional.pad(whole, (0, 0, 0, padding)) if padding else whole
        own = whole.new_empty(shared_rows, whole.shape[-1])
        return own, dist.reduce_scatter_tensor(own, whole, ReduceOp.SUM, group, async_op=True)
