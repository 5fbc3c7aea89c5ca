"""The scope of a step: operations of its graph that tell the core when the step begins and ends.

If an operation fails in between, possibly on this rank only, the core tells the other ranks, which wait for its
results.

- SCOPE-3: a step begins when all its inputs are computed. An earlier failure, such as an exhausted iterator, does not
  belong to the step. In a function with several steps, operations that only later steps need may fail while an
  earlier one runs.
- SCOPE-4: a step's results are available when it has ended. A failure of operations that use them does not belong to
  the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops

_HOST = "/device:CPU:0"


class StepScope:
    """A step that begins at this point of the graph that is being traced.

    Attributes:
        begin_op: The operation before which no operation runs that other ranks depend on.
    """

    def __init__(self) -> None:
        with tf.device(_HOST):
            self._step = core_ops.smd_begin_step()
        self.begin_op = self._step.op

    def cancel(self) -> tf.Operation:
        """End the step on all ranks without results."""
        with tf.device(_HOST):
            return core_ops.smd_end_step(step=self._step)

    def end(self, results: Any, after: Sequence[tf.Operation]) -> Any:
        """End the step when ``after`` and ``results`` are computed; return the results."""
        graph = tf.compat.v1.get_default_graph()
        leaves = tf.nest.flatten(results, expand_composites=True)
        made = [leaf.op for leaf in leaves if getattr(leaf, "graph", None) is graph]
        with tf.control_dependencies([*after, *made]), tf.device(_HOST):
            ended = core_ops.smd_end_step(step=self._step)
        with tf.control_dependencies([ended]):
            leaves = [leaf if leaf is None else _copy(leaf) for leaf in leaves]
        self.begin_op._add_control_inputs([op for op in graph.get_operations() if op.type == "Placeholder"])
        return tf.nest.pack_sequence_as(results, leaves, expand_composites=True)


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        return tf.identity(tensor)
