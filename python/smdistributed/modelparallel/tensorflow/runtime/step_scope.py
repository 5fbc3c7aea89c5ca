"""A step from its beginning to its end, as operations of its graph.

The core hears of both. What fails in between, on this rank alone perhaps, it tells the others, which wait for what comes of the step.

- ATT-3: a step begins when it has all its inputs: what fails before, such as an iterator that has no more, is not the step's. What a function with
  several steps computes for a later one may fail while an earlier one runs.
- ATT-4: what it returns is there when it has ended: what fails in computing with that is not the step's, either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops

_HOST = "/device:CPU:0"


class Attempt:
    """One that begins here, in the graph that is traced now.

    Attributes:
        began: The operation before which nothing of it may run that others count on.
    """

    def __init__(self) -> None:
        with tf.device(_HOST):
            self._step = core_ops.smd_begin_step()
        self.began = self._step.op

    def excuse(self) -> tf.Operation:
        """All ranks know that there will be no more of it."""
        with tf.device(_HOST):
            return core_ops.smd_end_step(step=self._step)

    def end(self, results: Any, after: Sequence[tf.Operation]) -> Any:
        """It ends when ``after`` and ``results`` are there; returns these as they are then, ``None`` among them or not."""
        graph = tf.compat.v1.get_default_graph()
        leaves = tf.nest.flatten(results, expand_composites=True)
        made = [leaf.op for leaf in leaves if getattr(leaf, "graph", None) is graph]
        with tf.control_dependencies([*after, *made]), tf.device(_HOST):
            ended = core_ops.smd_end_step(step=self._step)
        with tf.control_dependencies([ended]):
            leaves = [leaf if leaf is None else _again(leaf) for leaf in leaves]
        self.began._add_control_inputs([op for op in graph.get_operations() if op.type == "Placeholder"])
        return tf.nest.pack_sequence_as(results, leaves, expand_composites=True)


def _again(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        return tf.identity(tensor)
