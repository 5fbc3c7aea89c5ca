"""Attention of one rank's heads: masks, biases, and PyTorch's scaled dot-product attention."""

from __future__ import annotations

import contextlib

import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.nn import random


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    key_heads: list[int] | None = None,
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
        key: ``[N, key heads, S2, size]``.
        value: ``[N, key heads, S2, size]``.
        mask: Added to scores, broadcastable to ``[N, heads, S, S2]``.
        key_heads: For each head of the query, the index of its key head; by default there are as many.
        causal: Whether a token attends only to itself and earlier tokens.
        scale: Factor of scores.
        dropout: Probability with which a weight is dropped, independently on each rank, because ranks have different
        heads.
        window: Number of tokens to which a token attends, including itself.
        slopes: ``[heads]``, the slopes of ALiBi.
        in_fp32: Whether scores of narrow types are computed in float32.

    Returns:
        ``[N, heads, S, size]``.
    """
    dtype = query.dtype
    if in_fp32 and dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    bias = None if mask is None else mask.to(query.dtype)
    rows, columns = query.shape[-2], key.shape[-2]
    if slopes is not None:
        # A softmax does not depend on an offset of a row, so the column's index can replace the distance.
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
    # Without a bias, PyTorch's fused kernels read each key head as often as it is needed.
    is_grouped = key_heads is not None and bias is None and _is_grouped(key_heads, key.shape[1])
    if key_heads is not None and not is_grouped:
        key, value = pick_heads(key, key_heads), pick_heads(value, key_heads)
    with random.seeded(query, same_on_group=False) if dropout else contextlib.nullcontext():
        result = functional.scaled_dot_product_attention(
            query, key, value, bias, dropout, is_causal=causal, scale=scale, enable_gqa=is_grouped
        )
    return result.to(dtype)


def _is_grouped(key_heads: list[int], count: int) -> bool:
    repeats = len(key_heads) // count
    return repeats > 1 and key_heads == [place // repeats for place in range(count * repeats)]


def alibi_slopes(heads: int, bias_max: int = 8) -> list[float]:
    """Return the slopes of ALiBi.

    Args:
        heads: Number of heads of the whole layer.
        bias_max: Exponent of the last head's slope.

    Returns:
        ``2 ** (-bias_max * k / heads)`` for ``k`` from 1.
    """
    return [2.0 ** (-bias_max * head / heads) for head in range(1, heads + 1)]


def pick_heads(heads: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return the head of keys or values for every query head.

    Args:
        heads: ``[N, key heads, S, size]``.
        indices: For each query head, the index of its key head.

    Returns:
        ``[N, query heads, S, size]``.
    """
    count = heads.shape[1]
    if indices == list(range(count)):
        return heads
    if _is_grouped(indices, count):
        return heads.repeat_interleave(len(indices) // count, 1)
    return heads[:, indices]
