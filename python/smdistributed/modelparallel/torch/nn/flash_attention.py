"""Attention with packed queries, keys and values."""

from __future__ import annotations

import math

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn.scores import attend


class FlashAttentionLayer(nn.Module):
    """Attention without a matrix of scores, by PyTorch's scaled dot-product attention.

    Args:
        attention_dropout_prob: Probability with which a weight is dropped in training.
        attention_head_size: Size of a head; needed unless ``scale`` is given or scores are not scaled.
        scale_attention_scores: Whether scores are divided by the root of the head size.
        scale_attn_by_layer_idx: Whether they are divided by ``layer_idx + 1``.
        layer_idx: The number of the layer, from 0.
        scale: The factor of scores, if it is given directly.
        triton_flash_attention: Whether masks are allowed, as in the original's Triton kernel, which has no dropout.
        use_alibi: As above; a mask requires both options.

    Raises:
        SMPValidationError: A value that the scale needs is missing, or Triton's kernel is requested with dropout.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if scale is None:
            scale = 1.0
            if scale_attention_scores:
                if attention_head_size is None:
                    raise SMPValidationError("`attention_head_size` is missing, by which scores are scaled")
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx:
                if layer_idx is None:
                    raise SMPValidationError("`layer_idx` is missing, by which scores are scaled")
                scale /= layer_idx + 1
        if triton_flash_attention and attention_dropout_prob:
            raise SMPValidationError(
                f"`triton_flash_attention` has no dropout, and `attention_dropout_prob` is {attention_dropout_prob}"
            )
        self.attention_dropout_prob, self.scale = attention_dropout_prob, scale
        self._takes_masks = triton_flash_attention and use_alibi

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Compute attention.

        Args:
            qkv: ``[B, S, 3, heads, size]``.
            attn_mask: Added to scores, broadcastable to ``[B, heads, S, S]``; needs ``triton_flash_attention`` and
                ``use_alibi``.
            causal: Whether a token attends only to itself and earlier tokens.

        Returns:
            ``[B, heads, S, size]``.

        Raises:
            SMPValidationError: A mask is given without both options, or ``qkv`` has another shape.
        """
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise SMPValidationError(f"`qkv` has the shape {list(qkv.shape)}: expected [B, S, 3, heads, size]")
        if attn_mask is not None and not self._takes_masks:
            raise SMPValidationError("`attn_mask` needs `triton_flash_attention=True` and `use_alibi=True`")
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        dropout = self.attention_dropout_prob if self.training else 0.0
        return attend(query, key, value, attn_mask, causal=causal, scale=self.scale, dropout=dropout)
