"""Transformer layers, and stacks of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import layout, scores
from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.experts import DistributedExpertsLayer
from smdistributed.modelparallel.torch.nn.feed_forward import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.norm import make_norm
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.relative_bias import RelativePositionBias

#: The data between layers: states, states of cross attention if there is any, masks. Position numbers, the relative
#: position bias, and the tuple of logits of the routers so far may follow.
States = tuple[Any, ...]


class DistributedTransformerLayer(DistributedModule):
    """Attention, optional cross attention, and a feed-forward layer.

    Args:
        num_attention_heads: Heads of the whole layer; a multiple of the degree.
        attention_head_size: Size of a head.
        hidden_size: Features of the input and output.
        intermediate_size: Features between the products of the output layer; a multiple of the degree.
        attention_dropout_prob: Probability with which an attention weight is dropped.
        hidden_dropout_prob: Probability with which an output is dropped, before the residual.
        activation: The activation of the feed-forward layer.
        layernorm_epsilon: Epsilon of the norms.
        initializer_range: Standard deviation of initial weights.
        use_normal_initialization: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
        causal_mask_size: Longest sequence of causal attention; ``None`` for attention to all tokens.
        add_cross_attention: Whether there is cross attention after the attention.
        pre_layernorm: Whether the inputs of sublayers are normalized.
        post_layernorm: Whether the outputs of sublayers are normalized.
        use_alibi: Whether scores get ALiBi's bias.
        alibi_bias_max: Exponent of the last head's slope.
        options: Further properties of published architectures.
        layer_idx: The number of the layer, from 0.
        is_inside: Whether inputs and outputs are in the layout between products, with masks of the group, as in a
        :class:`DistributedTransformer`.

    Raises:
        SMPValidationError: A size is not divisible, or there is no norm at all.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        *,
        options: BlockOptions | None = None,
        layer_idx: int = 0,
        is_inside: bool = False,
    ) -> None:
        super().__init__()
        if not pre_layernorm and not post_layernorm:
            raise SMPValidationError("`pre_layernorm` and `post_layernorm` are both False: a layer has a norm")
        options = options or BlockOptions(use_alibi=use_alibi, alibi_bias_max=alibi_bias_max)
        if options.relative_bias is not None and not is_inside:
            raise SMPValidationError("`relative_bias` is shared by the layers of a DistributedTransformer")
        if options.parallel_residual and (post_layernorm or add_cross_attention):
            raise SMPValidationError("`parallel_residual` has no `post_layernorm` and no cross attention")
        self.options, self.is_inside = options, is_inside
        heads = num_attention_heads, attention_head_size, hidden_size, attention_dropout_prob, hidden_dropout_prob
        init = layernorm_epsilon, initializer_range, use_normal_initialization
        norms = pre_layernorm, post_layernorm
        self.attention = DistributedAttentionLayer(
            *heads, *init, False, causal_mask_size, *norms, options=options, layer_idx=layer_idx
        )
        self.has_cross_attention = add_cross_attention
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(
                *heads, *init, True, None, *norms, options=options, layer_idx=layer_idx
            )
        kind = DistributedTransformerOutputLayer if options.num_experts is None else DistributedExpertsLayer
        self.output: DistributedTransformerOutputLayer | DistributedExpertsLayer = kind(
            hidden_size,
            intermediate_size,
            hidden_dropout_prob,
            activation,
            *init,
            pre_layernorm and not options.shared_norm,
            post_layernorm,
            options=options,
        )

    def forward(self, inputs: States) -> States:
        """Apply the layer.

        Args:
            inputs: ``(hidden_states, attention_mask)``, or with cross attention ``(hidden_states, cross_states,
                attention_mask, cross_mask)``; position numbers ``[N, S]`` may follow. States are ``[N, S, H]``, masks
                are added to scores and broadcastable to ``[N, 1, S, S]``.

        Returns:
            The same tuple, with new ``hidden_states``.
        """
        parts = _parts(inputs, self.has_cross_attention)
        if self.is_inside:
            hidden, logits = self._compute(parts)
            if parts.router_logits is not None:
                inputs = (*inputs[:-1], (*parts.router_logits, logits))
            return hidden, *inputs[1:]
        batch, length = layout.group_batch(parts.hidden.shape[0]), parts.hidden.shape[1]
        return layout.leave_block(self._compute(enter(parts))[0], batch, length), *inputs[1:]

    def _compute(self, states: Parts) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the new states, and the logits of the router if there are experts."""
        hidden, positions, bias = states.hidden, states.positions, states.bias
        shape = layout.shape_of(hidden, states.mask)
        attention_mask = layout.without_shape(states.mask)
        if self.options.parallel_residual:
            assert isinstance(self.output, DistributedTransformerOutputLayer)
            # If the norm is shared, only the attention has its parameters.
            normed = self.attention.pre_layernorm(hidden)
            attended = self.attention.compute(
                hidden, attention_mask, *shape, positions, has_residual=False, normed=normed, bias=bias
            )
            source = normed if self.options.shared_norm else hidden
            return hidden + attended + self.output.compute(source, *shape, has_residual=False), None
        hidden = self.attention.compute(hidden, attention_mask, *shape, positions, bias=bias)
        if self.has_cross_attention:
            assert states.cross is not None
            cross_length = layout.shape_of(states.cross, states.cross_mask)[1]
            other = layout.without_shape(states.cross_mask)
            hidden = self.cross_attention.compute(hidden, other, *shape, None, states.cross, cross_length)
        if isinstance(self.output, DistributedExpertsLayer):
            return self.output.compute(hidden, *shape)
        return self.output.compute(hidden, *shape), None


class DistributedTransformer(DistributedModule):
    """A stack of layers. In a pipeline, its layers may be on several partitions.

    With both norms, the input of the stack and its output are normalized as well.

    Args:
        num_layers: Number of layers.
        num_attention_heads: As for :class:`DistributedTransformerLayer`, like all following arguments.
        attention_head_size: Size of a head.
        hidden_size: Features of the input and output.
        intermediate_size: Features between the products of the output layer.
        attention_dropout_prob: Probability with which an attention weight is dropped.
        hidden_dropout_prob: Probability with which an output is dropped.
        activation: The activation of the feed-forward layers.
        layernorm_epsilon: Epsilon of the norms.
        initializer_range: Standard deviation of initial weights.
        use_normal_initialization: Whether initial weights are normal.
        causal_mask_size: Longest sequence of causal attention; ``None`` for attention to all tokens.
        add_cross_attention: Whether there is cross attention.
        pre_layernorm: Whether the inputs of sublayers are normalized.
        post_layernorm: Whether the outputs of sublayers are normalized.
        options: Further properties of published architectures.

    Attributes:
        seq_layers: The layers.
    """

    is_unit = False

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        options: BlockOptions | None = None,
    ) -> None:
        super().__init__()
        options = options or BlockOptions()
        self.has_cross_attention = add_cross_attention
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    num_attention_heads,
                    attention_head_size,
                    hidden_size,
                    intermediate_size,
                    attention_dropout_prob,
                    hidden_dropout_prob,
                    activation,
                    layernorm_epsilon,
                    initializer_range,
                    use_normal_initialization,
                    causal_mask_size,
                    add_cross_attention,
                    pre_layernorm,
                    post_layernorm,
                    options=options,
                    layer_idx=index,
                    is_inside=True,
                )
                for index in range(num_layers)
            )
        )
        self._windows = {options.window(index) for index in range(num_layers)}
        self._is_causal, self._has_alibi = causal_mask_size is not None, options.use_alibi
        self.has_relative_bias, self.has_experts = options.relative_bias is not None, options.num_experts is not None
        if options.relative_bias is not None:
            self.relative_bias = RelativePositionBias(
                options.relative_bias, num_attention_heads, causal_mask_size is not None, initializer_range
            )
        self.has_outer_norms = pre_layernorm and post_layernorm
        if self.has_outer_norms:
            self.input_layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
            self.output_layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)

    def forward(self, inputs: States) -> States:
        """Apply all layers.

        Args:
            inputs: As for :class:`DistributedTransformerLayer`.

        Returns:
            The same tuple, with new ``hidden_states``.
        """
        parts = _parts(inputs, self.has_cross_attention)
        batch, length = layout.group_batch(parts.hidden.shape[0]), parts.hidden.shape[1]
        states, _ = self.compute(enter(parts))
        return layout.leave_block(states, batch, length), *inputs[1:]

    def compute(self, parts: Parts) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Apply all layers inside of a block.

        Args:
            parts: The inputs, in the layout between products (:mod:`layout`), with masks from
                :func:`layout.with_shape`.

        Returns:
            States in the same layout; and for each layer the logits of its router, if ``parts`` has a tuple for them.
        """
        if not scores.layers_drop_masks():
            parts = self._without_empty_masks(parts)
        hidden = self.input_layernorm(parts.hidden) if self.has_outer_norms else parts.hidden
        inputs: States = (hidden, parts.mask)
        if self.has_cross_attention:
            inputs = (hidden, parts.cross, parts.mask, parts.cross_mask)
        if self.has_relative_bias:
            bias = self.relative_bias(layout.shape_of(hidden, parts.mask)[1])
            inputs = (*inputs, parts.positions, bias)
        elif parts.positions is not None or parts.router_logits is not None:
            inputs = (*inputs, parts.positions)
        if parts.router_logits is not None:
            inputs = (*inputs, *([] if self.has_relative_bias else [None]), parts.router_logits)
        outputs = self.seq_layers(inputs)
        logits = None if parts.router_logits is None else outputs[-1]
        return self.output_layernorm(outputs[0]) if self.has_outer_norms else outputs[0], logits

    def share_masks(self, *, cross: bool = False) -> None:
        """Declare that the masks of :meth:`compute` are outputs of a module, so that a stage's layers get one tensor.

        A pipeline may copy arguments of a step for each layer.

        Args:
            cross: Whether masks of cross attention are such outputs, too.
        """
        for layer in self.seq_layers:
            assert isinstance(layer, DistributedTransformerLayer)
            layer.attention.shares_masks = True
            if cross:
                layer.cross_attention.shares_masks = True

    def _without_empty_masks(self, parts: Parts) -> Parts:
        """Drop masks that mask nothing, if some layers have no other bias of the scores."""
        mask, cross_mask = parts.mask, parts.cross_mask
        if not self.has_relative_bias and not self._has_alibi:
            length = layout.shape_of(parts.hidden, mask)[1]
            is_causal = self._is_causal
            if not all(scores.needs_bias(length, length, causal=is_causal, window=each) for each in self._windows):
                mask = scores.without_empty(mask, parts.hidden)
        if parts.cross is not None:
            cross_mask = scores.without_empty(cross_mask, parts.cross)
        return dataclasses.replace(parts, mask=mask, cross_mask=cross_mask)


@dataclass(frozen=True)
class Parts:
    """The inputs of a layer or a stack.

    Attributes:
        hidden: States.
        mask: Added to the scores of attention.
        cross: States of cross attention.
        cross_mask: Added to the scores of cross attention.
        positions: Position numbers.
        bias: The relative position bias.
        router_logits: Logits of the routers so far; ``None`` if they are not collected.
    """

    hidden: torch.Tensor
    mask: torch.Tensor | None = None
    cross: torch.Tensor | None = None
    cross_mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


def enter(outside: Parts) -> Parts:
    """Convert the inputs to the layout of the block.

    Args:
        outside: States ``[batch, S, H]`` and ``[batch, S2, H]``, masks ``[batch, ..]``, positions ``[batch, S]``.

    Returns:
        The same for the group; activations in the layout between products (:mod:`layout`).
    """
    hidden, cross = outside.hidden, outside.cross
    batch, length = hidden.shape[:2]
    whole = layout.group_batch(batch)
    mask = layout.with_shape(layout.gather_batch(outside.mask, batch), hidden, whole, length)
    cross_mask = layout.gather_batch(outside.cross_mask, batch)
    if cross is not None:
        cross_mask = layout.with_shape(cross_mask, hidden, whole, cross.shape[1])
        cross = layout.enter_block(cross)
    positions = layout.gather_batch(outside.positions, batch)
    return Parts(layout.enter_block(hidden), mask, cross, cross_mask, positions)


def _parts(inputs: States, has_cross: bool) -> Parts:
    """Return the entries of a tuple by their names."""
    expected = 4 if has_cross else 2
    if not isinstance(inputs, tuple) or not expected <= len(inputs) <= expected + 3:
        raise SMPValidationError(
            f"a transformer layer takes one tuple of {expected} entries, and position numbers after them: "
            f"got {type(inputs).__name__}{f' of {len(inputs)}' if isinstance(inputs, tuple) else ''}"
        )
    names = ("hidden", "cross", "mask", "cross_mask") if has_cross else ("hidden", "mask")
    return Parts(**dict(zip((*names, "positions", "bias", "router_logits"), inputs, strict=False)))
