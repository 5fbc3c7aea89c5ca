"""Mixed precision as an option of ``DistributedDataParallel``: the model computes in a narrow type, parameters and
gradients keep theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from smdistributed.dataparallel.torch.parallel import comm_hooks


class MixedPrecision:
    """What a config says, in the fields of torch's ``_MixedPrecision``.

    The narrow copies are made by autograd's own casts, so gradients come back in the parameters' type.
    """

    def __init__(self, config: Any, module: torch.nn.Module) -> None:
        fields = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(config, field) for field in fields):
            raise TypeError(f"`mixed_precision` is a {type(config).__name__}: expected the fields {', '.join(fields)}")
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    @property
    def reduction(self) -> int:
        """In which type gradients travel, as the core's reduction."""
        kinds = {torch.float16: comm_hooks.FLOAT16, torch.bfloat16: comm_hooks.BFLOAT16}
        return kinds.get(self.reduce_dtype, comm_hooks.AVERAGE)

    def run(self, module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
        """Runs the module with narrow parameters on narrow inputs."""
        if self.param_dtype is None:
            return module(*inputs, **kwargs)
        narrow = {name: self._narrow(parameter) for name, parameter in module.named_parameters()}
        inputs, kwargs = tree_map_only(torch.Tensor, self._narrow, (inputs, kwargs))
        return torch.func.functional_call(module, narrow, inputs, kwargs)

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor
