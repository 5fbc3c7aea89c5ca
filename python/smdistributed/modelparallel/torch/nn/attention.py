"""Attention with heads divided over the tensor-parallel group."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import collectives, layout, random
from smdistributed.modelparallel.torch.nn.linear import ColumnParallelLinear, RowParallelLinear
from smdistributed.modelparallel.torch.nn.module import DistributedModule, check_divisible
from smdistributed.modelparallel.torch.nn.norm import make_norm
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.products import column_products
from smdistributed.modelparallel.torch.nn.scores import (
    alibi_slopes,
    attend,
    has_attention_shape,
    layers_drop_masks,
    masks_nothing,
    may_read,
    needs_bias,
    note_unread,
)


class DistributedAttentionLayer(DistributedModule):
    """Multi-head attention with its norms, dropout and residual; each rank computes some of the heads.

    Args:
        num_attention_heads: Heads of the whole layer; a multiple of the degree.
        attention_head_size: Size of a head.
        hidden_size: Features of the input and output.
        attention_dropout_prob: Probability with which an attention weight is dropped.
        hidden_dropout_prob: Probability with which an output is dropped, before the residual.
        layernorm_epsilon: Epsilon of the norms.
        initializer_range: Standard deviation of initial weights.
        use_normal_initialization: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
        cross_attention: Whether keys and values are computed from other states.
        causal_mask_size: Longest sequence of causal attention; ``None`` for attention to all tokens.
        pre_layernorm: Whether the input is normalized.
        post_layernorm: Whether the sum of output and residual is normalized.
        options: Further properties of published architectures.
        layer_idx: The number of the layer, from 0.

    Attributes:
        shares_masks: Whether all layers of a pipeline's stage get the same tensor as their mask. Only then does reading
        it on a GPU make the host wait once, and not once in each layer.

    Raises:
        SMPValidationError: Heads are not divisible.
    """

    shares_masks = False

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        options: BlockOptions | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__()
        check_divisible(num_attention_heads, "`num_attention_heads`")
        options = options or BlockOptions()
        key_heads = options.num_key_value_heads or num_attention_heads
        if num_attention_heads % key_heads:
            raise SMPValidationError(
                f"`num_attention_heads` is {num_attention_heads}: expected a multiple of `num_key_value_heads` "
                f"{key_heads}"
            )
        if cross_attention and (options.rotary is not None or options.use_alibi):
            raise SMPValidationError("cross attention has no rotary embedding and no ALiBi: positions differ")
        self.options, self.head_size, self.cross_attention = options, attention_head_size, cross_attention
        self.causal_mask_size = None if cross_attention else causal_mask_size
        self.attention_dropout_prob, self.hidden_dropout_prob = attention_dropout_prob, hidden_dropout_prob
        self.scale = options.attention_scale if options.attention_scale is not None else attention_head_size**-0.5
        if options.scale_by_layer:
            self.scale /= layer_idx + 1
        self.window = options.window(layer_idx)
        size, rank = collectives.tp_size(), collectives.tp_rank()
        self.num_local_heads = num_attention_heads // size
        own = range(rank * self.num_local_heads, (rank + 1) * self.num_local_heads)
        needed = [head // (num_attention_heads // key_heads) for head in own]
        # With fewer key heads than ranks, every rank has all of them and uses those of its queries.
        is_divided = key_heads % size == 0
        first = needed[0]
        self._key_rows = (
            None if is_divided else slice(first * attention_head_size, (needed[-1] + 1) * attention_head_size)
        )
        self._key_heads = [head - first for head in needed]
        whole = num_attention_heads * attention_head_size
        init = initializer_range, use_normal_initialization
        self.query = ColumnParallelLinear(hidden_size, whole, options.qkv_bias, *init)
        narrow = key_heads * attention_head_size
        self.key = ColumnParallelLinear(hidden_size, narrow, options.qkv_bias, *init, is_divided=is_divided)
        self.value = ColumnParallelLinear(hidden_size, narrow, options.qkv_bias, *init, is_divided=is_divided)
        self.dense = RowParallelLinear(whole, hidden_size, options.dense_bias, *init)
        if pre_layernorm:
            self.pre_layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
        if post_layernorm:
            self.layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
        self.has_pre_layernorm, self.has_post_layernorm = pre_layernorm, post_layernorm
        self._slopes = alibi_slopes(num_attention_heads, options.alibi_bias_max)[own.start : own.stop]

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Attend.

        Args:
            inputs: ``(hidden_states, attention_mask)``, or with ``cross_attention``
                ``(hidden_states, cross_states, attention_mask)``. States are ``[N, S, H]``, masks are added to scores
                and broadcastable to ``[N, 1, S, S2]``. Position numbers ``[N, S]`` may follow for rotary embeddings.

        Returns:
            ``[N, S, H]``.
        """
        hidden, *rest = inputs
        assert hidden is not None
        batch, length = hidden.shape[:2]
        cross = None
        if self.cross_attention:
            cross = rest.pop(0)
            assert cross is not None
        mask = layout.gather_batch(rest[0] if rest else None, batch)
        positions = layout.gather_batch(rest[1] if len(rest) > 1 else None, batch)
        whole = layout.group_batch(batch)
        inside = None if cross is None else layout.enter_block(cross)
        other = 0 if cross is None else cross.shape[1]
        hidden = self.compute(layout.enter_block(hidden), mask, whole, length, positions, inside, other)
        return layout.leave_block(hidden, whole, length)

    def compute(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        batch: int,
        length: int,
        positions: torch.Tensor | None = None,
        cross: torch.Tensor | None = None,
        cross_length: int = 0,
        has_residual: bool = True,
        normed: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside of a block; see :mod:`layout` for the shapes.

        Args:
            hidden: Activations in the layout between products.
            mask: The mask of the group.
            batch: ``N``.
            length: ``S``.
            positions: Position numbers of the group.
            cross: States of cross attention, in the layout between products.
            cross_length: Their number of tokens.
            has_residual: Whether the input is added.
            normed: The input after the first norm, if the caller has computed it.
            bias: Added to the scores of this rank's heads, ``[1, local heads, S, S]``.

        Returns:
            As ``hidden``.
        """
        if self.causal_mask_size is not None and length > self.causal_mask_size:
            raise SMPValidationError(
                f"the sequence has {length} tokens, and `causal_mask_size` is {self.causal_mask_size}"
            )
        if normed is None:
            normed = self.pre_layernorm(hidden) if self.has_pre_layernorm else hidden
        slices = [self.query.local(), self.key.local(self._key_rows), self.value.local(self._key_rows)]
        if cross is None:
            products = column_products(normed, batch, length, slices)
        else:
            products = column_products(normed, batch, length, slices[:1])
            products += column_products(cross, batch, cross_length, slices[1:])
        query, key, value = map(self._split, products)
        rotary = self.options.rotary
        if rotary is not None:
            angles = rotary.angles(positions, length, query)
            query, key = rotary.rotate(query, angles), rotary.rotate(key, angles)
        slopes = query.new_tensor(self._slopes) if self.options.use_alibi else None
        if bias is not None:
            mask = bias if mask is None else mask.to(bias.dtype) + bias
        elif mask is not None and self._drops(mask, query, key):
            mask = None
        context = attend(
            query,
            key,
            value,
            mask,
            key_heads=self._key_heads,
            causal=self.causal_mask_size is not None,
            scale=self.scale,
            dropout=self.attention_dropout_prob if self.training else 0.0,
            window=self.window,
            slopes=slopes,
            in_fp32=self.options.attention_in_fp32,
        )
        output = self.dense(context.transpose(1, 2).flatten(2))
        output = random.dropout(
            output, self.hidden_dropout_prob, self.training, same_on_group=not layout.has_token_shares()
        )
        if has_residual:
            output = add_residual(hidden, output, self.options.fp32_residual_addition)
        if self.options.limits_fp16:
            output = limited(output)
        return self.layernorm(output) if self.has_post_layernorm else output

    def _drops(self, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Return whether the mask is dropped, because it masks nothing and there is no other bias of the scores."""
        causal = self.causal_mask_size is not None
        if self.options.use_alibi or needs_bias(query.shape[-2], key.shape[-2], causal=causal, window=self.window):
            return False
        if not may_read(mask, self.shares_masks):
            if layers_drop_masks():
                note_unread(mask)
            return False
        shape = query.shape[0], query.shape[-2], key.shape[-2]
        return has_attention_shape(mask, *shape) and masks_nothing(mask, query)

    def _split(self, features: torch.Tensor) -> torch.Tensor:
        """Reshape ``[N, S, heads * size]`` to ``[N, heads, S, size]``."""
        heads = features.shape[-1] // self.head_size
        return features.view(*features.shape[:2], heads, self.head_size).transpose(1, 2)


def add_residual(hidden: torch.Tensor, output: torch.Tensor, in_fp32: bool) -> torch.Tensor:
    """Add the input of a block to its output.

    Args:
        hidden: The input.
        output: The output.
        in_fp32: Whether narrow types are added in float32.

    Returns:
        The sum, in the type of ``output``.
    """
    if in_fp32 and output.dtype in (torch.float16, torch.bfloat16):
        return (hidden.float() + output.float()).to(output.dtype)
    return hidden + output


def limited(hidden: torch.Tensor) -> torch.Tensor:
    """Clamp activations in float16 to finite values.

    Args:
        hidden: Activations.

    Returns:
        The same, unless the type is float16.
    """
    if hidden.dtype != torch.float16:
        return hidden
    # A sum of two numbers at the limit of the type would be infinite again in the next block.
    limit = torch.finfo(hidden.dtype).max - 1000
    return hidden.clamp(-limit, limit)
