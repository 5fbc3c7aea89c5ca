"""How a model that is too large for one place is built."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.materialize import delay_param_initialization

_NOT_YET = "tensor parallelism is not there yet"


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Modules that are created inside take no memory until the model is divided.

    Args:
        tensor_parallelism: Not there yet.
        dtype: Of parameters; PyTorch's default by default.
        **tensor_parallel_config: For tensor parallelism; ignored without.
    """
    if tensor_parallelism:
        raise SMPUnsupportedError(_NOT_YET)
    if tensor_parallel_config:
        names = ", ".join(f"`{name}`" for name in tensor_parallel_config)
        warnings.warn(f"{names} only matter with tensor parallelism", stacklevel=3)
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with delay_param_initialization():
            yield
    finally:
        torch.set_default_dtype(before)


def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Any:
    """Marks modules for tensor parallelism, which is not there yet; without effect where it is switched off."""
    del kwargs
    return _unmarked() if not enabled else _refuse()


def set_tensor_parallelism(module: torch.nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """As :func:`tensor_parallelism`, for a module that exists."""
    del module, kwargs
    if enabled:
        _refuse()


def tp_register(dist_module: type, **hooks: Any) -> NoReturn:
    """Not there yet."""
    del dist_module, hooks
    _refuse()


def tp_register_with_module(module_cls: type, dist_module: type, **hooks: Any) -> NoReturn:
    """Not there yet."""
    del module_cls, dist_module, hooks
    _refuse()


@contextmanager
def _unmarked() -> Iterator[None]:
    yield


def _refuse() -> NoReturn:
    raise SMPUnsupportedError(_NOT_YET)
