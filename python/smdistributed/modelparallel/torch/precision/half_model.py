"""A model whose parameters have a 16-bit type.

Floating-point inputs of the model are cast to its type, and outputs of that type to float32, so losses in the body
are computed in float32. Buffers are cast with the parameters of their own module; those of modules without
parameters, such as the frequencies of rotary embeddings, keep their type.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.nn.module import DistributedModule


def model_dtype(cfg: Config) -> torch.dtype | None:
    """Return the type of the model's parameters under ``fp16`` or ``bf16``; ``None`` without them."""
    if cfg.fp16:
        return torch.float16
    return torch.bfloat16 if cfg.bf16 else None


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, and buffers of modules with parameters, to a 16-bit type."""
    for each in module.modules():
        own = [parameter for parameter in each._parameters.values() if parameter is not None]
        for parameter in own:
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if any(parameter.is_floating_point() for parameter in own):
            for name, buffer in each._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    each._buffers[name] = buffer.to(dtype)
        if isinstance(each, nn.RNNBase):
            # Recurrent modules also keep a list of their parameters.
            each.flatten_parameters()


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with floating-point tensors cast to the model's type."""
    return pytree.transform(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_outputs(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with tensors of the model's type cast to float32."""
    return pytree.transform(value, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)


def halve_distributed_modules(root: nn.Module) -> None:
    """Convert the parameters of tensor-parallel modules to float16, for the key ``fp16_params``.

    Inputs of the outermost ones are cast to float16, and outputs to float32. There are no master weights.
    """
    outermost: list[nn.Module] = []
    inside: set[int] = set()
    for module in root.modules():
        if isinstance(module, DistributedModule) and id(module) not in inside:
            outermost.append(module)
            inside |= {id(each) for each in module.modules()}
    if not outermost:
        warnings.warn("`fp16_params` has no effect: the model has no distributed modules", stacklevel=3)
    for module in outermost:
        cast_module(module, torch.float16)
        module.register_forward_pre_hook(_to_half, with_kwargs=True)
        module.register_forward_hook(_from_half)


def _to_half(module: nn.Module, args: Any, kwargs: Any) -> Any:
    del module
    return cast_inputs((args, kwargs), torch.float16)


def _from_half(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    return cast_outputs(output, torch.float16)
