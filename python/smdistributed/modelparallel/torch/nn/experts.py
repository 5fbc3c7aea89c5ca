"""Mixture of experts: feed-forward layers of which each token uses some, each divided over the tensor-parallel group.

Every rank has a slice of the inner features of each expert, and the whole router. So all ranks compute all tokens of
the group, and no token changes its rank: the exchanges are those of a single feed-forward layer (:mod:`layout`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import initializers, layout, random
from smdistributed.modelparallel.torch.nn.attention import add_residual
from smdistributed.modelparallel.torch.nn.feed_forward import ACTIVATIONS
from smdistributed.modelparallel.torch.nn.module import DistributedModule, between_products_in_group, check_divisible
from smdistributed.modelparallel.torch.nn.norm import make_norm
from smdistributed.modelparallel.torch.nn.options import BlockOptions

#: Alignment of rows, in bytes, that PyTorch's grouped product needs.
_ALIGNMENT = 16


class Router(DistributedModule):
    """Scores the experts for each token. Every rank has its weight.

    Args:
        hidden_size: Features of a token.
        num_experts: Number of experts.
        experts_per_token: Number of experts that a token uses.
        std: Standard deviation of initial weights.
        use_normal: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, experts_per_token: int, std: float, use_normal: bool
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        initial = initializers.weight(std, use_normal)
        self.add_parameter("weight", (num_experts, hidden_size), initial, in_group=between_products_in_group())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the experts.

        Args:
            hidden: Activations in the layout between products (:mod:`layout`).

        Returns:
            The same shape, with a logit for each expert instead of the features.
        """
        return functional.linear(hidden, self.weight)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token.

        Args:
            logits: ``[tokens, num_experts]``.

        Returns:
            The weights of the chosen experts, whose sum is 1, and their numbers: ``[tokens, experts_per_token]``.
        """
        weights, chosen = probabilities(logits).topk(self.experts_per_token, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(DistributedModule):
    """The products of all experts, with gated activations; each rank has a slice of the inner features.

    Args:
        num_experts: Number of experts.
        hidden_size: Features of the input and output.
        intermediate_size: Features between the products of an expert; a multiple of the degree.
        activation: A key of ``ACTIVATIONS``.
        std: Standard deviation of initial weights.
        use_normal: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, activation: str, std: float, use_normal: bool
    ) -> None:
        super().__init__()
        self.activation, self.num_experts = activation, num_experts
        first, second = (num_experts, intermediate_size, hidden_size), (num_experts, hidden_size, intermediate_size)
        initial = initializers.weight(std, use_normal)
        self.add_parameter("gate", first, initial, shard_dim=1)
        self.add_parameter("dense1", first, initial, shard_dim=1)
        self.add_parameter("dense2", second, initial, shard_dim=2)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Apply to each token the experts that it uses.

        Args:
            tokens: ``[tokens, hidden_size]``, group region.
            weights: ``[tokens, experts per token]``, factors of the experts' outputs.
            chosen: ``[tokens, experts per token]``, numbers of experts.

        Returns:
            ``[tokens, hidden_size]``, a partial result.
        """
        count, each = chosen.shape
        pairs, slices, device = count * each, [self.gate, self.dense1, self.dense2], tokens.device.type
        if torch.is_autocast_enabled(device):
            narrow = torch.get_autocast_dtype(device)
            tokens, slices = tokens.to(narrow), [weight.to(narrow) for weight in slices]
        is_grouped, numbers = _can_be_grouped(tokens, slices), chosen.flatten()
        if is_grouped:
            # PyTorch does not say which gradient the weight of an empty group has. So each expert has one row more,
            # that of the first token, whose output is not used.
            numbers = torch.cat((numbers, torch.arange(self.num_experts, device=numbers.device)))
        # One row for each pair of token and expert, in the order of the experts.
        order = numbers.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        rows = tokens[:, None].expand(-1, each, -1).reshape(pairs, -1)
        rows = rows.index_select(0, order.masked_fill(order >= pairs, 0))
        with torch.autocast(device, enabled=False):
            if is_grouped:
                outputs = self._grouped(rows, numbers.index_select(0, order), slices)
            else:
                outputs = self._one_by_one(rows, self._rows_of_experts(chosen), slices)
        whole = outputs.index_select(0, places[:pairs]).view(count, each, -1)
        return (whole * weights[..., None].to(whole.dtype)).sum(1)

    def _grouped(self, rows: torch.Tensor, numbers: torch.Tensor, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply all experts together; the host does not read ``numbers``, the expert of each row."""
        experts = torch.arange(self.num_experts, device=numbers.device)
        ends = torch.searchsorted(numbers, experts, right=True, out_int32=True)
        gate, dense1, dense2 = (weight.transpose(1, 2) for weight in slices)
        inner = ACTIVATIONS[self.activation](functional.grouped_mm(rows, gate, offs=ends))
        return functional.grouped_mm(inner * functional.grouped_mm(rows, dense1, offs=ends), dense2, offs=ends)

    def _one_by_one(self, rows: torch.Tensor, counts: list[int], slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply one expert after the other."""
        activation = ACTIVATIONS[self.activation]
        outputs = [
            functional.linear(activation(functional.linear(part, gate)) * functional.linear(part, dense1), dense2)
            for part, gate, dense1, dense2 in zip(
                rows.split(counts), *(weight.unbind() for weight in slices), strict=True
            )
        ]
        return torch.cat(outputs)

    def _rows_of_experts(self, chosen: torch.Tensor) -> list[int]:
        """Return the number of rows of each expert. All ranks have the same numbers."""
        experts = self.num_experts
        if isinstance(chosen, FakeTensor):
            # Fake tensors have no values, and the number of rows does not change the shape of the result.
            share, rest = divmod(chosen.numel(), experts)
            return [share + (expert < rest) for expert in range(experts)]
        return torch.bincount(chosen.flatten(), minlength=experts).tolist()


def _can_be_grouped(tokens: torch.Tensor, slices: Sequence[torch.Tensor]) -> bool:
    """Return whether PyTorch has a product of groups whose sizes stay on the device.

    On GPUs, it has one for bfloat16 from compute capability 8.0 on, for rows that start at multiples of 16 bytes. For
    other types its product reads the sizes on the host as well.
    """
    if tokens.dtype != torch.bfloat16:
        return False
    # Tensors without memory, while a compiler or a pipeline traces, are taken for aligned ones.
    has_memory = not torch.compiler.is_compiling() and not isinstance(tokens, FakeTensor)
    starts = [weight.shape[dim] * weight.element_size() for weight in slices for dim in (1, 2)]
    starts += [weight.data_ptr() for weight in slices] if has_memory else []
    reason = None
    if not hasattr(functional, "grouped_mm"):
        reason = f"PyTorch {torch.__version__} has no `torch.nn.functional.grouped_mm`"
    elif tokens.device.type == "cuda" and torch.cuda.get_device_capability(tokens.device) < (8, 0):
        reason = f"the compute capability of {torch.cuda.get_device_name(tokens.device)} is less than 8.0"
    elif any(start % _ALIGNMENT for start in starts):
        sizes = " and ".join(sorted({str(list(weight.shape[1:])) for weight in slices}))
        reason = f"rows of {sizes}, the slices of their weights, do not start at multiples of {_ALIGNMENT} bytes"
    if reason is not None:
        warnings.warn(f"experts are multiplied one by one, and the host waits for the router: {reason}", stacklevel=2)
    return reason is None


class DistributedExpertsLayer(DistributedModule):
    """Router and experts, with norms, dropout and residual: the output layer of a block with experts.

    Args:
        hidden_size: Features of the input and output.
        intermediate_size: Features between the products of an expert; a multiple of the degree.
        hidden_dropout_prob: Probability with which an output is dropped, before the residual.
        activation: A key of ``ACTIVATIONS``.
        layernorm_epsilon: Epsilon of the norms.
        initializer_range: Standard deviation of initial weights.
        use_normal_initialization: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
        pre_layernorm: Whether the input is normalized.
        post_layernorm: Whether the sum of output and residual is normalized.
        options: Further properties, with ``num_experts``.

    Raises:
        SMPValidationError: ``intermediate_size`` is not divisible, the activation is unknown, or the experts have
            biases or are not gated.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_dropout_prob: float,
        activation: str,
        layernorm_epsilon: float,
        initializer_range: float,
        use_normal_initialization: bool,
        pre_layernorm: bool,
        post_layernorm: bool,
        *,
        options: BlockOptions,
    ) -> None:
        super().__init__()
        assert options.num_experts is not None
        check_divisible(intermediate_size, "`intermediate_size`")
        if activation not in ACTIVATIONS:
            raise SMPValidationError(f"`activation` is {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        if options.mlp_bias or not options.gated:
            raise SMPValidationError("`num_experts` needs `gated=True` and `mlp_bias=False`")
        if options.activation_dropout_prob or options.limits_fp16 or options.parallel_residual:
            raise SMPValidationError(
                "`num_experts` has no `activation_dropout_prob`, no `limits_fp16` and no `parallel_residual`"
            )
        init = initializer_range, use_normal_initialization
        self.router = Router(hidden_size, options.num_experts, options.experts_per_token, *init)
        self.experts = Experts(options.num_experts, hidden_size, intermediate_size, activation, *init)
        if pre_layernorm:
            self.pre_layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
        if post_layernorm:
            self.layernorm = make_norm(options.normalization, hidden_size, layernorm_epsilon)
        self.has_pre_layernorm, self.has_post_layernorm = pre_layernorm, post_layernorm
        self.hidden_dropout_prob, self.jitter = hidden_dropout_prob, options.router_jitter
        self.fp32_residual_addition = options.fp32_residual_addition

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            hidden: ``[N, S, H]``.

        Returns:
            The same shape.
        """
        batch, length = layout.group_batch(hidden.shape[0]), hidden.shape[1]
        output, _ = self.compute(layout.enter_block(hidden), batch, length)
        return layout.leave_block(output, batch, length)

    def compute(self, hidden: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer inside of a block; see :mod:`layout` for the shapes.

        Args:
            hidden: Activations in the layout between products.
            batch: ``N``.
            length: ``S``.

        Returns:
            As ``hidden``, and the logits of the router in the same layout.
        """
        same_on_group = not layout.has_token_shares()
        normed = self.pre_layernorm(hidden) if self.has_pre_layernorm else hidden
        if self.training and self.jitter > 0:
            with random.seeded(normed, same_on_group=same_on_group):
                normed = normed * torch.empty_like(normed).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.router(normed)
        tokens = layout.enter_product(normed, batch, length)
        # Each rank has a part of the experts' outputs, so the gradients of their weights are sums over the group, too.
        weights, chosen = self.router.choose(layout.enter_product(logits, batch, length).flatten(0, 1))
        output = self.experts(tokens.flatten(0, 1), weights, chosen).view(tokens.shape)
        output = random.dropout(
            layout.leave_product(output), self.hidden_dropout_prob, self.training, same_on_group=same_on_group
        )
        output = add_residual(hidden, output, self.fp32_residual_addition)
        return self.layernorm(output) if self.has_post_layernorm else output, logits


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of experts; narrow types are computed in float32.

    Args:
        logits: ``[.., num_experts]``.

    Returns:
        The same shape.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return wide.softmax(-1)


def load_balancing_loss(
    logits: Sequence[torch.Tensor], experts_per_token: int, is_token: torch.Tensor | None
) -> torch.Tensor:
    """Return the loss that balances experts (Fedus et al., 2022, equations 4 to 6), over the tokens of all layers.

    Args:
        logits: For each layer, logits of the router ``[.., num_experts]``.
        experts_per_token: Number of experts that a token uses.
        is_token: ``[..]``, 0 for padding, which is not counted; ``None`` without padding.

    Returns:
        The number of experts times the sum, over experts, of the fraction of tokens that use it multiplied by its mean
        probability; 1 if tokens are distributed equally and use one expert each.
    """
    num_experts = logits[0].shape[-1]
    used = mean = logits[0].new_zeros(num_experts)
    total = logits[0].new_zeros(())
    for layer in logits:
        rows = probabilities(layer.reshape(-1, num_experts))
        chosen = rows.detach().topk(experts_per_token, -1)[1]
        counted = rows.new_ones(rows.shape[0]) if is_token is None else is_token.reshape(-1).to(rows)
        uses = torch.zeros_like(rows).scatter_(-1, chosen, 1.0)
        used, mean, total = used + counted @ uses, mean + counted @ rows, total + counted.sum()
    return num_experts * (used / total * (mean / total)).sum()
