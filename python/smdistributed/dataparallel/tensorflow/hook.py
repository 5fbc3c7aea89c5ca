"""Broadcast at the start of a TF1 session."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.variables import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all global variables the values of one rank when a ``MonitoredTrainingSession`` is made.

    So all ranks start from the same values, whether these are random or come from a checkpoint that one rank has read.

    Args:
        root_rank: Whose values.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._operation: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the operation to the graph, which is finalized after this."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcasts, once the variables have their first values."""
        session.run(self._operation)
