"""Random number generators of a step: those that the body draws from, and those of tasks on their partitions.

- RNG-1: the body draws the same numbers on all ranks of a pipeline. Each step begins with the generator states of the
  first rank, so a seed gives the numbers of one process until the first task draws from the same generator.
- RNG-2: tasks draw from a stream of their rank. The stream begins with the rank's generators and continues from step to
  step. If the script draws or seeds between two steps, the stream begins again with the new states. If only one
  partition draws, in an order that the schedule keeps, its numbers are those of one process.
- RNG-3: the body's state at the call of a task counts. If the body has drawn or seeded since the last task that drew,
  the task begins with the body's state. If the body has returned to an earlier state (``fork_rng``), the task continues
  where the tasks of that state had ended.
- RNG-4: after each task that draws, the body's generator jumps. So the body never gets the numbers of a task again, and
  an earlier state is recognized by its jump. Generators that the task does not draw from are unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.runtime.generators import Generator, generators
from smdistributed.modelparallel.torch.state import state


class Draw:
    """The random numbers that a task draws from one generator.

    Args:
        generator: The generator.
        begin: Where the task begins: after another task, or with a state; ``None``: at the rank's current state.
        is_sure: Whether it is known that the task draws.

    Attributes:
        is_kept: Whether a later task begins after this one.
        is_early: Whether it runs before later bodies, which may return to its end.
        end: The state after it, if that is kept and it has run on this rank.
        has_drawn: Whether it has drawn on this rank, if that was not known before.
    """

    __slots__ = ("_before", "begin", "end", "generator", "has_drawn", "is_early", "is_kept", "is_sure")

    def __init__(self, generator: Generator, begin: Draw | bytes | None, is_sure: bool) -> None:
        self.generator, self.begin, self.is_sure = generator, begin, is_sure
        self.is_kept = self.is_early = self.has_drawn = False
        self.end: bytes | None = None
        self._before: tuple[bytes, bytes] | None = None

    def start(self) -> None:
        """Set the generator before the task."""
        begin = self.begin
        if isinstance(begin, Draw):
            begin = begin.known_end
        before = None if self.is_sure else self.generator.state()
        if begin is not None:
            self.generator.set_state(begin)
        if before is not None:
            self._before = before, before if begin is None else begin

    def stop(self) -> None:
        """Record the generator's state after the task."""
        if self._before is not None:
            before, begin = self._before
            self.has_drawn = self.generator.state() != begin
            if not self.has_drawn:
                self.generator.set_state(before)
        if self.is_kept or self.is_early:
            self.end = self.generator.state()

    @property
    def known_end(self) -> bytes:
        """The state after the task.

        Raises:
            SMPUnsupportedError: It is not known.
        """
        if self.end is None:
            raise SMPUnsupportedError(
                "the body restores the random state at the end of a task, which is not known here: the task runs "
                "later, or ran before the state was requested, or as a part of a CUDA graph; set a seed in the body "
                "instead"
            )
        return self.end


class _Origin(NamedTuple):
    """A state of the body's generator at which tasks began, and the last task of each rank since."""

    begin: bytes
    last: dict[int, Draw]


class _Stream:
    """One generator during one step.

    Args:
        generator: The generator, in the state with which the body begins.
        own: The state with which this rank's tasks begin.
    """

    def __init__(self, generator: Generator, own: bytes) -> None:
        self._generator, self._own = generator, own
        #: By the state of the body's generator.
        self._origins = {generator.state(): _Origin(own, {})}
        #: The last task of each rank.
        self._latest: dict[int, Draw] = {}
        #: Of each rank, the first one.
        self._first: dict[int, Draw] = {}
        self._has_moved = False

    def begin(self, rank: int, is_sure: bool) -> Draw:
        """Record that a task of ``rank`` is called that draws, or may draw."""
        now = self._generator.state()
        wanted = self._place(self._origins.get(now, _Origin(now, {})), rank)
        if isinstance(wanted, Draw):
            wanted.is_kept = True
        draw = Draw(self._generator, wanted, is_sure)
        first = self._first.setdefault(rank, draw)
        if wanted is not None and first.begin is None:
            # The stage of this task may run before the first one's, which then could not continue with the stream.
            first.begin = self._own
        return draw

    def _place(self, origin: _Origin, rank: int) -> Draw | bytes | None:
        """Return the position of the stream of ``rank`` for this origin; ``None`` for its current position."""
        wanted, latest = origin.last.get(rank), self._latest.get(rank)
        if wanted is not None:
            return None if wanted is latest else wanted
        return None if origin.begin is self._own and latest is None else origin.begin

    def add(self, draw: Draw, rank: int) -> None:
        """Record that the task that was called draws (RNG-4)."""
        now = self._generator.state()
        self._has_moved = self._has_moved or now not in self._origins
        origin = self._origins.get(now, _Origin(now, {}))
        self._latest[rank] = draw
        self._generator.jump()
        self._origins[self._generator.state()] = _Origin(origin.begin, origin.last | {rank: draw})

    def end(self, rank: int) -> tuple[bytes | None, Draw | bytes | None]:
        """End the body of a microbatch.

        Return the body's state, if it has drawn or seeded, and the new position of the stream of ``rank``, if it
        changed.
        """
        now = self._generator.state()
        origin = self._origins.get(now)
        if origin is None:
            return now, now
        final = self._place(origin, rank)
        if isinstance(final, Draw):
            final.is_kept = True
        return now if self._has_moved else None, final


class RngState:
    """The generators of this process."""

    def __init__(self) -> None:
        #: The first rank's states, from :meth:`follow_first` on.
        self._first: dict[str, bytes] = {}
        #: The states of this rank's task streams, between steps and while the body runs.
        self._own: dict[str, bytes] = {}
        #: The states of the process after the last step.
        self._left: dict[str, bytes] = {}
        self._generators: list[Generator] = []
        self._streams: dict[str, _Stream] | None = None
        #: The states of the body that has ended.
        self._ends: dict[str, tuple[bytes | None, Draw | bytes | None]] = {}

    def states(self) -> dict[str, bytes]:
        """Return the generator states of this process by kind, at the beginning of a step."""
        self._generators = generators()
        return _states(self._generators)

    def follow_first(self, mine: dict[str, bytes], is_equal: bool) -> None:
        """Use the first rank's states for the next body on all ranks.

        Args:
            mine: The result of :meth:`states`.
            is_equal: Whether all ranks have equal states.
        """
        self._own = {
            kind: self._own.get(kind, now) if self._left.get(kind) == now else now for kind, now in mine.items()
        }
        # Ranks may have different kinds, if one has not imported NumPy.
        kinds = ("cpu", "cuda", "python", "numpy")
        self._first = dict(mine)
        if is_equal:
            return
        sizes = torch.tensor([len(mine.get(kind, b"")) for kind in kinds], device="cpu")
        source = state.groups.members["pp"][0]
        dist.broadcast(sizes, source, state.groups.pp_group)
        whole = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device="cpu")
        if state.groups.rank_in("pp") == 0:
            whole = torch.frombuffer(bytearray(b"".join(mine.get(kind, b"") for kind in kinds)), dtype=torch.uint8)
        dist.broadcast(whole, source, state.groups.pp_group)
        for kind, part in zip(kinds, whole.split(sizes.tolist()), strict=True):
            if part.numel() and kind in mine:
                self._first[kind] = part.numpy().tobytes()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Return a context for the body of a step, on all ranks of the pipeline."""
        _set_states(self._generators, self._first)
        self._streams = {each.kind: _Stream(each, self._own[each.kind]) for each in self._generators}
        try:
            yield
            rank = state.groups.rank_in("pp")
            self._ends = {kind: stream.end(rank) for kind, stream in self._streams.items()}
        finally:
            self._streams = None
            _set_states(self._generators, self._own)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Return a context inside of :meth:`shared` for work of this partition; elsewhere it has no effect."""
        if self._streams is None:
            yield
            return
        shared = _states(self._generators)
        _set_states(self._generators, self._own)
        try:
            yield
        finally:
            self._own = _states(self._generators)
            _set_states(self._generators, shared)

    def draws(self, kinds: Collection[str] | None, rank: int) -> list[Draw]:
        """Record that the body calls a task of ``rank`` that draws from generators of these kinds.

        ``None`` means that the kinds are not known yet.
        """
        if self._streams is None:
            return []
        found = []
        for kind, stream in self._streams.items():
            if kinds is None or kind in kinds:
                found.append(stream.begin(rank, kinds is not None))
                if kinds is not None:
                    stream.add(found[-1], rank)
        return found

    def has_drawn(self, draws: Sequence[Draw], kinds: Collection[str], rank: int) -> None:
        """Record from which generators a task has drawn."""
        assert self._streams is not None
        for draw in draws:
            if draw.generator.kind in kinds:
                self._streams[draw.generator.kind].add(draw, rank)

    def end_of_step(self) -> None:
        """End the step after all tasks have run.

        The process continues with the body's state where the body has drawn, and otherwise with that of its tasks.
        """
        self._own = _states(self._generators)
        self._left = {}
        for kind, (end, final) in self._ends.items():
            final = final.known_end if isinstance(final, Draw) else final
            if final is not None:
                self._own[kind] = final
            self._left[kind] = self._own[kind] if end is None else end
        _set_states(self._generators, self._left)
        self._ends = {}


def _states(found: list[Generator]) -> dict[str, bytes]:
    return {each.kind: each.state() for each in found}


def _set_states(found: list[Generator], states: dict[str, bytes]) -> None:
    for each in found:
        if each.kind in states:
            each.set_state(states[each.kind])
