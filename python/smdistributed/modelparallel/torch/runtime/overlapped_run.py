"""Execution of a step's first microbatches while the bodies of later ones are still being recorded.

Recording a microbatch takes the host milliseconds, during which a device would be idle until the pipeline starts::

    rank 0:  body 0  body 1  F0  body 2  F1 B0  body 3  F2 B1  F3 B2 B3
    rank 1:  body 0  body 1  F0 B0  body 2  F1 B1  body 3  F2 B2  F3 B3

- OVL-1: if all microbatches of a step function recorded the same tasks in its last call, they are expected to do so
  again. All ranks of a pipeline have the same expectation (``StepFunction``). They compare each microbatch before any
  of them runs a part of it.
- OVL-2: if a microbatch differs from the expectation, those before it are completed, and the rest of the step runs
  after it has been recorded (``Pipeline.run``).
- OVL-3: before the body reads values of a partition, or writes to a replicated tensor to which tasks refer, all
  earlier microbatches are completed, as in one process. The step function is then not executed in this way again.
- OVL-4: after a body, each rank runs what all ranks can run with the microbatches that were recorded before it
  (``Program.reach``). It may wait for another rank there, which does the same without any further body: a body may
  itself wait for the other ranks, in a collective of the script. The latest microbatch is left out, because its
  comparison is still running.
- OVL-5: tasks that depend on attributes that the body has changed, or on a random state that it has set, run after all
  bodies of the step. Other tasks draw from the stream of the rank (RNG-2): the generators have its state while tasks
  run, and the body's state while a body runs.
- OVL-6: autocast's copies of parameters are kept between tasks (EXE-4), also while bodies run. What a body itself casts
  is not cached at all, because it may change before the next body. When autograd computes a checkpointed module again
  on a thread of its own, PyTorch forgets all copies, and later tasks cast anew.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from smdistributed.modelparallel.torch.runtime.executor import Executor, Microbatch
from smdistributed.modelparallel.torch.runtime.failures import reporting_failures
from smdistributed.modelparallel.torch.runtime.program_run import Program
from smdistributed.modelparallel.torch.runtime.rng import Draw
from smdistributed.modelparallel.torch.runtime.task_execution import casts_are_cached, modes_of_the_body_left
from smdistributed.modelparallel.torch.runtime.transfers import Comparison
from smdistributed.modelparallel.torch.tracing.attributes.module_state import UNCHANGED
from smdistributed.modelparallel.torch.tracing.recording import Recording, active
from smdistributed.modelparallel.torch.tracing.tasks import Context, Value, digest_of

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
    from smdistributed.modelparallel.torch.runtime.stage_graph import StageGraph


class Expectation(NamedTuple):
    """The tasks that each microbatch of a step function is expected to record.

    Attributes:
        digest: The digest of the recording.
        returned: The values that the body returns.
        microbatches: Number of microbatches.
        stage_graph: The stages of each microbatch.
        program: This rank's part of the plan.
    """

    digest: int
    returned: tuple[int, ...]
    microbatches: int
    stage_graph: StageGraph
    program: Program

    def numbers(self) -> list[int]:
        """Return numbers that are equal for ranks with the same expectation."""
        return [self.digest, digest_of(self.returned), self.microbatches]


def obstacle(microbatches: Sequence[Microbatch]) -> str | None:
    """Return why the next call of a step cannot be executed while it is recorded; ``None`` if it can."""
    first = microbatches[0]
    if len(microbatches) == 1:
        return "there is one microbatch"
    if first.runs_in_turn:
        return "microbatches run one after the other"
    if not all(_takes_no_state(mb.recording) for mb in microbatches):
        return "it reads values in its body, keeps tensors between microbatches, or sets attributes of modules"
    if not all(_continues_streams(mb.recording) for mb in microbatches):
        return "its body seeds or restores generators, or draws from them between modules that draw"
    if any(mb.stage_graph is not first.stage_graph for mb in microbatches):
        return "the microbatches make different calls"
    return None


def _takes_no_state(recording: Recording) -> bool:
    """Return whether tasks use no state of the body (OVL-5)."""
    return (
        recording.executed is None
        and not recording.retained.needs_earlier
        and recording.backward_modules is UNCHANGED
        and all(task.context.modules is UNCHANGED for task in recording.tasks)
    )


def _continues_streams(recording: Recording) -> bool:
    """Return whether each task draws the next random numbers of its rank (RNG-2), and no body has returned to them."""
    return all(draw.begin is None and not draw.is_kept for draw in _draws(recording))


def _draws(recording: Recording) -> Iterator[Draw]:
    return itertools.chain.from_iterable(recording.draws.values())


class OverlappedRun:
    """One call of a step function whose microbatches are executed as they are recorded.

    Args:
        pipeline: The pipeline.
        expectation: The expected recording of each microbatch.
        executor: The executor of this step.

    Attributes:
        was_interrupted: Whether the body read values of earlier microbatches (OVL-3).
        returned: For each recorded microbatch, the numbers of the values that its body returns. Later microbatches may
            share and renumber the values.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        expectation: Expectation,
        executor: Executor,
    ) -> None:
        self.was_interrupted = False
        self.returned: list[list[int]] = []
        self._pipeline, self._expectation = pipeline, expectation
        self._microbatches: list[Microbatch] = []
        #: Comparisons of recorded microbatches whose results this rank has not read yet.
        self._comparisons: deque[Comparison] = deque()
        self._num_compared = 0
        self._on_stage_done: Callable[[int, Microbatch], None] | None = None
        #: The graphs of stages, if they are wanted, and whether they are ready for this step.
        self._capture, self._has_captured = executor.capture, False
        self._program = executor.begin(
            expectation.program, self._microbatches, expectation.microbatches, self._note_stage
        )
        self._is_over = False
        #: The error that has ended this run. The body may have caught it.
        self._failure: BaseException | None = None
        self._casts = contextlib.ExitStack()
        self._casts.enter_context(casts_are_cached())

    def add(self, recording: Recording, returned: Sequence[Value]) -> None:
        """Run the tasks that can run now that a microbatch has been recorded.

        Raises:
            BaseException: Tasks have failed while a body ran, which has caught the error.
        """
        self._raise_failure()
        self._pipeline.reorder_as_before(recording, self._expectation.digest)
        self.returned.append([value.index for value in returned])
        found = tuple(sorted({value.index for value in returned}))
        digest = recording.digest if _takes_no_state(recording) and _continues_streams(recording) else -1
        for draw in _draws(recording):
            draw.is_early = True
        numbers = [digest, digest_of(found), self._expectation.microbatches]
        # Also after this run has ended, because another rank may still compare.
        self._comparisons.append(self._pipeline.transfers.begin_comparison(numbers))
        if self._is_over:
            return
        recording.copy_on_write.before_write = self.complete
        self._microbatches.append(Microbatch(recording, self._expectation.stage_graph))
        if len(self._microbatches) < self._expectation.microbatches:
            self._run(len(self._microbatches) - 1)

    @property
    def num_matched(self) -> int:
        """The number of microbatches that were as expected so far."""
        return self._program.num_allowed

    def complete(self) -> None:
        """Complete all recorded microbatches (OVL-3); later ones run after the bodies."""
        self._raise_failure()
        if self._is_over:
            return
        self.was_interrupted = True
        recording, active.recording = active.recording, None
        try:
            with modes_of_the_body_left():
                self._run()
                self._end()
        finally:
            active.recording = recording

    def finish(self, on_stage_done: Callable[[int, Microbatch], None]) -> list[Microbatch]:
        """Run the remaining tasks, after all bodies have ended.

        Args:
            on_stage_done: Called when the parameter gradients of a stage are complete.

        Returns:
            The microbatches that were executed: those before the first unexpected one.

        Raises:
            BaseException: Tasks have failed, here or while a body ran, which has caught the error.
        """
        self._raise_failure()
        self._on_stage_done = on_stage_done
        self._run()
        self._end()
        self._wait_for_comparisons()
        del self.returned[len(self._microbatches) :]
        return self._microbatches

    def abandon(self) -> None:
        """Complete the microbatches before one whose body has raised, as in one process.

        No rank waits for another one afterwards.
        """
        if self._failure is None:
            self.complete()
            self._wait_for_comparisons()

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Return a context for the body of a later microbatch, in which autocast keeps no casts (OVL-6)."""
        contexts = (task.context.autocast for mb in self._microbatches[:1] for task in mb.recording.tasks)
        if self._is_over or not all(is_cached for states in contexts for _, _, _, is_cached in states):
            yield
            return
        with Context.casts_of_body_uncached():
            yield

    def end_step(self) -> None:
        """Leave the step, whether it has succeeded or not (OVL-6)."""
        self._casts.close()
        # The error refers to this object through its traceback.
        self._failure = None

    def _raise_failure(self) -> None:
        """Raise the error that has ended this run, if there is one; the other ranks know of it."""
        if self._failure is not None:
            raise self._failure

    def _run(self, microbatches: int | None = None) -> None:
        """Run all tasks, or those that all ranks can run with this number of microbatches."""
        if self._is_over:
            return
        with self._executing():
            self._capture_stages()
            if microbatches is not None:
                # All ranks notice a microbatch that differs after the same body.
                self._program.allow(self._may_run, microbatches)
            self._program.advance(self._may_run, microbatches)
        if self._num_compared > len(self._microbatches):
            self._end()

    def _capture_stages(self) -> None:
        """Capture the stages if their graphs are wanted and the first microbatch is as expected, before any message."""
        if self._capture is None or self._has_captured:
            return
        self._program.allow(self._may_run, 1)
        if not self._microbatches or not self._program.num_allowed:
            return
        self._has_captured = True
        expected, pipeline = self._expectation, self._pipeline
        self._capture.begin_step(
            (*expected.numbers(), self._microbatches[0].recording.detach_outputs), pipeline.version,
            expected.program.actions, self._microbatches[0], pipeline.parameters,
        )  # fmt: skip

    @contextlib.contextmanager
    def _executing(self) -> Iterator[None]:
        """Return a context in which tasks run; an error in it ends this run."""
        state = self._pipeline.module_state
        has_draws = bool(self._microbatches and self._microbatches[0].recording.draws)
        own_numbers = self._pipeline.rng_state.own() if has_draws else contextlib.nullcontext()
        try:
            with state.hidden(), state.applied(), own_numbers, reporting_failures():
                yield
        except BaseException as error:
            self._failure, self._is_over = error, True
            raise

    def _may_run(self, index: int) -> bool:
        """Return whether a microbatch is recorded, and equal on all ranks."""
        if index >= len(self._microbatches):
            return False
        gathered = self._comparisons.popleft().wait()
        self._num_compared += 1
        expected = self._expectation.numbers()
        if all(numbers == expected for numbers in gathered):
            # Marked only now, because a recording whose tensors others use cannot be reordered (SAME-2).
            self._microbatches[index].recording.retained.keep_living()
            return True
        # The microbatch differs from the expectation (OVL-2).
        del self._microbatches[index:]
        return False

    def _end(self) -> None:
        if self._is_over:
            return
        with self._executing():
            self._program.allow(self._may_run, len(self._microbatches))
            self._is_over = True
            self._capture_stages()
            self._program.complete()
        for mb in self._microbatches:
            mb.recording.num_executed = len(mb.recording.tasks)
        self._casts.close()
        # Also if a body is inside of autocast: it may write to parameters now.
        torch.clear_autocast_cache()

    def _note_stage(self, stage: int, last: Microbatch) -> None:
        # The last microbatch's backward begins when all bodies have ended.
        assert self._on_stage_done is not None
        self._on_stage_done(stage, last)

    def _wait_for_comparisons(self) -> None:
        while self._comparisons:
            self._comparisons.popleft().wait()


def comparable(expectation: Expectation | None) -> list[int]:
    """Return a rank's expectation as numbers, for the comparison at the beginning of a step."""
    return [0, 0, 0] if expectation is None else expectation.numbers()
