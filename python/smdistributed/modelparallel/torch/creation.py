"""How a model that is too large for one place is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from smdistributed.modelparallel.torch.partitioning.materialize import delay_param_initialization

_Class = TypeVar("_Class", bound=type)

#: Calls that have warned.
_warned: set[str] = set()


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Return a context in which new modules take no memory until the model is partitioned.

    Args:
        tensor_parallelism: Whether modules are marked for tensor parallelism; without effect, as
            ``tensor_parallel_degree`` is 1.
        dtype: Type of parameters; PyTorch's default by default.
        **tensor_parallel_config: For tensor parallelism; without effect.

    Yields:
        Nothing.
    """
    if tensor_parallelism:
        _has_no_effect("smp.model_creation(tensor_parallelism=True)", stacklevel=4)
    elif tensor_parallel_config:
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


# Tensor parallelism. `smp.init` refuses a degree above 1, and at degree 1 no module is divided.


@contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Mark new modules for tensor parallelism; without effect, as ``tensor_parallel_degree`` is 1.

    Args:
        enabled: Whether they are marked.
        **kwargs: For the modules that would replace them.

    Yields:
        Nothing.
    """
    del kwargs
    if enabled:
        _has_no_effect("smp.tensor_parallelism()", stacklevel=4)
    yield


def set_tensor_parallelism(module: torch.nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Mark a module that exists, as :func:`tensor_parallelism` does.

    Args:
        module: The module.
        enabled: Whether it is marked.
        **kwargs: For the modules that would replace it.
    """
    del module, kwargs
    if enabled:
        _has_no_effect("smp.set_tensor_parallelism()", stacklevel=3)


def tp_register(dist_module: type, **hooks: Any) -> Callable[[_Class], _Class]:
    """Name the class that replaces the decorated one under tensor parallelism.

    Without effect, as ``tensor_parallel_degree`` is 1.

    Args:
        dist_module: The class that would replace it.
        **hooks: ``init_hook``, ``forward_hook`` and ``return_hook``.

    Returns:
        A decorator that leaves the class as it is.
    """
    del dist_module, hooks
    return _itself


def tp_register_with_module(module_cls: type, dist_module: type, **hooks: Any) -> None:
    """Name the class that replaces ``module_cls``, as :func:`tp_register` does.

    Args:
        module_cls: The class that would be replaced.
        dist_module: The class that would replace it.
        **hooks: ``init_hook``, ``forward_hook`` and ``return_hook``.
    """
    del module_cls, dist_module, hooks


def _itself(decorated: _Class) -> _Class:
    return decorated


def _has_no_effect(call: str, stacklevel: int) -> None:
    """Warns once a process."""
    if call not in _warned:
        _warned.add(call)
        warnings.warn(f"`{call}` has no effect: `tensor_parallel_degree` is 1", stacklevel=stacklevel)
