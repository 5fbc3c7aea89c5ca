"""The scope of a step: operations of its graph that tell the core when the step begins and ends.

If an operation fails in between, perhaps on this rank alone, the core tells the other ranks, which wait for its
results.

- ATT-3: a step begins when it has all its inputs. An earlier failure, such as an exhausted iterator, is not the step's.
  In a function with several steps, what is computed for a later one may fail while an earlier one runs.
- ATT-4: a step's results are available when it has ended. A failure in computing with them is not the step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops

_HOST = "/device:CPU:0"


class StepScope:
    """A step that begins here, in the graph that is being traced.

    Attributes:
        begin_op: The operation before which nothing of it may run that others count on.
    """

    def __init__(self) -> None:
        with tf.device(_HOST):
            self._step = core_ops.smd_begin_step()
        self.begin_op = self._step.op

    def cancel(self) -> tf.Operation:
        """Ends the step on all ranks without results."""
        with tf.device(_HOST):
            return core_ops.smd_end_step(step=self._step)

    def end(self, results: Any, after: Sequence[tf.Operation]) -> Any:
        """Ends the step when ``after`` and ``results`` are computed; returns the results."""
        graph = tf.compat.v1.get_default_graph()
        leaves = tf.nest.flatten(results, expand_composites=True)
        made = [leaf.op for leaf in leaves if getattr(leaf, "graph", None) is graph]
        with tf.control_dependencies([*after, *made]), tf.device(_HOST):
            ended = core_ops.smd_end_step(step=self._step)
        with tf.control_dependencies([ended]):
            leaves = [leaf if leaf is None else _again(leaf) for leaf in leaves]
        self.begin_op._add_control_inputs([op for op in graph.get_operations() if op.type == "Placeholder"])
        return tf.nest.pack_sequence_as(results, leaves, expand_composites=True)


def _again(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        return tf.identity(tensor)
