"""The layouts of activations in a distributed block, for each ``optimize`` and ``prescaled_batch``.

====================  ==========================================  =====================================================
..                    ``optimize: speed``                         ``optimize: memory``
====================  ==========================================  =====================================================
between products      all tokens of the group, on every rank      a share of the tokens: sequence parallelism
shape there           ``[N, S, H]``                               ``[ceil(N * S / tp_size), H]``
before a product      nothing (backward: all-reduce)              all-gather (backward: reduce-scatter)
after a product       all-reduce                                  reduce-scatter (backward: all-gather)
norms, dropout        on every token                              on the share
====================  ==========================================  =====================================================

``N`` is the batch of the group: the sum of the batches of its ranks, or, with ``prescaled_batch``, the batch that all
of them have. Under ``memory`` without ``prescaled_batch`` the share of a rank is its own batch, so entering and leaving
a block costs nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.nn import collectives
from smdistributed.modelparallel.torch.state import state


def is_prescaled() -> bool:
    """Return whether all ranks of a group get the same batch.

    Returns:
        The configuration's ``prescaled_batch``.
    """
    return bool(state.initialized and state.cfg.prescaled_batch)


def has_token_shares() -> bool:
    """Return whether activations between products are divided by tokens.

    Returns:
        Whether ``optimize`` is ``memory`` and the group has several ranks.
    """
    return collectives.tp_size() > 1 and state.cfg.optimize == "memory"


def group_batch(batch: int) -> int:
    """Return the batch of the group.

    Args:
        batch: The batch of this rank at the input of a distributed module.

    Returns:
        ``N`` in the table.
    """
    return batch if is_prescaled() else batch * collectives.tp_size()


def gather_batch(tensor: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Gather tensors that belong to samples and have no gradient: masks, token ids, positions.

    Args:
        tensor: ``[batch, ..]``, or ``[1, ..]`` for all samples, which is returned unchanged.
        batch: The batch of this rank at the input of the module.

    Returns:
        ``[N, ..]``.
    """
    if tensor is None or is_prescaled() or (tensor.shape[0] == 1 and batch > 1):
        return tensor
    return collectives.gather_constant(tensor)


def enter_block(hidden: torch.Tensor) -> torch.Tensor:
    """Convert activations to the layout of a distributed block.

    Args:
        hidden: ``[batch, S, H]``, in the layout outside.

    Returns:
        Activations in the layout between products.
    """
    if collectives.tp_size() == 1:
        return hidden
    if not has_token_shares():
        return hidden if is_prescaled() else collectives.gather_tokens(hidden)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    return collectives.split_tokens(_padded(tokens)) if is_prescaled() else tokens


def leave_block(hidden: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Convert activations from the layout of a distributed block.

    Args:
        hidden: Activations in the layout between products.
        batch: ``N``.
        length: ``S``.

    Returns:
        ``[batch of this rank, S, H]``, in the layout outside.
    """
    if collectives.tp_size() == 1:
        return hidden
    if not has_token_shares():
        return hidden if is_prescaled() else collectives.split_tokens(hidden)
    if is_prescaled():
        hidden = collectives.gather_tokens(hidden)[: batch * length]
    return hidden.view(-1, length, hidden.shape[-1])


def enter_product(hidden: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Convert activations to the input of layers with sliced weights.

    Args:
        hidden: Activations in the layout between products.
        batch: ``N``.
        length: ``S``.

    Returns:
        ``[N, S, H]``, group region.
    """
    if not has_token_shares():
        return collectives.copy_to_group(hidden)
    tokens = collectives.gather_tokens_for_slices(hidden)[: batch * length]
    return tokens.view(batch, length, hidden.shape[-1])


def leave_product(partial: torch.Tensor) -> torch.Tensor:
    """Sum the partial results of layers with sliced weights.

    Args:
        partial: ``[N, S, H]``, group region.

    Returns:
        Activations in the layout between products.
    """
    if not has_token_shares():
        return collectives.reduce_from_group(partial)
    return collectives.reduce_scatter_tokens(_padded(partial.reshape(-1, partial.shape[-1])))


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros, so that the number of tokens is divisible."""
    missing = -tokens.shape[0] % collectives.tp_size()
    return functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def with_shape(mask: torch.Tensor | None, hidden: torch.Tensor, batch: int, length: int) -> torch.Tensor | None:
    """Return a mask from which :func:`shape_of` finds the batch and the length of the group.

    Args:
        mask: The mask of the group, or ``None``.
        hidden: A tensor of the device and the type.
        batch: ``N``.
        length: ``S``.

    Returns:
        The mask, expanded to a row for each sample. Without a mask, if the shape of activations does not show the
        batch and the length, a mask without elements.
    """
    if not has_token_shares():
        return mask
    if mask is None:
        return torch.empty((batch, 1, 0, length), dtype=hidden.dtype, device=hidden.device)
    return mask.expand(batch, *mask.shape[1:])


def shape_of(hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[int, int]:
    """Return the batch and the length of activations between products.

    Args:
        hidden: The activations.
        mask: The result of :func:`with_shape`.

    Returns:
        ``N`` and ``S``.
    """
    if not has_token_shares():
        return hidden.shape[0], hidden.shape[1]
    assert mask is not None, "under `optimize: memory` the mask has the shape"
    return mask.shape[0], mask.shape[-1]


def without_shape(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask to add to scores.

    Args:
        mask: The result of :func:`with_shape`.

    Returns:
        The mask; ``None`` if it only represents a shape.
    """
    return None if mask is None or mask.shape[-2] == 0 else mask
