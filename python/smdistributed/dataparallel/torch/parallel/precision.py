"""Mixed precision as an option of ``DistributedDataParallel``.

The model computes in a narrow type; parameters and gradients keep theirs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from smdistributed.dataparallel.torch.parallel import comm_hooks


class MixedPrecision:
    """The types of ``mixed_precision``, with the fields of torch's ``_MixedPrecision``.

    Autograd's own casts make the narrow copies, so gradients come back in the parameters' type.

    Args:
        config: Has the fields ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``.
        module: The model; its floating-point buffers are cast to ``buffer_dtype``.

    Raises:
        TypeError: ``config`` lacks a field.
    """

    def __init__(self, config: Any, module: torch.nn.Module) -> None:
        fields = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(config, field) for field in fields):
            raise TypeError(f"`mixed_precision` is a {type(config).__name__}: expected the fields {', '.join(fields)}")
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        trained = {each.dtype for each in module.parameters() if each.requires_grad}
        if self.reduce_dtype not in (None, torch.float16, torch.bfloat16, *trained):
            warnings.warn(
                f"`reduce_dtype` {self.reduce_dtype} is ignored: gradients are reduced in the type of their "
                "parameters, or in float16 or bfloat16",
                stacklevel=3,
            )
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    @property
    def reduction(self) -> int:
        """The core's reduction for the type in which gradients are reduced."""
        kinds: dict[torch.dtype | None, int] = {torch.float16: comm_hooks.FLOAT16, torch.bfloat16: comm_hooks.BFLOAT16}
        return kinds.get(self.reduce_dtype, comm_hooks.AVERAGE)

    def run(self, module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
        """Run the module with narrow parameters on narrow inputs.

        Args:
            module: The model.
            inputs: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result of the module.
        """
        if self.param_dtype is None:
            return module(*inputs, **kwargs)
        narrow = {name: self._narrow(parameter) for name, parameter in module.named_parameters()}
        inputs, kwargs = tree_map_only(torch.Tensor, self._narrow, (inputs, kwargs))
        return torch.func.functional_call(module, narrow, inputs, kwargs)

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor
