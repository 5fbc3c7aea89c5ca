"""Attention of one rank's heads: masks, biases, and PyTorch's scaled dot-product attention.

A tokenizer returns a mask with every batch, and often none of its tokens is padding. PyTorch's flash attention takes no
mask, and its causal and grouped forms are for attention without a mask. So masks that mask nothing are dropped. Only
their values show that, and the host waits for a GPU to read them.

- PAD-1: a rank reads the mask of the group, after it was gathered. So all ranks of a group make the same choice, and
  no collective depends on it.
- PAD-2: no call in a pipeline depends on the choice, because microbatches with and without padding share one plan. So
  layers of a pipeline always get the mask, and each layer drops it. Without partitions, the stack drops it.
- PAD-3: without partitions, the host waits once in the forward of a stack, as in Hugging Face's own models. In a
  pipeline it waits once for each stage and microbatch. The device is then idle until the host has launched the next
  kernels, and the host runs at most one forward ahead. A mask that stays costs more with long sequences: in each layer,
  a bias of all pairs of tokens, repeated keys and values, and a kernel that reads both.
- PAD-4: whether a layer reads its mask depends on the layer and the device, and the choice depends on the values. So
  the recomputation of a checkpointed layer makes the same choice, also if it gets a copy of the mask.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from smdistributed import _core
from smdistributed.modelparallel.torch.nn import layout, random
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import version_of

#: For each mask that a pipeline has read: its version at that time, and whether it masks nothing.
_read = WeakTensorKeyDictionary()

_REMEDY = "pass no `attention_mask` for batches without padding"


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
    if causal and (bias is not None or needs_bias(rows, columns, causal=causal, window=window)):
        distance = torch.arange(rows, device=query.device)[:, None] - torch.arange(columns, device=query.device)
        hidden = distance < 0
        if window is not None and window < columns:
            hidden = hidden | (distance >= window)
        if needs_bias(rows, columns, causal=causal, window=window):
            _note_bias("its window is shorter than the sequence, or its causal mask is not square", query)
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


def needs_bias(rows: int, columns: int, *, causal: bool, window: int | None) -> bool:
    """Return whether scores need a bias because of the places of the tokens alone.

    Args:
        rows: Number of attending tokens.
        columns: Number of attended tokens.
        causal: As for :func:`attend`.
        window: As for :func:`attend`.

    Returns:
        ``False`` if :func:`attend` without a mask and without ALiBi passes none to PyTorch.
    """
    return causal and (rows != columns or (window is not None and window < columns))


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


def layers_drop_masks() -> bool:
    """Return whether layers drop masks, and not their stack (PAD-2).

    Returns:
        Whether there are several partitions.
    """
    return bool(state.initialized and state.cfg.pipeline_parallel_degree > 1)


def may_read(mask: torch.Tensor, is_shared: bool) -> bool:
    """Return whether a layer reads its mask (PAD-3).

    Args:
        mask: The mask.
        is_shared: Whether the layers of a stage get the same tensor.

    Returns:
        Whether reading it does not make the host wait in every layer.
    """
    return mask.device.type == "cpu" or (is_shared and layers_drop_masks())


def masks_nothing(mask: torch.Tensor, activations: torch.Tensor) -> bool:
    """Return whether a mask is known to mask nothing.

    Args:
        mask: Added to scores.
        activations: A tensor of the same forward. It may be a fake one, with a mask that has values.

    Returns:
        ``False`` also if the values cannot be read here, or if the mask has a gradient.
    """
    # A compiled or traced forward keeps its mask: later calls may have padding.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or get_proxy_mode() is not None:
        return False
    if type(mask) is not torch.Tensor or type(activations) is not torch.Tensor or mask.requires_grad:
        return False
    # With a mask on another device, attention raises an error, and does so for all values.
    if mask.device != activations.device or mask.device.type not in ("cpu", "cuda"):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(mask):
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        _note_bias(f"it has a mask in a CUDA graph, where values cannot be read ({_REMEDY})", mask)
        return False
    # Only pipelines cache the result, because their masks belong to one microbatch. A script can write to its own mask
    # without a new version (NumPy, `.data`), so each forward reads it.
    if mask.is_inference() or not layers_drop_masks():
        return not bool(mask.any())
    version = version_of(mask)
    known: tuple[int, bool] | None = _read.get(mask)
    if known is None or known[0] != version:
        known = _read[mask] = version, not bool(mask.any())
    return known[1]


def has_attention_shape(mask: torch.Tensor, batch: int, rows: int | None, columns: int) -> bool:
    """Return whether attention of all heads could add the mask to its scores.

    Args:
        mask: The mask.
        batch: ``N``.
        rows: Number of attending tokens; ``None`` if it is not known.
        columns: Number of attended tokens.

    Returns:
        Whether it is ``[1 or N, 1, 1 or rows, 1 or columns]``.
    """
    wanted = (batch, 1, rows, columns)
    return mask.dim() == 4 and all(
        size == 1 or end in (size, None) for size, end in zip(mask.shape, wanted, strict=True)
    )


def without_empty(mask: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return the mask that the layers of a stack get.

    Args:
        mask: The result of :func:`layout.with_shape`.
        hidden: Activations of the attended tokens, in the layout between products (:mod:`layout`).

    Returns:
        The same, or the result of :func:`layout.with_shape` without a mask if it masks nothing.
    """
    if layout.without_shape(mask) is None or mask is None:
        return mask
    shape = layout.shape_of(hidden, mask)
    if not has_attention_shape(mask, shape[0], None, shape[1]) or not masks_nothing(mask, hidden):
        return mask
    return layout.with_shape(None, hidden, *shape)


def note_unread(mask: torch.Tensor) -> None:
    """Note that a layer takes its mask as it is, because the host would wait in every layer to read it (PAD-3).

    Args:
        mask: The mask.
    """
    _note_bias(f"it has a mask whose values are not read ({_REMEDY})", mask)


def _note_bias(why: str, tensor: torch.Tensor) -> None:
    """Count attention with a bias of all pairs of tokens; warn once of each reason."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
        return
    _core.note_fallback("dense_attention_bias")
    _warn_of_bias(why)


@functools.cache
def _warn_of_bias(why: str) -> None:
    warnings.warn(
        f"attention takes a bias of all pairs of tokens and no flash kernel, because {why}. This needs more time and "
        "memory with long sequences",
        stacklevel=2,
    )
