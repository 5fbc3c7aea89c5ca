"""Execution of one rank's program: actions in their order, with receives that are posted ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from smdistributed.modelparallel.torch.runtime import offloading

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.executor import Executor, Microbatch

#: The kind (F, B, I, W; S and R for F and B), the stage, the microbatch, and for a transfer the stage at the other
#: end.
Action = tuple[str, int, int, int | None]


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
    """

    def __init__(
        self,
        executor: Executor,
        program: Sequence[Action],
        microbatches: Sequence[Microbatch],
        total: int,
        max_posted: int,
        offloader: offloading.Offloader | None,
        on_stage_done: Callable[[int, Microbatch], None],
    ) -> None:
        self._executor, self._program, self._microbatches = executor, program, microbatches
        self._last, self._on_stage_done = total - 1, on_stage_done
        self._max_posted = max_posted
        self._prefetcher = offloading.ActivationPrefetcher(offloader, program)
        #: Receives that are not posted yet, with their positions in the program; and posted ones.
        self._receives: deque[tuple[int, Action]] | None = None
        self._posted: deque[tuple[int, Callable[[], None]]] = deque()
        self._place = 0
        self._may_wait = True
        #: Microbatches below this number may run.
        self._granted = 0

    def run(self) -> None:
        """Run the whole program."""
        self.advance(lambda index: True)

    def advance(self, grant: Callable[[int], bool], may_wait: bool = True) -> None:
        """Run actions in order, up to the first one of a microbatch that may not run yet.

        Args:
            may_wait: Whether to continue at an action that waits for another rank.
            grant: Called once for each microbatch, in order; returns whether it may run. After ``False`` the next
            call asks again.
        """
        self._may_wait = may_wait
        while self._place < len(self._program):
            action = self._program[self._place]
            if not may_wait and action[0] in ("RF", "RB"):
                return
            while action[2] >= self._granted:
                if not grant(self._granted):
                    return
                self._granted += 1
            self._run(self._place, action)
            self._place += 1

    def grant(self, grant: Callable[[int], bool]) -> None:
        """Ask for all microbatches that may run, without running them."""
        while grant(self._granted):
            self._granted += 1

    def complete(self) -> None:
        """Run the remaining actions of the microbatches that may run; the program ends without the later ones."""
        self._may_wait = True
        for place in range(self._place, len(self._program)):
            if self._program[place][2] < self._granted:
                self._run(place, self._program[place])
        self._place = len(self._program)

    def _run(self, place: int, action: Action) -> None:
        executor = self._executor
        kind, number, index, peer = action
        mb = self._microbatches[index]
        if self._may_wait:
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
        """Post the receive at this position, and some later ones whose microbatches may run."""
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
        while receives and (len(self._posted) < self._max_posted or receives[0][0] == place):
            at, (kind, number, index, peer) = receives[0]
            if index >= self._granted:
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
