"""A model whose parameters have a 16-bit type.

Floating tensors that go into the model get its type, and what it returns in that type becomes float32, so losses that
the body computes are float32. Buffers follow the parameters of their own module; those of modules without parameters,
as the frequencies of rotary embeddings, keep their type.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.torch import pytree


def model_dtype(cfg: Config) -> torch.dtype | None:
    """The type of the model's parameters that ``fp16`` or ``bf16`` asks for, if either does."""
    if cfg.fp16:
        return torch.float16
    return torch.bfloat16 if cfg.bf16 else None


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters, and buffers of modules with parameters, a 16-bit type."""
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
            # It keeps its parameters in a list as well.
            each.flatten_parameters()


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with floating tensors in the model's type."""
    return pytree.transform(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_outputs(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with tensors of the model's type in float32."""
    return pytree.transform(value, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)


@functools.cache
def warn_of_half_parameters() -> None:
    """Warns once a process that ``fp16_params`` changes nothing."""
    warnings.warn(
        "`fp16_params` is ignored: modules that tensor parallelism divides keep their types; set `fp16`, which makes "
        "the whole model 16-bit and keeps float32 master weights",
        stacklevel=4,
    )
