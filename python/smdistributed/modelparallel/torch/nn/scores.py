"""Attention of the heads of one rank: masks, biases, and PyTorch's scaled dot product."""

from __future__ import annotations

import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.nn import random


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    slopes: torch.Tensor | None = None,
    in_fp32: bool = False,
) -> torch.Tensor:
    """Compute attention.

    Args:
        query: ``[N, heads, S, size]``.
        key: ``[N, heads, S2, size]``.
        value: ``[N, heads, S2, size]``.
        mask: Added to scores, broadcastable to ``[N, heads, S, S2]``.
        causal: Whether a token sees itself and earlier ones only.
        scale: Factor of scores.
        dropout: Probability with which a weight is dropped; other ranks have other heads, and drop others.
        window: How many tokens a token sees, itself included.
        slopes: ``[heads]``, of ALiBi.
        in_fp32: Whether narrow types are widened.

    Returns:
        ``[N, heads, S, size]``.
    """
    dtype = query.dtype
    if in_fp32 and dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    bias = None if mask is None else mask.to(query.dtype)
    rows, columns = query.shape[-2], key.shape[-2]
    if slopes is not None:
        # A softmax does not change with a row's offset, so the column alone stands for the distance.
        places = torch.arange(columns, device=query.device, dtype=query.dtype)
        alibi = (slopes.to(query)[:, None, None] * places)[None]
        bias = alibi if bias is None else bias + alibi
    is_windowed = window is not None and window < columns
    if causal and (bias is not None or is_windowed or rows != columns):
        distance = torch.arange(rows, device=query.device)[:, None] - torch.arange(columns, device=query.device)
        hidden = distance < 0
        if is_windowed:
            hidden = hidden | (distance >= window)
        lowest = torch.finfo(query.dtype).min
        bias = (query.new_zeros(()) if bias is None else bias).masked_fill(hidden, lowest)
        causal = False
    if not dropout:
        result = functional.scaled_dot_product_attention(query, key, value, bias, is_causal=causal, scale=scale)
    else:
        with random.seeded(query, same_on_group=False):
            result = functional.scaled_dot_product_attention(
                query, key, value, bias, dropout, is_causal=causal, scale=scale
            )
    return result.to(dtype)


def alibi_slopes(heads: int, bias_max: int = 8) -> list[float]:
    """Return the slopes of ALiBi.

    Args:
        heads: Heads of the whole layer.
        bias_max: Exponent of the last head.

    Returns:
        ``2 ** (-bias_max * k / heads)`` for ``k`` from 1.
    """
    return [2.0 ** (-bias_max * head / heads) for head in range(1, heads + 1)]


def pick_heads(heads: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Give every query head its head of keys or values.

    Args:
        heads: ``[N, key heads, S, size]``.
        indices: By query head, the number of its key head.

    Returns:
        ``[N, query heads, S, size]``.
    """
    count = heads.shape[1]
    if indices == list(range(count)):
        return heads
    repeats = len(indices) // count
    if indices == [place // repeats for place in range(count * repeats)]:
        return heads.repeat_interleave(repeats, 1)
    return heads[:, indices]
