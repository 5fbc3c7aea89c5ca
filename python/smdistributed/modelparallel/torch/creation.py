"""Creation of models that are too large for one device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from smdistributed.modelparallel.torch.nn import replacement
from smdistributed.modelparallel.torch.partitioning.materialize import delay_param_initialization


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Return a context in which new modules take no memory until the model is partitioned.

    Args:
        tensor_parallelism: Whether new modules are marked for tensor parallelism, as by
        :func:`smp.tensor_parallelism`.
        dtype: Type of new parameters; PyTorch's default type by default.
        **tensor_parallel_config: Arguments of ``smp.tensor_parallelism``.

    Yields:
        Nothing.
    """
    if tensor_parallel_config and not tensor_parallelism:
        names = ", ".join(f"`{name}`" for name in tensor_parallel_config)
        warnings.warn(f"{names} only matter with tensor parallelism", stacklevel=3)
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(delay_param_initialization())
            if tensor_parallelism:
                stack.enter_context(replacement.tensor_parallelism(**tensor_parallel_config))
            yield
    finally:
        torch.set_default_dtype(before)
