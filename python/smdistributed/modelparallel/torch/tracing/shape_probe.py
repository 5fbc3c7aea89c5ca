"""Shape probing: calls with random values, for modules that cannot run on fake tensors.

- PROBE-1: the routing of a mixture of experts reads values, but its output has the same shape for all of them. Every
  rank calls such a module several times with random values and without its parameters. If all calls return the same
  structure, shapes and dtypes, that is the output spec. It is checked when the task runs
  (``runtime/task_execution.py``).
- PROBE-2: all ranks draw the same values.
- PROBE-3: some calls accept no random values, such as a CTC loss, whose lengths must add up. They are tried again with
  the values of the replicated tensors among their arguments. Then only a scalar result is accepted, because the
  replicated tensors of the next microbatch have other values.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import torch

from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta

#: Number of calls whose results must agree.
SAMPLES = 3
_SEED = 20_011


@contextlib.contextmanager
def failures_not_logged() -> Iterator[None]:
    """Drop PyTorch's log of operations that fail on fake tensors: the caller tries them on random values instead."""
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.ERROR or record.exc_info is None

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


class Numbers:
    """Random tensors for one call. Parameters are views of one buffer, which is as large as the largest of them.

    Args:
        sample: Number of the call; each call has other values.
        replicated: Whether replicated tensors keep their values.
    """

    def __init__(self, sample: int, replicated: bool = False) -> None:
        self._sample, self._replicated = sample, replicated
        self._generator = torch.Generator("cpu").manual_seed(_SEED + sample)
        self._pools: dict[tuple[torch.dtype, torch.device, bool], torch.Tensor] = {}

    def of(self, leaf: Any, meta: TensorMeta) -> torch.Tensor:
        """Return the random tensor for an argument."""
        if self._replicated and type(leaf) is torch.Tensor:
            return leaf.detach().clone().requires_grad_(meta.requires_grad)
        return self.tensor(meta)

    def tensor(self, meta: TensorMeta) -> torch.Tensor:
        """Return a tensor with its own memory, which can be changed in place even if it requires a gradient."""
        with torch.enable_grad():
            tensor = self._placed(self._drawn(_extent(meta), meta.dtype), meta)
            return tensor.clone() if meta.requires_grad else tensor

    def state(self, meta: TensorMeta, parameter: bool) -> torch.Tensor:
        """Return the random tensor of a parameter or a buffer."""
        key = (meta.dtype, meta.device, parameter)
        pool, extent = self._pools.get(key), _extent(meta)
        if pool is None or pool.numel() < extent:
            drawn = self._drawn(extent, meta.dtype)
            if drawn.is_floating_point():
                # Similar to initialized values; buffers such as variances are positive.
                drawn = drawn * 0.1 if parameter else drawn.abs() + 0.5
            pool = self._pools[key] = drawn.to(meta.device)
        return self._placed(pool, meta)

    def _drawn(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_complex:
            return torch.view_as_complex(torch.randn(count, 2, generator=self._generator, device="cpu")).to(dtype)
        if dtype.is_floating_point:
            return torch.randn(count, generator=self._generator, device="cpu").to(dtype)
        if dtype is torch.bool:
            # The first mask is all true, later ones are random.
            return (
                torch.randint(2 if self._sample else 1, (count,), generator=self._generator, device="cpu")
                + (not self._sample)
                > 0
            )
        # 0 is a valid value for most uses of integers.
        return torch.zeros(count, dtype=dtype, device="cpu")

    def _placed(self, memory: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        return memory.to(meta.device).as_strided(meta.shape, meta.stride).detach().requires_grad_(meta.requires_grad)


def _extent(meta: TensorMeta) -> int:
    """Return the number of elements of the memory range of a tensor."""
    if 0 in meta.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))


@contextlib.contextmanager
def random_numbers(sample: int) -> Iterator[None]:
    """Return a context whose random numbers are determined by ``sample``; generators are restored afterwards."""
    states = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(_SEED + sample)
            random.seed(_SEED + sample)
            yield
    finally:
        random.setstate(states)
