"""The stages and messages of a pipeline in the timeline (``SMD_TIMELINE``).

On a GPU, an interval begins when the device has completed all earlier work of the stream, and ends when it has also
completed the stage's: CUDA events measure both. The host only enqueues the work, often long before. The device's clock
is compared with the timeline's whenever a step begins on an idle stream, and otherwise advances by itself.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from smdistributed import _core
from smdistributed._common import lifecycle

#: How long the end waits for the device.
_FINISH_SECONDS = 5.0
#: A time of the timeline's clock in nanoseconds, 0 without a timeline, or an event of the device.
Mark = int | torch.cuda.Event


@dataclass
class _Interval:
    kind: str
    stage: int
    microbatch: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    inputs: list[int]


class StageTimeline:
    """Records the intervals of one pipeline on this rank.

    Args:
        device: The device that runs the stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Intervals of this step, and of the one before, which are written when the device has completed them.
        self._current: list[_Interval] = []
        self._earlier: list[_Interval] = []
        self._spare: list[torch.cuda.Event] = []
        #: An event of the device, and its time on the timeline's clock.
        self._reference: tuple[torch.cuda.Event, int] | None = None
        self._step_begins = True

    def begin(self) -> Mark:
        """Begin an interval."""
        now = _core.timeline_now()
        if now == 0 or self._device.type != "cuda":
            return now
        if self._step_begins:
            self._begin_step()
        return self._record()

    def end(self, begin: Mark, kind: str, stage: int, microbatch: int, inputs: Iterable[int] = ()) -> None:
        """End an interval of `_core.timeline_stage`; ``inputs`` are the stages whose values it used."""
        if not begin:
            return
        # All microbatches have the same inputs.
        sources = list(inputs) if microbatch == 0 else []
        if isinstance(begin, int):
            _core.timeline_stage(kind, stage, microbatch, begin, sources)
        else:
            self._current.append(_Interval(kind, stage, microbatch, begin, self._record(), sources))

    def end_step(self) -> None:
        """Write the intervals of the step before, which the device has probably completed; wait for it otherwise."""
        self._step_begins = True
        if self._current:
            self._write(self._earlier)
            self._earlier, self._current = self._current, []

    def finish(self) -> None:
        """Write the remaining intervals, as far as the device completes them soon.

        After a failure, it may wait for another process forever.
        """
        deadline = time.monotonic() + _FINISH_SECONDS
        for intervals in (self._earlier, self._current):
            while intervals and not intervals[-1].end.query():
                if time.monotonic() >= deadline:
                    self._earlier, self._current = [], []
                    warnings.warn("the timeline lacks the last stages: the device has not completed them", stacklevel=1)
                    return
                time.sleep(0.01)
            self._write(intervals)
        # A later step begins anew, perhaps in another job.
        self._reference = None

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin_step(self) -> None:
        self._step_begins = False
        if self._reference is None:
            lifecycle.before_finish(self.finish)
        elif not torch.cuda.current_stream().query():
            return
        self._write(self._earlier)
        event = self._record()
        event.synchronize()
        self._reference = event, _core.timeline_now()

    def _write(self, intervals: list[_Interval]) -> None:
        for each in intervals:
            begin, end = self._time_of(each.begin), self._time_of(each.end)
            _core.timeline_stage(each.kind, each.stage, each.microbatch, begin, each.inputs, end)
        if intervals:
            # A difference of events has 24 bits, so the reference must not be too far away.
            last = intervals[-1].end
            self._reference = last, self._time_of(last)
            self._spare += [event for each in intervals for event in (each.begin, each.end) if event is not last]
        intervals.clear()

    def _time_of(self, event: torch.cuda.Event) -> int:
        assert self._reference is not None
        event.synchronize()
        reference, time = self._reference
        return time + round(reference.elapsed_time(event) * 1e6)
