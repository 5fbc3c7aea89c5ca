"""A step's segments and messages in the timeline (``SMD_TIMELINE``), in PyTorch's form.

Clocks are operations of the graph. Without a timeline the graph has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed import _core

#: What the segments' phases are called.
PHASES = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


class Clock:
    """Reads and notes times while the graph runs.

    Args:
        run_independently: Called with every operation that must run and has no order with others but what it is told.
    """

    def __init__(self, run_independently: Callable[[tf.Operation], None]) -> None:
        self._on = _core.timeline_now() > 0
        self._run_independently = run_independently

    def read(self, after: Sequence[tf.Operation]) -> list[tf.Operation]:
        """The time when ``after`` have ended, as one operation; none without a timeline."""
        return [self._call(lambda: _core.timeline_now(), (), after)] if self._on else []

    def note(
        self, kind: str, stage: int, mb: int, start: Sequence[tf.Operation], after: Sequence[tf.Operation]
    ) -> list[tf.Operation]:
        """Notes an interval of the timeline, from ``start`` until ``after`` have ended.

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
