"""From a layout to this rank's graph: each segment becomes a function, called once for each microbatch.

- PROG-1: calls of anchored segments come in the order of the schedule; a control edge leads from each to the next.
  All others, and all messages, run when their operands are there.
- PROG-2: a message has a number of its own in a step, as both sides count them in the same layout. So a receive may be
  posted at any time. What anchored calls alone take is posted two calls ahead, so that no more memory than that waits;
  anything else at once, since others may wait for what comes of it.
- PROG-3: functions are called, not inlined, so a control edge means what it says, and what a call has made is free
  again when the last call that takes it has ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import handle_data_util

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import SMPMismatchError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication
from smdistributed.modelparallel.tensorflow.layout import Layout, Segment
from smdistributed.modelparallel.tensorflow.placement import FREE, Placement
from smdistributed.modelparallel.tensorflow.tracing import Trace

#: Attributes of operations that name others of their graph.
_NAMING = ("_class", "_output_shapes")


def copy_ops(ops: Sequence[tf.Operation], values: dict[str, tf.Tensor]) -> None:
    """Makes ``ops`` again in the current graph.

    Args:
        ops: In an order in which they can be made.
        values: What stands here for a tensor there, by its name; those that are made are added.
    """
    graph = tf.compat.v1.get_default_graph()
    made: dict[str, tf.Operation] = {}
    for op in ops:
        attrs = {name: value for name, value in op.node_def.attr.items() if name not in _NAMING}
        inputs = []
        for tensor in op.inputs:
            if tensor.name not in values:
                # A constant.
                copy_ops([tensor.op], values)
            inputs.append(values[tensor.name])
        before = [made[each.name] for each in op.control_inputs if each.name in made]
        with tf.control_dependencies(before), tf.device(op.device or None):
            new = graph._create_op_internal(
                op.type, inputs, [tensor.dtype for tensor in op.outputs], name=op.name, attrs=attrs, op_def=op.op_def
            )
        made[op.name] = new
        for old, tensor in zip(op.outputs, new.outputs, strict=True):
            tensor.set_shape(old.shape)
            if old.dtype in (tf.resource, tf.variant):
                handle_data_util.copy_handle_data(old, tensor)
            values[old.name] = tensor


class Program:
    """Builds the step's graph, in the graph that is traced now.

    Args:
        given: For each microbatch, what stands for the inputs of the trace.
        orders: Of all ranks, from the layout.
    """

    def __init__(
        self,
        trace: Trace,
        placement: Placement,
        layout: Layout,
        given: Sequence[Sequence[tf.Tensor]],
        orders: Sequence[Sequence[tuple[str, int, int]]],
        rank: int,
        group: int | None,
    ) -> None:
        self._trace, self._placement, self._layout = trace, placement, layout
        self._rank, self._group, self._orders = rank, group, orders
        self._microbatches = len(given)
        self._graph = tf.compat.v1.get_default_graph()
        captures = {inner.name: outer for outer, inner in trace.graph.captures}
        self._captures: dict[str, Any] = captures
        self._values: list[dict[str, Any]] = []
        for tensors in given:
            inputs = {inner.name: outer for inner, outer in zip(trace.inputs, tensors, strict=True)}
            self._values.append({**captures, **inputs})
        self._functions: dict[Segment, tuple[Any, list[tf.Tensor], list[tf.Tensor]]] = {}
        self._calls: dict[tuple[Segment, int], tf.Operation] = {}
        self._anchors: list[tf.Operation] = []
        self._start: list[tf.Operation] = []
        unanchored = [each for each in layout.segments if not each.anchored]
        self._taken_at_once = {
            tensor.name for each in unanchored for tensor in layout.inputs_of(layout.ops_on(each, rank))
        }

    def build(self) -> list[dict[str, tf.Tensor]]:
        """Makes all of it; returns the tensors that the step returns here, for each microbatch, by name."""
        layout = self._layout
        if self._group is not None:
            self._start = [self._compare()]
        anchored = {(each.phase, each.stage): each for each in layout.segments if each.anchored}
        # A tape around the step has nothing to record in it.
        with record.stop_recording():
            for kind, stage, mb in self._orders[self._rank]:
                segment = anchored.get((kind, stage))
                if segment is not None:
                    self._call(segment, mb)
            for segment in layout.segments:
                if layout.ops_on(segment, self._rank):
                    for mb in range(self._microbatches):
                        self._call(segment, mb)
            return [
                {tensor.name: self._value(tensor, mb) for tensor in layout.wanted[self._rank]}
                for mb in range(self._microbatches)
            ]

    # Values.

    def _value(self, tensor: tf.Tensor, mb: int) -> Any:
        values = self._values[mb]
        if tensor.name in values:
            return values[tensor.name]
        if self._placement.places[tensor.op.name] == FREE:
            copy_ops([tensor.op], values)
            return values[tensor.name]
        segment = self._layout.of[tensor.op.name]
        if segment.place in (self._rank, -1):
            self._call(segment, mb)
        else:
            values[tensor.name] = self._receive(tensor, segment.place, mb)
        return values[tensor.name]

    def _tag(self, tensor: tf.Tensor, mb: int) -> int:
        number, _, _ = self._layout.transfers[tensor.name]
        return 2 * (number * self._microbatches + mb)

    def _receive(self, tensor: tf.Tensor, source: int, mb: int) -> tf.Tensor:
        tag = self._tag(tensor, mb)
        before = list(self._start)
        if tensor.name not in self._taken_at_once:
            before += self._anchors[-2:-1]
        with tf.control_dependencies(before), tf.device("/device:CPU:0"):
            if tensor.shape.is_fully_defined():
                shape = tf.constant(tensor.shape.as_list(), tf.int32)
            else:
                shape = core_ops.smd_recv(
                    shape=tf.constant([tensor.shape.rank]), T=tf.int32, peer=source, tag=tag + 1, group=self._group
                )
                self._runs_by_itself(shape.op)
            value = core_ops.smd_recv(shape=shape, T=tensor.dtype, peer=source, tag=tag, group=self._group)
        self._runs_by_itself(value.op)
        value.set_shape(tensor.shape)
        return value

    def _send(self, tensor: tf.Tensor, value: tf.Tensor, targets: Sequence[int], mb: int) -> None:
        tag = self._tag(tensor, mb)
        with tf.device("/device:CPU:0"):
            for target in targets:
                if not tensor.shape.is_fully_defined():
                    shape = tf.shape(value)
                    self._runs_by_itself(core_ops.smd_send(tensor=shape, peer=target, tag=tag + 1, group=self._group))
                self._runs_by_itself(core_ops.smd_send(tensor=value, peer=target, tag=tag, group=self._group))

    def _runs_by_itself(self, op: tf.Operation) -> None:
        """It must run, but TensorFlow puts it into no order with others: what it has to wait for, it is told here."""
        order = getattr(self._graph, "experimental_acd_manager", None)
        if order is not None:
            order.run_independently(op)

    # Calls.

    def _call(self, segment: Segment, mb: int) -> None:
        if (segment, mb) in self._calls:
            return
        layout = self._layout
        function, inputs, outputs = self._function(segment)
        arguments = [self._value(tensor, mb) for tensor in inputs]
        before = list(self._start) if not arguments else []
        if segment.anchored:
            before += self._anchors[-1:]
        elif mb > 0 and (segment, mb - 1) in self._calls:
            # States change in the order of the microbatches.
            before.append(self._calls[segment, mb - 1])
        with tf.control_dependencies(before):
            results = function(*arguments)
        call = results[0].op
        self._runs_by_itself(call)
        self._calls[segment, mb] = call
        if segment.anchored:
            self._anchors.append(call)
        for tensor, value in zip(outputs, results[1:], strict=True):
            self._values[mb][tensor.name] = value
            if segment.place >= 0 and tensor.name in layout.transfers:
                self._send(tensor, value, layout.transfers[tensor.name][2], mb)

    def _function(self, segment: Segment) -> tuple[Any, list[tf.Tensor], list[tf.Tensor]]:
        if segment in self._functions:
            return self._functions[segment]
        ops = self._layout.ops_on(segment, self._rank)
        # Captured tensors are captured again.
        inputs = [each for each in self._layout.inputs_of(ops) if each.name not in self._captures]
        outputs = self._layout.outputs_of(segment, self._rank)
        graph_of_trace = self._trace.graph

        def body(*arguments: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            for function in graph_of_trace._functions.values():
                graph._add_function_recursive(function)
            values: dict[str, Any] = dict(self._captures)
            for tensor, argument in zip(inputs, arguments, strict=True):
                if tensor.dtype in (tf.resource, tf.variant):
                    handle_data_util.copy_handle_data(tensor, argument)
                values[tensor.name] = argument
            copy_ops(ops, values)
            return [tf.constant(0), *(values[tensor.name] for tensor in outputs)]

        body.__name__ = f"smp_{segment.phase}{max(segment.stage, 0)}_level{segment.level}"
        function = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
        concrete = function.get_concrete_function(*(tf.TensorSpec(each.shape, each.dtype) for each in inputs))
        self._functions[segment] = concrete, inputs, outputs
        return self._functions[segment]

    # Agreement.

    def _compare(self) -> tf.Operation:
        """An operation that fails unless all ranks run the same step."""
        lines = self._layout.lines() + [
            " ".join(f"{kind}{stage}.{mb}" for kind, stage, mb in each) for each in self._orders
        ]
        digest = zlib.crc32("\n".join(lines).encode())
        everybody = core_ops.smd_all_gather(tensor=tf.constant([digest], tf.int64), group=self._group).output
        differ = tf.reduce_any(everybody != tf.constant(digest, tf.int64))

        def tell(_: Any) -> int:
            raise SMPMismatchError(_difference(communication.allgather(lines, CommGroup.PP_GROUP)))

        def fail() -> tf.Tensor:
            return tf.numpy_function(tell, [everybody], tf.int64)

        return tf.cond(differ, fail, lambda: tf.constant(0, tf.int64)).op


def _difference(story: Sequence[Sequence[str]]) -> str:
    """What the ranks do at the first place where they differ."""
    first = story[0]
    for rank, other in enumerate(story):
        if other == first:
            continue
        for place in range(max(len(first), len(other))):
            ours = first[place] if place < len(first) else "nothing"
            theirs = other[place] if place < len(other) else "nothing"
            if ours != theirs:
                return (
                    f"the ranks of this pipeline run different steps: partition 0 has `{ours}` where partition {rank} has "
                    f"`{theirs}` [smd:mismatch]"
                )
    return "the ranks of this pipeline ran different steps [smd:mismatch]"
