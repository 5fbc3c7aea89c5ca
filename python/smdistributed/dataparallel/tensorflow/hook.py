"""Broadcast at the start of a TF1 session."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.variables import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcast all global variables from one rank when a ``MonitoredTrainingSession`` is created.

    All ranks then start from the same values, whether these are random or come from a checkpoint that one rank has
    read.

    Args:
        root_rank: Global rank whose values are sent.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._operation: tf.Operation | None = None

    def begin(self) -> None:
        """Add the operation to the graph before it is finalized."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcast once the variables have their initial values.

        Args:
            session: The session.
            coord: Ignored.
        """
        session.run(self._operation)
