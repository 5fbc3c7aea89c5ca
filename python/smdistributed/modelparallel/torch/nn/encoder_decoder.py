"""A transformer that encodes one sequence, and predicts the tokens of another one from it."""

from __future__ import annotations

import sys

import torch

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import initializers, layout, random
from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.feed_forward import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.nn.lm_head import IGNORED_LABEL, LanguageModelHead, TransformerEmbeddings
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.norm import make_norm
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer, Parts

#: Attention of the decoder has no longest sequence.
_UNLIMITED = sys.maxsize


class EncoderOutput(DistributedModule):
    """The norm after the last layer of an encoder, and dropout.

    Args:
        hidden_size: Features.
        norm: The kind of the norm.
        layernorm_epsilon: Its epsilon.
        dropout_prob: Probability with which an element is dropped.
    """

    def __init__(self, hidden_size: int, norm: str, layernorm_epsilon: float, dropout_prob: float) -> None:
        super().__init__()
        self.layernorm, self.dropout_prob = make_norm(norm, hidden_size, layernorm_epsilon), dropout_prob

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, wants_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normalize.

        Args:
            hidden: Activations in the layout between products (:mod:`layout`).
            mask: The mask of the group, from :func:`layout.with_shape`.
            wants_states: Whether states in the layout outside are needed.

        Returns:
            As ``hidden``; and ``[batch, S, H]``, if needed.
        """
        hidden = self.layernorm(hidden)
        hidden = random.dropout(hidden, self.dropout_prob, self.training, same_on_group=not layout.has_token_shares())
        return hidden, layout.leave_block(hidden, *layout.shape_of(hidden, mask)) if wants_states else None


class DistributedEncoderDecoder(DistributedModule):
    """Embeddings, an encoder, and a decoder with cross attention and a head: T5 (Raffel et al., 2020).

    Encoder, decoder and by default the head use one embedding. In training with labels, logits are not gathered: the
    cross entropy is computed from the slices of the ranks. The label of a token is the token itself.

    Args:
        num_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder; 0 for an encoder only.
        num_attention_heads: Heads of a layer; a multiple of the degree.
        attention_head_size: Size of a head.
        hidden_size: Features.
        intermediate_size: Features between the products of output layers; a multiple of the degree.
        vocab_size: Words.
        dropout_prob: Probability with which elements are dropped, wherever T5 does.
        activation: The activation of the feed-forward layers.
        layernorm_epsilon: Epsilon of the norms.
        initializer_factor: Factor of the standard deviations of initial weights, which are those of T5.
        add_lm_head: Whether there is a head.
        tie_word_embedding: Whether the head uses the weight of the embedding.
        scale_decoder_outputs: Whether the head's input is divided by the square root of ``hidden_size``.
        start_token: The first token of the decoder, if its tokens are labels shifted by one place.
        padding_token: The token of ignored labels in them.
        options: Properties of the layers.

    Attributes:
        embeddings: The embeddings.
        encoder: The layers of the encoder.
        encoder_output: The norm after them.
        decoder: The layers of the decoder.
        lm_head: The norm after them, and the head.

    Raises:
        SMPValidationError: A size is not divisible.
    """

    is_unit = False

    def __init__(
        self,
        num_layers: int = 12,
        num_decoder_layers: int = 12,
        num_attention_heads: int = 12,
        attention_head_size: int = 64,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        vocab_size: int = 32128,
        dropout_prob: float = 0.1,
        activation: str = "relu",
        layernorm_epsilon: float = 1e-6,
        initializer_factor: float = 1.0,
        add_lm_head: bool = True,
        tie_word_embedding: bool = True,
        scale_decoder_outputs: bool = True,
        start_token: int | None = None,
        padding_token: int | None = None,
        *,
        options: BlockOptions,
    ) -> None:
        super().__init__()
        self.start_token, self.padding_token = start_token, padding_token
        self.has_decoder, self.has_lm_head = num_decoder_layers > 0, add_lm_head and num_decoder_layers > 0
        norm = options.normalization
        self.embeddings = TransformerEmbeddings(
            vocab_size, 0, 0, hidden_size, dropout_prob, None, layernorm_epsilon, initializer_factor
        )
        sizes = num_attention_heads, attention_head_size, hidden_size, intermediate_size, dropout_prob, dropout_prob
        rest = activation, layernorm_epsilon, initializer_factor * hidden_size**-0.5, True
        self.encoder = DistributedTransformer(
            num_layers, *sizes, *rest, None, False, pre_layernorm=True, post_layernorm=False, options=options
        )
        self.encoder.share_masks()
        self.encoder_output = EncoderOutput(hidden_size, norm, layernorm_epsilon, dropout_prob)
        if self.has_decoder:
            self.decoder = DistributedTransformer(
                num_decoder_layers, *sizes, *rest, _UNLIMITED, True, pre_layernorm=True, post_layernorm=False,
                options=options,
            )  # fmt: skip
            self.decoder.share_masks(cross=True)
            self.lm_head = LanguageModelHead(
                hidden_size,
                vocab_size,
                norm,
                layernorm_epsilon,
                initializer_factor,
                add_lm_head,
                self.embeddings.word_embedding if tie_word_embedding else None,
                False,
                False,
                dropout_prob,
                hidden_size**-0.5 if scale_decoder_outputs else 1.0,
            )
        self._initialize_as_t5(initializer_factor)

    def _initialize_as_t5(self, factor: float) -> None:
        """Initialize weights by the number of features that are summed; others have that of the model's features."""

        def initialize(module: DistributedModule, fan_in: int) -> None:
            module.set_initializer("weight", initializers.weight(factor * fan_in**-0.5, True))

        for module in self.modules():
            if isinstance(module, DistributedAttentionLayer):
                heads, features = module.query._whole_shapes["weight"]
                # Scores are not divided by the square root of the size of a head.
                initialize(module.query, features * module.head_size)
                initialize(module.dense, heads)
            elif isinstance(module, DistributedTransformerOutputLayer):
                initialize(module.dense2, module.dense2._whole_shapes["weight"][1])

    def forward(
        self, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Predict tokens.

        Args:
            inputs: ``(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, labels)``. Numbers are
                ``[batch, S]``, for the encoder and the decoder each with its own length; in masks, 1 is a masked
                token. Entries at the end may be left out. Without ``decoder_input_ids``, the labels are used, shifted
                by one place.

        Returns:
            The loss, if there are labels; logits ``[batch, S, vocab_size]``, or without a head states ``[batch, S,
            H]``; and the states of the encoder. In training with labels, only the loss.

        Raises:
            SMPValidationError: An input is missing, or one is not taken.
        """
        if not isinstance(inputs, tuple) or not 1 <= len(inputs) <= 5:
            raise SMPValidationError("DistributedEncoderDecoder takes one tuple of 1 to 5 entries")
        ids, mask, decoder_ids, decoder_mask, labels = (*inputs, *[None] * (5 - len(inputs)))
        assert ids is not None
        if labels is not None and not self.has_lm_head:
            raise SMPValidationError("labels need `add_lm_head=True`")
        wants_outputs = labels is None or not self.training
        hidden, mask, _ = self.embeddings(ids, mask, None, None)
        hidden, _ = self.encoder.compute(Parts(hidden, mask))
        encoded, states = self.encoder_output(hidden, mask, wants_outputs)
        if not self.has_decoder:
            return None, None, states
        if decoder_ids is None:
            if labels is None:
                raise SMPValidationError("a decoder needs `decoder_input_ids` or labels")
            decoder_ids = self.shifted(labels)
        hidden, decoder_mask, _ = self.embeddings(decoder_ids, decoder_mask, None, None)
        hidden, _ = self.decoder.compute(Parts(hidden, decoder_mask, encoded, mask))
        loss, logits = self.lm_head(hidden, decoder_mask, labels, wants_outputs)
        return loss, logits, states

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the tokens before each label.

        Args:
            labels: ``[batch, S]``.

        Returns:
            The same shape, from ``start_token`` on.

        Raises:
            SMPValidationError: ``start_token`` or ``padding_token`` is not known.
        """
        if self.start_token is None or self.padding_token is None:
            raise SMPValidationError("labels without `decoder_input_ids` need `start_token` and `padding_token`")
        first = torch.full_like(labels[:, :1], self.start_token)
        before = torch.cat((first, labels[:, :-1]), 1)
        return before.masked_fill(before == IGNORED_LABEL, self.padding_token)
