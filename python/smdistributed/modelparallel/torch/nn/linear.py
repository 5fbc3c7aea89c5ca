"""Linear layers with divided weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.nn import collectives, initializers, layout
from smdistributed.modelparallel.torch.nn.module import DistributedModule, between_products_in_group, check_divisible
from smdistributed.modelparallel.torch.nn.products import row_product


class DistributedLinear(DistributedModule):
    """A linear layer whose input features are divided over the tensor-parallel group.

    The input is split by features, each rank multiplies its slice, and the sum of the products is reduce-scattered,
    or with ``prescaled_batch`` all-reduced. The bias is added once.

    Args:
        in_features: Input features of the whole layer; a multiple of the degree.
        out_features: Output features.
        bias: Whether there is a bias.

    Raises:
        SMPValidationError: ``in_features`` is not divisible.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        check_divisible(in_features, "`in_features` of DistributedLinear")
        self.in_features, self.out_features = in_features, out_features
        self.add_parameter("weight", (out_features, in_features), initializers.weight(0.0, False), shard_dim=1)
        if bias:
            # Without `prescaled_batch`, the bias is added to the rank's own tokens.
            in_group = layout.is_prescaled() or collectives.tp_size() == 1
            self.add_parameter("bias", (out_features,), initializers.bias(in_features, False), in_group=in_group)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            input: ``[batch, .., in_features]``.

        Returns:
            ``[batch, .., out_features]``.
        """
        if collectives.tp_size() == 1:
            return functional.linear(input, self.weight, self.bias)
        if layout.is_prescaled():
            partial = functional.linear(collectives.split_features(input), self.weight)
            output = collectives.reduce_from_group(partial)
        else:
            partial = functional.linear(collectives.tokens_to_features(input), self.weight)
            output = collectives.reduce_scatter_tokens(partial)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer.

        Returns:
            The same text as ``torch.nn.Linear``.
        """
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ColumnParallelLinear(DistributedModule):
    """The first product of a block: output features are divided, and the input is the group's batch.

    Args:
        in_features: Input features.
        out_features: Output features of the whole layer.
        bias: Whether there is a bias.
        std: Standard deviation of initial weights.
        use_normal: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
        is_divided: ``False`` if every rank has the whole weight and uses rows of it, as with few key heads.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, std: float, use_normal: bool, is_divided: bool = True
    ) -> None:
        super().__init__()
        dim = 0 if is_divided else None
        self.is_divided = is_divided
        self.add_parameter(
            "weight",
            (out_features, in_features),
            initializers.weight(std, use_normal),
            shard_dim=dim,
            in_group=is_divided,
        )
        if bias:
            initial = initializers.bias(in_features, use_normal)
            self.add_parameter("bias", (out_features,), initial, shard_dim=dim, in_group=is_divided)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            input: ``[N, S, in_features]``, from :func:`layout.enter_product`.
            rows: The output features that this rank uses, if the weight is not divided.

        Returns:
            ``[N, S, local features]``.
        """
        return functional.linear(input, *self.local(rows))

    def local(self, rows: slice | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and the bias that this rank multiplies with.

        Args:
            rows: The output features that this rank uses, if the weight is not divided.

        Returns:
            ``[local features, in_features]`` and ``[local features]``, or ``None`` without a bias.
        """
        weight: torch.Tensor = self.weight  # type: ignore[assignment]
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        if not self.is_divided:
            weight = collectives.partial_in_group(weight)
            bias = None if bias is None else collectives.partial_in_group(bias)
            if rows is not None:
                weight = weight[rows]
                bias = None if bias is None else bias[rows]
        return weight, bias


class RowParallelLinear(DistributedModule):
    """The second product of a block: input features are divided, and the products of the ranks are summed.

    Args:
        in_features: Input features of the whole layer.
        out_features: Output features.
        bias: Whether there is a bias.
        std: Standard deviation of initial weights.
        use_normal: Whether initial weights are normal; otherwise as in ``torch.nn.Linear``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float, use_normal: bool) -> None:
        super().__init__()
        self.add_parameter("weight", (out_features, in_features), initializers.weight(std, use_normal), shard_dim=1)
        if bias:
            initial = initializers.bias(in_features, use_normal)
            self.add_parameter("bias", (out_features,), initial, in_group=between_products_in_group())
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply and sum over the group.

        Args:
            input: ``[N, S, local features]``.

        Returns:
            Activations in the layout between products (:mod:`layout`).
        """
        if collectives.tp_size() == 1:
            return functional.linear(input, self.weight, self.bias)
        output = row_product(input, self.weight)
        return output if self.bias is None else output + self.bias
