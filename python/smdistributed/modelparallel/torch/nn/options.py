"""Properties of blocks in published architectures that the original library does not support."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn.relative_bias import RelativeBias
from smdistributed.modelparallel.torch.nn.rotary import Rotary


@dataclass(frozen=True)
class BlockOptions:
    """Options of ``DistributedTransformer``, its layers and their parts; the defaults are those of the original.

    Attributes:
        num_key_value_heads: Heads of keys and values; fewer than query heads for grouped-query attention.
        qkv_bias: Whether query, key and value have biases.
        dense_bias: Whether the output projection of the attention has a bias.
        mlp_bias: Whether the products of the feed-forward layer have biases.
        normalization: ``layernorm`` or ``rmsnorm``.
        rotary: Rotary position embedding, if any.
        attention_scale: Factor of scores; ``None`` for ``1 / sqrt(attention_head_size)``.
        scale_by_layer: Whether scores are also divided by the number of the layer, from 1.
        attention_in_fp32: Whether scores of narrow types are computed in float32.
        windows: By layer, the number of tokens to which a token attends, including itself; ``None`` for all. A single
        entry applies to all layers.
        gated: Whether one product's activation is multiplied by another product: SwiGLU with ``activation="silu"``.
        parallel_residual: Whether attention and feed-forward layer have the same input, and both outputs are added to
        it.
        shared_norm: With ``parallel_residual``, whether both use the attention's norm.
        use_alibi: Whether scores get a bias that is linear in the distance (Press et al., 2022).
        alibi_bias_max: Exponent of the last head's slope.
        fp32_residual_addition: Whether residuals are added in float32.
        relative_bias: The bias of scores by the distance of tokens, which the layers of a stack share, if any.
        activation_dropout_prob: Probability with which a feature between the products of the feed-forward layer is
        dropped.
        limits_fp16: Whether the outputs of sublayers in float16 are clamped to finite values.
        num_experts: Number of feed-forward layers, of which each token uses some; ``None`` for a single one.
        experts_per_token: Number of experts that a token uses.
        router_jitter: With a value above 0, training multiplies the input of router and experts by random numbers
        between ``1 - router_jitter`` and ``1 + router_jitter``.
    """

    num_key_value_heads: int | None = None
    qkv_bias: bool = True
    dense_bias: bool = True
    mlp_bias: bool = True
    normalization: str = "layernorm"
    rotary: Rotary | None = None
    attention_scale: float | None = None
    scale_by_layer: bool = False
    attention_in_fp32: bool = False
    windows: tuple[int | None, ...] = (None,)
    gated: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    use_alibi: bool = False
    alibi_bias_max: int = 8
    fp32_residual_addition: bool = False
    relative_bias: RelativeBias | None = None
    activation_dropout_prob: float = 0.0
    limits_fp16: bool = False
    num_experts: int | None = None
    experts_per_token: int = 2
    router_jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.normalization not in ("layernorm", "rmsnorm"):
            raise SMPValidationError(f"`normalization` is {self.normalization!r}: expected 'layernorm' or 'rmsnorm'")
        if self.num_experts is not None and not 1 <= self.experts_per_token <= self.num_experts:
            raise SMPValidationError(
                f"`experts_per_token` is {self.experts_per_token}: expected 1 to `num_experts` {self.num_experts}"
            )

    def window(self, layer: int) -> int | None:
        """Return the number of tokens to which a token of a layer attends.

        Args:
            layer: The number of the layer, from 0.

        Returns:
            The number; ``None`` for all.
        """
        return self.windows[layer if len(self.windows) > 1 else 0]


#: Names of the fields.
OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(BlockOptions))
