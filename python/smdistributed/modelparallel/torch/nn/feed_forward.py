"""The feed-forward layer of a transformer block, with its inner features divided over the tensor-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import layout, random
from smdistributed.modelparallel.torch.nn.attention import add_residual, limited
from smdistributed.modelparallel.torch.nn.linear import ColumnParallelLinear, RowParallelLinear
from smdistributed.modelparallel.torch.nn.module import DistributedModule, check_divisible
from smdistributed.modelparallel.torch.nn.norm import make_norm
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.products import column_products

#: Activations by their names in configurations.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_fast": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}


class DistributedTransformerOutputLayer(DistributedModule):
    """Two products with an activation between them, with norms, dropout and residual.

    Args:
        hidden_size: Features of the input and output.
        intermediate_size: Features between the products; a multiple of the degree.
        hidden_dropout_prob: Probability with which an output is dropped, before the residual.
        activation: ``gelu``, ``relu``, or another key of ``ACTIVATIONS``.
        layernorm_epsilon: Epsilon of the norms.
        initializer_range: Standard deviation of initial weights.
        use_normal_initialization: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
        pre_layernorm: Whether the input is normalized.
        post_layernorm: Whether the sum of output and residual is normalized.
        fp32_residual_addition: Whether the residual is added in float32.
        options: Further properties of published architectures.

    Raises:
        SMPValidationError: ``intermediate_size`` is not divisible, or the activation is unknown.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        options: BlockOptions | None = None,
    ) -> None:
        super().__init__()
        check_divisible(intermediate_size, "`intermediate_size`")
        if activation not in ACTIVATIONS:
            raise SMPValidationError(f"`activation` is {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        options = options or BlockOptions()
        self.activation, self.hidden_dropout_prob = activation, hidden_dropout_prob
        self.fp32_residual_addition = fp32_residual_addition or options.fp32_residual_addition
        init = options.mlp_bias, initializer_range, use_normal_initialization
        if options.gated:
            self.gate = ColumnParallelLinear(hidden_size, intermediate_size, *init)
        self.dense1 = ColumnParallelLinear(hidden_size, intermediate_size, *init)
        self.dense2 = RowParallelLinear(intermediate_size, hidden_size, *init)
        if pre_layernorm:
            self.pre_layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
        if post_layernorm:
            self.layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
        self.is_gated, self.activation_dropout_prob = options.gated, options.activation_dropout_prob
        self.limits_fp16 = options.limits_fp16
        self.has_pre_layernorm, self.has_post_layernorm = pre_layernorm, post_layernorm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            hidden: ``[N, S, H]``.

        Returns:
            The same shape.
        """
        batch, length = layout.group_batch(hidden.shape[0]), hidden.shape[1]
        return layout.leave_block(self.compute(layout.enter_block(hidden), batch, length), batch, length)

    def compute(self, hidden: torch.Tensor, batch: int, length: int, has_residual: bool = True) -> torch.Tensor:
        """Apply the layer inside of a block; see :mod:`layout` for the shapes.

        Args:
            hidden: Activations in the layout between products.
            batch: ``N``.
            length: ``S``.
            has_residual: Whether the input is added.

        Returns:
            As ``hidden``.
        """
        normed = self.pre_layernorm(hidden) if self.has_pre_layernorm else hidden
        activation = ACTIVATIONS[self.activation]
        layers = [self.gate, self.dense1] if self.is_gated else [self.dense1]
        products = column_products(normed, batch, length, [layer.local() for layer in layers])
        inner = activation(products[0]) * products[1] if self.is_gated else activation(products[0])
        # Ranks have different features.
        inner = random.dropout(inner, self.activation_dropout_prob, self.training, same_on_group=False)
        output = random.dropout(
            self.dense2(inner), self.hidden_dropout_prob, self.training, same_on_group=not layout.has_token_shares()
        )
        if has_residual:
            output = add_residual(hidden, output, self.fp32_residual_addition)
        if self.limits_fp16:
            output = limited(output)
        return self.layernorm(output) if self.has_post_layernorm else output
