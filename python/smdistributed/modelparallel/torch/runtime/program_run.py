"""Execution of one rank's program: actions in their order, with receives that are posted ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from smdistributed.modelparallel.torch.runtime import offloading

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.executor import Executor, Microbatch

#: The kind (F, B, I, W; S and R for F and B), the stage, the microbatch, and for a transfer the stage at the other
#: end.
Action = tuple[str, int, int, int | None]


class Program(NamedTuple):
    """One rank's part of a plan.

    Attributes:
        actions: The actions, in their order.
        reach: For each number of microbatches, how many actions this rank can run with only these, if the other ranks
            do so, too.
    """

    actions: tuple[Action, ...]
    reach: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, all_actions: Sequence[Sequence[Action]], microbatches: int) -> Program:
        """Return the part of ``rank``, given the actions of all ranks."""
        places = [0] * len(all_actions)
        sent: set[Action] = set()

        def can_run(action: Action, limit: int) -> bool:
            kind, stage, microbatch, peer = action
            if kind in ("RF", "RB"):
                assert peer is not None
                return microbatch < limit and ("S" + kind[1], peer, microbatch, stage) in sent
            return microbatch < limit

        reach = [0]
        for limit in range(1, microbatches + 1):
            advanced = True
            while advanced:
                advanced = False
                for each, actions in enumerate(all_actions):
                    while places[each] < len(actions) and can_run(actions[places[each]], limit):
                        if actions[places[each]][0] in ("SF", "SB"):
                            sent.add(actions[places[each]])
                        places[each] += 1
                        advanced = True
            reach.append(places[rank])
        return cls(tuple(all_actions[rank]), tuple(reach))


class ProgramRun:
    """Executes a program, completely or as far as its microbatches have been recorded.

    Args:
        executor: Runs the actions.
        program: This rank's part of the plan.
        microbatches: The microbatches of the program, in order; more may be added until they are needed.
        total: Number of microbatches of the program.
        max_posted: Number of receives that may be posted ahead of their use.
        offloader: Moves activations to host memory, if enabled.
        on_stage_done: Called when the parameter gradients of a stage are complete.

    Attributes:
        place: Number of actions that have been run.
    """

    def __init__(
        self,
        executor: Executor,
        program: Program,
        microbatches: Sequence[Microbatch],
        total: int,
        max_posted: int,
        offloader: offloading.Offloader | None,
        on_stage_done: Callable[[int, Microbatch], None],
    ) -> None:
        self._executor, self._microbatches = executor, microbatches
        self._program, self._reach = program.actions, program.reach
        self._last, self._on_stage_done = total - 1, on_stage_done
        self._max_posted = max_posted
        self._prefetcher = offloading.ActivationPrefetcher(offloader, program.actions)
        #: Receives that are not posted yet, with their positions in the program; and posted ones.
        self._receives: deque[tuple[int, Action]] | None = None
        self._posted: deque[tuple[int, Callable[[], None]]] = deque()
        self.place = 0
        self._is_limited = False
        #: Microbatches below this number may run.
        self._num_allowed = 0

    def advance(self, may_run: Callable[[int], bool], microbatches: int | None = None) -> None:
        """Run actions in order, up to the first one of a microbatch that may not run yet.

        Args:
            may_run: Called once for each microbatch, in order; returns whether it may run. After ``False`` the next
                call asks again.
            microbatches: If given, run only what all ranks can run with this number of microbatches.
        """
        self._is_limited = microbatches is not None
        end = len(self._program) if microbatches is None else self._reach[microbatches]
        while self.place < end:
            action = self._program[self.place]
            while action[2] >= self._num_allowed:
                if not may_run(self._num_allowed):
                    return
                self._num_allowed += 1
            self._run(self.place, action)
            self.place += 1

    def allow(self, may_run: Callable[[int], bool], microbatches: int) -> None:
        """Request the first ``microbatches`` microbatches, up to one that may not run; run none of them."""
        while self._num_allowed < microbatches and may_run(self._num_allowed):
            self._num_allowed += 1

    @property
    def num_allowed(self) -> int:
        """The number of microbatches that may run."""
        return self._num_allowed

    def complete(self) -> None:
        """Run the remaining actions of the microbatches that may run; the program ends without the later ones."""
        self._is_limited = False
        for place in range(self.place, len(self._program)):
            if self._program[place][2] < self._num_allowed:
                self._run(place, self._program[place])
        self.place = len(self._program)

    def _run(self, place: int, action: Action) -> None:
        executor = self._executor
        kind, number, index, peer = action
        mb = self._microbatches[index]
        if not self._is_limited or kind in ("RF", "RB"):
            self._post_receives(place)
        if kind in "FBIW":
            self._prefetcher.begin(self._microbatches)
        if kind == "F":
            if not mb.stage_graph.stages[number].early:
                executor.forward(mb, number, self._prefetcher.is_backward_near(number, index))
        elif kind == "B":
            executor.backward(mb, number)
            if index == self._last:
                self._on_stage_done(number, mb)
        elif kind == "I":
            executor.input_part(mb, number)
        elif kind == "W":
            executor.weight_part(mb, number)
            if index == self._last:
                self._on_stage_done(number, mb)
        elif self._posted and self._posted[0][0] == place:
            self._posted.popleft()[1]()
        elif kind in ("SF", "SB") and self._has_payload(action):
            assert peer is not None
            (executor.send_forward if kind == "SF" else executor.send_backward)(mb, number, peer)

    def _post_receives(self, place: int) -> None:
        """Post the receive at this position, and some later ones whose microbatches may run.

        Later ones only when all bodies have ended: they may depend on what the script does next.
        """
        if self._receives is None:
            self._receives = deque(
                (at, each)
                for at, each in enumerate(self._program)
                if each[0] in ("RF", "RB") and self._has_payload(each)
            )
        receives = self._receives
        while receives and receives[0][0] < place:
            # The receive belongs to a microbatch that does not run in this program.
            receives.popleft()
        max_posted = 0 if self._is_limited else self._max_posted
        while receives and (len(self._posted) < max_posted or receives[0][0] == place):
            at, (kind, number, index, peer) = receives[0]
            if index >= self._num_allowed:
                return
            receives.popleft()
            begin = self._executor.receive_forward if kind == "RF" else self._executor.receive_backward
            assert peer is not None
            self._posted.append((at, begin(self._microbatches[index], number, peer)))

    def _has_payload(self, action: Action) -> bool:
        """Return whether an action has tensors to send or to receive."""
        kind, number, _, peer = action
        # All microbatches of one program are equal in this respect.
        graph = self._microbatches[0].stage_graph
        assert peer is not None
        if kind == "SF":
            return not graph.stages[peer].early
        if kind == "RF":
            return not graph.stages[number].early
        return bool(graph.gradients(number, peer) if kind == "RB" else graph.gradients(peer, number))
