"""Random numbers of distributed modules.

In dropout, ranks of a group that compute the same values must drop the same elements, and ranks with different tokens
or heads must not. So each process has two sequences of seeds in addition to PyTorch's generators: one that is equal
on all ranks of the group, and one of its own. Each dropout sets PyTorch's generator to the next seed, and restores it
afterwards. In a group of one rank, dropout is PyTorch's own.

- TP-2: recomputed activations use the same dropout masks: :func:`recomputation` restores both sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import communication
from smdistributed.modelparallel.torch.nn import collectives
from smdistributed.modelparallel.torch.state import state

_SEED_BITS = 62


class Streams:
    """The two sequences of seeds of this process, and the topology for which they were created."""

    def __init__(self) -> None:
        self._shared: torch.Generator | None = None
        self._own: torch.Generator | None = None
        self._groups: object = None

    def start(self) -> None:
        """Start the sequences with the seed of the group's first rank. All ranks of the group call it."""
        groups = state.groups
        if self._groups is groups:
            return
        seeds = communication.allgather(torch.default_generator.initial_seed(), CommGroup.TP_GROUP)
        place = groups.rank_in("rdp") * len(groups.members["pp"]) + groups.rank_in("pp")
        first = (seeds[0] + place * (collectives.tp_size() + 1) * 1_000_003) % (1 << _SEED_BITS)
        own = (first + (1 + collectives.tp_rank()) * 1_000_003) % (1 << _SEED_BITS)
        self._shared, self._own = torch.Generator("cpu").manual_seed(first), torch.Generator("cpu").manual_seed(own)
        self._groups = groups

    def next_seed(self, *, same_on_group: bool) -> int:
        """Return the next seed of a sequence."""
        if self._groups is not state.groups:
            self.start()
        generator = self._shared if same_on_group else self._own
        assert generator is not None
        return int(torch.randint(1 << _SEED_BITS, (), generator=generator, device="cpu"))

    def states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the states of both sequences."""
        if self._shared is None or self._own is None or self._groups is not state.groups:
            return None
        return self._shared.get_state(), self._own.get_state()

    def restore(self, states: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Restore earlier states."""
        if states is not None and self._shared is not None and self._own is not None:
            self._shared.set_state(states[0])
            self._own.set_state(states[1])


streams = Streams()


@contextlib.contextmanager
def seeded(tensor: torch.Tensor, *, same_on_group: bool) -> Iterator[None]:
    """Run with PyTorch's generator at the next seed of a sequence, and restore it.

    Args:
        tensor: Random numbers are drawn on its device.
        same_on_group: Whether all ranks of the group draw the same numbers.

    Yields:
        Nothing.
    """
    if collectives.tp_size() == 1 or isinstance(tensor, FakeTensor):
        yield
        return
    seed = streams.next_seed(same_on_group=same_on_group)
    generators = torch.cuda.default_generators if tensor.is_cuda else (torch.default_generator,)
    generator = generators[tensor.device.index or 0]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def dropout(tensor: torch.Tensor, probability: float, training: bool, *, same_on_group: bool) -> torch.Tensor:
    """Drop elements as ``torch.nn.functional.dropout`` does.

    Args:
        tensor: The input.
        probability: Probability of an element to become zero.
        training: Whether elements are dropped.
        same_on_group: Whether all ranks of the group have this input, so that they must drop the same elements.

    Returns:
        The result.
    """
    if not training or not probability:
        return tensor
    with seeded(tensor, same_on_group=same_on_group):
        return functional.dropout(tensor, probability)


def recomputation() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return contexts for the forward and the recomputation of ``torch.utils.checkpoint`` (TP-2).

    Returns:
        Both, as its ``context_fn`` returns them.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor] | None] = [None]

    @contextlib.contextmanager
    def first() -> Iterator[None]:
        kept[0] = streams.states()
        yield

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = streams.states()
        streams.restore(kept[0])
        try:
            yield
        finally:
            streams.restore(now)

    return first(), again()
