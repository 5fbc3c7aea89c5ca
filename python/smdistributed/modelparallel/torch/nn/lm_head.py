"""A transformer with embeddings and a head that predicts tokens."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import collectives, initializers, layout, random
from smdistributed.modelparallel.torch.nn.cross_entropy import vocab_parallel_cross_entropy
from smdistributed.modelparallel.torch.nn.embedding import VocabParallelEmbedding
from smdistributed.modelparallel.torch.nn.experts import load_balancing_loss
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.norm import make_norm
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.products import column_products
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer, Parts

#: Labels that no loss is computed for.
IGNORED_LABEL = -100


class TransformerEmbeddings(DistributedModule):
    """Word, position and token type embeddings, divided by rows, and the transition of their sum into the block.

    Args:
        vocab_size: Words.
        num_positions: Positions; 0 for none.
        num_token_types: Token types; 0 for none.
        hidden_size: Features.
        dropout_prob: Probability with which an element of the sum is dropped.
        norm: The kind of a norm of the sum; ``None`` for none.
        layernorm_epsilon: Its epsilon.
        initializer_range: Standard deviation of initial values.
        first_position: The position of the first token.
        padding_idx: A word whose embedding gets no gradient.
    """

    def __init__(
        self,
        vocab_size: int,
        num_positions: int,
        num_token_types: int,
        hidden_size: int,
        dropout_prob: float,
        norm: str | None,
        layernorm_epsilon: float,
        initializer_range: float,
        first_position: int = 0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.dropout_prob, self.first_position, self.num_positions = dropout_prob, first_position, num_positions
        self.word_embedding = VocabParallelEmbedding(vocab_size, hidden_size, initializer_range, padding_idx)
        if num_positions:
            self.position_embedding = VocabParallelEmbedding(num_positions, hidden_size, initializer_range)
        if num_token_types:
            self.token_type_embedding = VocabParallelEmbedding(num_token_types, hidden_size, initializer_range)
        if norm is not None:
            self.layernorm = make_norm(norm, hidden_size, layernorm_epsilon)
        self.has_token_types, self.has_norm = bool(num_token_types), norm is not None

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Look tokens up.

        Args:
            input_ids: ``[batch, S]``.
            attention_mask: ``[batch, S]``, 1 where a token is masked; or ``[batch, 1, ..]``, added to scores.
            token_type_ids: ``[batch, S]``; zeros by default.
            position_ids: ``[batch, S]``; 0, 1, ... by default.

        Returns:
            Activations in the layout between products (:mod:`layout`), the additive mask of the group, and its
            positions.

        Raises:
            SMPValidationError: The sequence is longer than there are positions.
        """
        batch, length = input_ids.shape
        if self.num_positions and length + self.first_position > self.num_positions:
            raise SMPValidationError(
                f"the sequence has {length} tokens, and there are {self.num_positions - self.first_position} positions"
            )
        ids = layout.gather_batch(input_ids, batch)
        positions = layout.gather_batch(position_ids, batch)
        # One all-reduce adds up the partial results of all embeddings.
        partial = self.word_embedding(ids)
        if self.num_positions:
            places = positions
            if places is None:
                places = torch.arange(length, device=input_ids.device)[None] + self.first_position
            partial = partial + self.position_embedding(places)
        if self.has_token_types:
            types = layout.gather_batch(token_type_ids, batch)
            partial = partial + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        hidden = layout.leave_product(partial)
        if self.has_norm:
            hidden = self.layernorm(hidden)
        hidden = random.dropout(hidden, self.dropout_prob, self.training, same_on_group=not layout.has_token_shares())
        mask = layout.gather_batch(additive_mask(attention_mask, hidden.dtype), batch)
        return hidden, layout.with_shape(mask, hidden, layout.group_batch(batch), length), positions


class LanguageModelHead(DistributedModule):
    """A norm and a projection to the vocabulary, divided by rows; losses come from slices of logits.

    Args:
        hidden_size: Features.
        vocab_size: Words.
        norm: The kind of the norm; ``None`` for none.
        layernorm_epsilon: Its epsilon.
        initializer_range: Standard deviation of initial weights.
        has_projection: Whether there is a projection.
        tied: The embedding whose weight the projection uses; ``None`` for a weight of its own.
        bias: Whether the projection has a bias.
        is_causal: Whether the label of a token is the next token.
        dropout_prob: Probability with which an element of the norm's output is dropped.
        scale: Factor of the input of the projection.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        norm: str | None,
        layernorm_epsilon: float,
        initializer_range: float,
        has_projection: bool,
        tied: VocabParallelEmbedding | None,
        bias: bool,
        is_causal: bool,
        dropout_prob: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.dropout_prob, self.scale = dropout_prob, scale
        self.is_causal, self.has_norm, self.has_projection = is_causal, norm is not None, has_projection
        if norm is not None:
            self.layernorm = make_norm(norm, hidden_size, layernorm_epsilon)
        if not has_projection:
            return
        self.vocab_size = vocab_size
        if tied is None:
            initial = initializers.weight(initializer_range, True)
            self.add_parameter("weight", (vocab_size, hidden_size), initial, shard_dim=0, padded=True)
        else:
            self.share_parameter("weight", tied, "weight")
        if bias:
            self.add_parameter("bias", (vocab_size,), initializers.zeros, shard_dim=0, padded=True)
        else:
            self.register_parameter("bias", None)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        wants_logits: bool,
        num_items_in_batch: torch.Tensor | float | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute losses or logits.

        Args:
            hidden: Activations in the layout between products (:mod:`layout`).
            mask: The mask of the group, from :func:`layout.with_shape`.
            labels: ``[batch, S]``; -100 for tokens without a loss.
            wants_logits: Whether the logits of the whole vocabulary are gathered.
            num_items_in_batch: The divisor of the sum of losses; the number of this rank's labels by default.

        Returns:
            The mean loss of this rank's tokens, if there are labels; and ``[batch, S, vocab_size]``, if requested.
            Without a projection, the hidden states instead.
        """
        if self.has_norm:
            hidden = self.layernorm(hidden)
        hidden = random.dropout(hidden, self.dropout_prob, self.training, same_on_group=not layout.has_token_shares())
        batch, length = layout.shape_of(hidden, mask)
        if not self.has_projection:
            return None, layout.leave_block(hidden, batch, length)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        own: Any = (self.weight, self.bias)
        (logits,) = column_products(hidden, batch, length, [own])
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return loss, self._whole(logits) if wants_logits else None

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, num_items: torch.Tensor | float | None) -> torch.Tensor:
        own = labels[:, 1:] if self.is_causal else labels
        logits = logits[:, :-1] if self.is_causal else logits
        targets = layout.gather_batch(own.contiguous(), labels.shape[0])
        assert targets is not None
        bounds = self.shards["weight"].bounds(collectives.tp_rank())
        losses = vocab_parallel_cross_entropy(logits.flatten(0, 1), targets.flatten(), *bounds).view(targets.shape)
        if not layout.is_prescaled():
            losses = collectives.split_tokens(losses)
        counts = own != IGNORED_LABEL
        return losses.masked_fill(~counts, 0.0).sum() / (counts.sum() if num_items is None else num_items)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        gather = collectives.gather_features if layout.is_prescaled() else collectives.features_to_tokens
        return gather(logits)[..., : self.vocab_size]


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a :class:`DistributedTransformer`, and a head that shares the weight of the word embedding.

    In training with labels, logits are not gathered: the cross entropy is computed from the slices of the ranks. With
    ``causal_mask_size``, the label of a token is the next token, as in Hugging Face's causal models.

    Args:
        num_layers: Layers.
        num_attention_heads: Heads of a layer; a multiple of the degree.
        attention_head_size: Size of a head.
        hidden_size: Features.
        intermediate_size: Features between the products of output layers; a multiple of the degree.
        vocab_size: Words.
        num_positions: Positions of the position embedding; 0 for none.
        attention_dropout_prob: Probability with which an attention weight is dropped.
        hidden_dropout_prob: Probability with which an output is dropped, and an embedding.
        activation: The activation of the feed-forward layers.
        layernorm_epsilon: Epsilon of the norms.
        num_token_types: Token types; 0 for none.
        causal_mask_size: Longest sequence of causal attention; ``None`` for attention to all tokens.
        add_cross_attention: Whether there is cross attention.
        add_lm_head: Whether there is a head; otherwise the output is the hidden states.
        initializer_range: Standard deviation of initial weights.
        use_normal_initialization: Whether initial weights of products are normal.
        pre_layernorm: Whether the inputs of sublayers, and the output of the last layer, are normalized.
        post_layernorm: Whether the outputs of sublayers are normalized; without ``pre_layernorm`` also the
        embeddings' sum.
        options: Further properties of published architectures.
        embedding_dropout_prob: The probability for embeddings, if it differs.
        tie_word_embedding: Whether the head uses the weight of the word embedding.
        lm_head_bias: Whether the head has a bias.
        first_position: The position of the first token.
        padding_idx: A word whose embedding gets no gradient.
        router_loss_factor: With experts, the factor of the loss that balances them.
        output_router_logits: With experts, whether that loss is added, and the logits of the routers are returned.

    Attributes:
        embeddings: The embeddings.
        transformer: The stack of layers.
        lm_head: The norm after the last layer, and the head.
    """

    is_unit = False

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        options: BlockOptions | None = None,
        embedding_dropout_prob: float | None = None,
        tie_word_embedding: bool = True,
        lm_head_bias: bool = False,
        first_position: int = 0,
        padding_idx: int | None = None,
        router_loss_factor: float = 0.0,
        output_router_logits: bool = False,
    ) -> None:
        super().__init__()
        options = options or BlockOptions()
        self.has_cross_attention, self.has_lm_head = add_cross_attention, add_lm_head
        dropout_prob = hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        self.embeddings = TransformerEmbeddings(
            vocab_size,
            num_positions,
            num_token_types,
            hidden_size,
            dropout_prob,
            None if pre_layernorm else options.normalization,
            layernorm_epsilon,
            initializer_range,
            first_position,
            padding_idx,
        )
        self.router_loss_factor, self.output_router_logits = router_loss_factor, output_router_logits
        self.experts_per_token = options.experts_per_token
        self.transformer = DistributedTransformer(
            num_layers,
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
        )
        self.transformer.share_masks()
        self.lm_head = LanguageModelHead(
            hidden_size,
            vocab_size,
            options.normalization if pre_layernorm and not post_layernorm else None,
            layernorm_epsilon,
            initializer_range,
            add_lm_head,
            self.embeddings.word_embedding if tie_word_embedding else None,
            lm_head_bias,
            causal_mask_size is not None,
        )

    def forward(
        self,
        inputs: tuple[torch.Tensor | None, ...],
        num_items_in_batch: torch.Tensor | float | None = None,
        output_router_logits: bool | None = None,
    ) -> Any:
        """Predict tokens.

        Args:
            inputs: ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``; with cross attention
                ``(.., position_ids, cross_states, cross_mask, labels)``. ``input_ids`` and ``labels`` are ``[batch,
                S]``; in the mask ``[batch, S]``, 1 is a masked token. Entries at the end may be left out. An eighth
                entry after the masks, which documentation of the original lists, is ignored.
            num_items_in_batch: The divisor of the sum of losses; the number of labels by default.
            output_router_logits: Takes precedence over the constructor's argument.

        Returns:
            Logits ``[batch, S, vocab_size]``, or states without a head; with labels ``(loss, logits)``, where logits
            are ``None`` in training. With ``output_router_logits``: ``(loss, logits, balancing_loss, router_logits)``,
            where the loss includes the balancing one, and is ``None`` without labels. Router logits are ``[batch * S,
            num_experts]`` of each layer.
        """
        expected = 7 if self.has_cross_attention else 5
        if self.has_cross_attention and len(inputs) == 8:
            # The original's documentation lists the cross states twice.
            inputs = (*inputs[:6], inputs[7])
        if not isinstance(inputs, tuple) or not 1 <= len(inputs) <= expected:
            raise SMPValidationError(
                f"DistributedTransformerLMHead takes one tuple of 1 to {expected} entries: got "
                f"{type(inputs).__name__}{f' of {len(inputs)}' if isinstance(inputs, tuple) else ''}"
            )
        ids, mask, types, positions, *rest = (*inputs, *[None] * (expected - len(inputs)))
        labels = rest.pop()
        assert ids is not None
        if labels is not None and not self.has_lm_head:
            raise SMPValidationError("labels need `add_lm_head=True`")
        hidden, mask, positions = self.embeddings(ids, mask, types, positions)
        cross = cross_mask = None
        if self.has_cross_attention:
            cross, cross_mask = rest
            assert cross is not None
            batch = cross.shape[0]
            cross_mask = layout.gather_batch(additive_mask(cross_mask, cross.dtype), batch)
            cross_mask = layout.with_shape(cross_mask, cross, layout.group_batch(batch), cross.shape[1])
            cross = layout.enter_block(cross)
        wants_routers = self.output_router_logits if output_router_logits is None else output_router_logits
        if wants_routers and not self.transformer.has_experts:
            raise SMPValidationError("`output_router_logits` needs `num_experts`")
        routers = () if wants_routers else None
        parts = Parts(hidden, mask, cross, cross_mask, positions, router_logits=routers)
        hidden, routed = self.transformer.compute(parts)
        loss, logits = self.lm_head(hidden, mask, labels, labels is None or not self.training, num_items_in_batch)
        if routed is None:
            return logits if labels is None else (loss, logits)
        # Losses are means over the tokens of a rank, so each rank balances its own tokens.
        group = layout.shape_of(hidden, mask)
        routed = tuple(layout.leave_block(each, *group).flatten(0, 1) for each in routed)
        balancing = load_balancing_loss(routed, self.experts_per_token, _is_token(inputs[1] if inputs[1:] else None))
        if loss is not None:
            loss = loss + self.router_loss_factor * balancing.to(loss.device)
        return loss, logits, balancing, routed


def _is_token(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return 1 for tokens and 0 for padding, from a mask with 1 for padding."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise SMPValidationError(f"`output_router_logits` needs an attention mask [batch, S]: it is {list(mask.shape)}")
    return 1 - mask.long()


def additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask that is added to scores.

    Args:
        mask: ``[batch, S]``, 1 where a token is masked; or an additive one, ``[batch, 1, ..]``.
        dtype: Type of the result.

    Returns:
        ``[batch, 1, 1, S]``.
    """
    if mask is None or mask.dim() != 2:
        return mask
    return mask[:, None, None, :].to(dtype) * torch.finfo(dtype).min
