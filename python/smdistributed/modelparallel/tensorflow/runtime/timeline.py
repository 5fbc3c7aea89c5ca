"""A step's segments and messages in the timeline (``SMD_TIMELINE``), in the same form as for PyTorch.

Times are read by operations of the graph. Without a timeline, the graph does not contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed import _core

#: Names of the phases in the timeline.
PHASES = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


class Clock:
    """Reads times and records intervals while the graph runs.

    Args:
        run_independently: Called with every operation that must run and has explicit dependencies only.
    """

    def __init__(self, run_independently: Callable[[tf.Operation], None]) -> None:
        self._on = _core.timeline_now() > 0
        self._run_independently = run_independently

    def read(self, after: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Return an operation that reads the time after ``after``, as a list; an empty list without a timeline."""
        return [self._call(lambda: _core.timeline_now(), (), after)] if self._on else []

    def note(
        self, kind: str, stage: int, mb: int, start: Sequence[tf.Operation], after: Sequence[tf.Operation]
    ) -> list[tf.Operation]:
        """Record an interval of the timeline, from ``start`` until ``after`` have ended.

        Returns the operation that does so, if there is one.
        """
        if not start:
            return []

        def write(begin: Any) -> int:
            _core.timeline_stage(kind, stage, mb, int(begin))
            return 0

        return [self._call(write, (start[0].outputs[0],), after)]

    def _call(self, function: Callable[..., int], arguments: Sequence[tf.Tensor], after: Any) -> tf.Operation:
        with tf.control_dependencies(list(after)), tf.device("/device:CPU:0"):
            found = tf.numpy_function(function, arguments, tf.int64).op
        self._run_independently(found)
        return found
