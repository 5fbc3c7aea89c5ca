"""Calls with made-up numbers, to find out what comes out of modules that fake tensors cannot go through.

Routing in a mixture of experts looks at numbers, and what comes out has the same shape whatever they are. So every rank calls the
module a few times with random numbers, without its parameters: where all calls return the same structure, shapes and types, that is
the answer (TRY-1). It is checked whenever the task runs (``running.check``). All ranks draw the same numbers (TRY-2).

Some calls accept no made-up numbers, such as a CTC loss, whose lengths have to add up. They are tried again with the numbers of the
replicated tensors among their arguments, which all ranks have; then only the shape of a scalar is believed, since the replicated
tensors of the next microbatch have other numbers (TRY-3).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

from smdistributed.modelparallel.torch.tracing.remote_tensor import Meta

#: Calls that must agree.
SAMPLES = 3
_SEED = 20_011


class Numbers:
    """Made-up tensors of one call. Parameters are views of one memory, which is as large as the largest of them.

    Args:
        sample: Which call; each has other numbers.
        replicated: Whether replicated tensors keep their own numbers.
    """

    def __init__(self, sample: int, replicated: bool = False) -> None:
        self._sample, self._replicated = sample, replicated
        self._generator = torch.Generator().manual_seed(_SEED + sample)
        self._pools: dict[tuple[torch.dtype, torch.device, bool], torch.Tensor] = {}

    def of(self, leaf: Any, meta: Meta) -> torch.Tensor:
        """What stands for an argument."""
        if self._replicated and type(leaf) is torch.Tensor:
            return leaf.detach().clone().requires_grad_(meta.requires_grad)
        return self.tensor(meta)

    def tensor(self, meta: Meta) -> torch.Tensor:
        """One with memory of its own, which may be changed in place even if it requires a gradient."""
        with torch.enable_grad():
            tensor = self._placed(self._drawn(_extent(meta), meta.dtype), meta)
            return tensor.clone() if meta.requires_grad else tensor

    def state(self, meta: Meta, parameter: bool) -> torch.Tensor:
        """A parameter or a buffer."""
        key = (meta.dtype, meta.device, parameter)
        pool, extent = self._pools.get(key), _extent(meta)
        if pool is None or pool.numel() < extent:
            drawn = self._drawn(extent, meta.dtype)
            if drawn.is_floating_point():
                # As after an initialization; buffers such as variances are positive.
                drawn = drawn * 0.1 if parameter else drawn.abs() + 0.5
            pool = self._pools[key] = drawn.to(meta.device)
        return self._placed(pool, meta)

    def _drawn(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_complex:
            return torch.view_as_complex(torch.randn(count, 2, generator=self._generator)).to(dtype)
        if dtype.is_floating_point:
            return torch.randn(count, generator=self._generator).to(dtype)
        if dtype is torch.bool:
            # A mask that hides nothing, then others.
            return torch.randint(2 if self._sample else 1, (count,), generator=self._generator) + (not self._sample) > 0
        # Whatever integers stand for, 0 is one of them.
        return torch.zeros(count, dtype=dtype)

    def _placed(self, memory: torch.Tensor, meta: Meta) -> torch.Tensor:
        return memory.to(meta.device).as_strided(meta.shape, meta.stride).detach().requires_grad_(meta.requires_grad)


def _extent(meta: Meta) -> int:
    """Elements of the memory that a tensor of this form lies in."""
    if 0 in meta.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))


@contextlib.contextmanager
def random_numbers(sample: int) -> Iterator[None]:
    """What is drawn inside follows from ``sample``, and is drawn again outside."""
    states = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(_SEED + sample)
            random.seed(_SEED + sample)
            yield
    finally:
        random.setstate(states)
