"""Random numbers of a step: those that its body draws, and those of the modules of a partition.

What the body draws outside of modules must be the same on all ranks of a pipeline, while inside of their modules they draw different
numbers. So the body has generators of its own, begun with a number of the first rank, and what runs on a partition has
this rank's, also where it runs while the body is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.state import state


class Randomness:
    """The states of both, of this process and its device."""

    def __init__(self) -> None:
        #: Of the body, between its microbatches.
        self._shared: list[torch.Tensor] | None = None
        #: This rank's, while those of the body are in force.
        self._own: list[torch.Tensor] | None = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Around the body of a step, on all ranks of the pipeline."""
        self._own = _states()
        if self._shared is None:
            seed = torch.randint(1 << 62, ())
            assert state.groups.pipe is not None
            dist.broadcast(seed, state.groups.members["pp"][0], state.groups.pipe)
            self._shared = [torch.Generator(each.device).manual_seed(int(seed)).get_state() for each in _generators()]
        _set_states(self._shared)
        try:
            yield
        finally:
            self._shared = _states()
            _set_states(self._own)
            self._own = None

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Inside of :meth:`shared`: around what runs on this partition; elsewhere nothing."""
        if self._own is None:
            yield
            return
        shared = _states()
        _set_states(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _set_states(shared)


def _generators() -> list[torch.Generator]:
    """That of CPUs, and that of this rank's device."""
    device = current_device()
    if device.type == "cuda":
        torch.cuda.init()
        return [torch.default_generator, torch.cuda.default_generators[device.index]]
    return [torch.default_generator]


def _states() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators()]


def _set_states(states: Sequence[torch.Tensor]) -> None:
    for generator, before in zip(_generators(), states, strict=True):
        generator.set_state(before)
