"""Builds this rank's graph: each segment becomes a function that is called once for each microbatch.

- PROG-1: calls of anchored segments follow the schedule; a control edge leads from each to the next. Other calls, and
  all messages, run as soon as their inputs are computed.
- PROG-2: inputs that only anchored calls use are received two calls ahead, which limits the memory of waiting inputs.
  Other inputs are received at once, because other ranks may wait for results. An anchored call's outputs for other
  ranks are sent before the next call begins, because with a single thread TensorFlow would run the longer operation
  first.
- PROG-3: functions are called and not inlined, so that control edges apply to whole calls, and a call's results are
  freed after their last use. PROG-6 is the exception.
- PROG-4: gradients are accumulated as they are computed, in variables that exist while the step runs. In addition to
  the sums, a call holds the gradients that it has not added yet: one at a time, if operations run one after the
  other. Values that the body derives from gradients outside of the schedule are added after their call, and the next
  backward waits for that. Other results of a microbatch are kept only if they are used.
- PROG-5: a call comes after the calls whose effects its operations depend on, and after those of the previous
  microbatch that read a variable which it changes, or change one which it reads (SEG-3 in the core). A message
  signals effects to other ranks.
- PROG-6: gradients that replicas reduce during the rest of the backward must be available before their call ends. So
  the last call that computes such gradients is replaced by its operations, with the same dependencies. A segment with
  effects is always called.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import handle_data_util

from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
from smdistributed.modelparallel.tensorflow.runtime import agreement, timeline
from smdistributed.modelparallel.tensorflow.runtime.accumulators import Accumulator
from smdistributed.modelparallel.tensorflow.runtime.segment_graph import Segment, SegmentGraph
from smdistributed.modelparallel.tensorflow.runtime.step_scope import StepScope
from smdistributed.modelparallel.tensorflow.runtime.transfers import Transfers
from smdistributed.modelparallel.tensorflow.tracing.operations import has_effect, waited_for
from smdistributed.modelparallel.tensorflow.tracing.recording import Trace

#: Attributes of operations that contain names of other operations in their graph.
_NAMING = ("_class", "_output_shapes")


def copy_ops(ops: Sequence[tf.Operation], values: dict[str, tf.Tensor]) -> list[tf.Operation]:
    """Copy ``ops`` to the current graph, and return the copies.

    Args:
        ops: The operations in topological order.
        values: The tensors of the current graph, by the names of the originals; the copies are added.
    """
    made: dict[str, tf.Operation] = {}
    # Entering a device scope is as slow as creating an operation, and adjacent operations are mostly on one device.
    for device, same_device in itertools.groupby(ops, lambda op: op.device):
        with tf.device(device or None):
            for op in same_device:
                made[op.name] = _copy_op(op, values, made)
    return list(made.values())


def _copy_op(op: tf.Operation, values: dict[str, tf.Tensor], made: Mapping[str, tf.Operation]) -> tf.Operation:
    graph = tf.compat.v1.get_default_graph()
    attrs = {name: value for name, value in op.node_def.attr.items() if name not in _NAMING}
    inputs = []
    for tensor in op.inputs:
        if tensor.name not in values:
            # A constant of eager code.
            copy_ops([tensor.op], values)
        inputs.append(values[tensor.name])
    # Control dependencies for effects may be missing here, because no operation uses their results.
    waits = dict.fromkeys(each.name for each in (*op.control_inputs, *waited_for(op)))
    with tf.control_dependencies([made[name] for name in waits if name in made]):
        new = graph._create_op_internal(
            op.type, inputs, [tensor.dtype for tensor in op.outputs], name=op.name, attrs=attrs, op_def=op.op_def
        )
    for old, tensor in zip(op.outputs, new.outputs, strict=True):
        tensor.set_shape(old.shape)
        if old.dtype in (tf.resource, tf.variant):
            handle_data_util.copy_handle_data(old, tensor)
        values[old.name] = tensor
    return new


def _without_graph(function: Any) -> Any:
    """Return a traced function as the runtime knows it, without its Python graph.

    The Python graph of a branch or a loop refers to the trace's tensors and would keep the whole trace alive as long as
    the step.
    """
    if not isinstance(function, AtomicFunction):
        return function
    return AtomicFunction(
        function.name, function._bound_context, function.function_type, call_options=function.call_options
    )


class Program:
    """Builds the step's graph inside of the graph that is being traced.

    Args:
        trace: The traced body.
        segment_graph: This rank's segments.
        given: For each microbatch, the tensors that replace the inputs of the trace.
        groups: The process groups of the pipeline.
        to_sum: Tensors that the step returns here as sums over the microbatches, by name, each with the device of its
        sum.
        early: Names of tensors that the step returns here and that are needed as soon as they are computed.
        comparisons: What this rank compares with ranks of other pipelines when the step begins.

    Attributes:
        sums: The sums, by name, after :meth:`build`.
        compared: The operation that ends when all comparisons have passed, after :meth:`build`; ``None`` without any.
    """

    def __init__(
        self,
        trace: Trace,
        segment_graph: SegmentGraph,
        given: Sequence[Sequence[tf.Tensor]],
        groups: TensorFlowGroups,
        to_sum: Mapping[str, str],
        early: Collection[str],
        comparisons: Sequence[agreement.Comparison],
    ) -> None:
        self.sums: dict[str, tf.Tensor] = {}
        self.compared: tf.Operation | None = None
        self._trace, self._segment_graph, self._groups = trace, segment_graph, groups
        self._microbatches = len(given)
        self._graph = tf.compat.v1.get_default_graph()
        inputs = {inner.name for inner in trace.inputs}
        captures = {inner.name: outer for outer, inner in trace.graph.captures if inner.name not in inputs}
        self._captures: dict[str, Any] = captures
        self._values: list[dict[str, Any]] = []
        for tensors in given:
            self._values.append(
                captures | {inner.name: outer for inner, outer in zip(trace.inputs, tensors, strict=True)}
            )
        self._functions: dict[Segment, Any] = {}
        # For segments of other ranks, the operation that has received the signal of their call.
        self._calls: dict[tuple[Segment, int], tf.Operation] = {}
        self._anchors: list[tf.Operation] = []
        self._start: list[tf.Operation] = []
        self._comparisons = comparisons
        # Operations that other ranks wait for during the step, and operations that run independently.
        self._scope: StepScope | None = None
        self._independent_ops: list[tf.Operation] = []
        self._transfers: Transfers | None = None
        self._clock = timeline.Clock(self._run_independently)
        # The last operation of the previous anchored call.
        self._idle: list[tf.Operation] = []
        # Dependencies of the next anchored call: started messages, and with a timeline the clock's operations.
        self._begun: list[tf.Operation] = []
        self._to_sum = to_sum
        # Accumulators by the names of the summed tensors (PROG-4).
        self._accumulators: dict[str, Accumulator] = {}
        if self._microbatches > 1:
            for segment in dict.fromkeys(segment for segment, _ in segment_graph.order):
                for tensor in segment.outputs:
                    if tensor.name in to_sum and Accumulator.supports(tensor):
                        self._accumulators[tensor.name] = Accumulator(tensor, to_sum[tensor.name])
        self._split = self._to_split(early)
        # Additions of the previous anchored call.
        self._adding: list[tf.Operation] = []
        unanchored = [each for each in segment_graph.segments if not each.anchored]
        self._received_at_once = {tensor.name for each in unanchored for tensor in each.inputs}

    def build(self) -> list[dict[str, tf.Tensor]]:
        """Build the graph; return the tensors that the step returns here, for each microbatch, by name."""
        segment_graph = self._segment_graph
        if self._groups.pp_group is not None:
            self._scope = StepScope()
            with tf.control_dependencies([self._scope.begin_op]):
                lines = [*segment_graph.lines, *(line for each in self._comparisons for line in each.lines)]
                partitions = agreement.in_pipeline(lines, self._groups)
                self.compared = agreement.compare([partitions, *self._comparisons], self._scope)
            self._start = [self.compared]
            self._transfers = Transfers(
                segment_graph, self._groups, self._microbatches, self.compared, self._run_independently
            )
        elif self._comparisons:
            self.compared = agreement.compare(self._comparisons)
        # A gradient tape around the step must not record these operations.
        with record.stop_recording():
            for segment, mb in segment_graph.order:
                self._call(segment, mb)
            for segment in segment_graph.segments:
                if segment.ops:
                    for mb in range(self._microbatches):
                        self._call(segment, mb)
            rows = [
                {tensor.name: self._value(tensor, mb) for tensor in segment_graph.wanted}
                for mb in range(self._microbatches)
            ]
            for name in sorted(set(self._to_sum) - set(self.sums)):
                # Not computed by a call on this rank.
                for row in rows:
                    self._add(name, row[name])
            return rows

    def end(self, results: Any) -> Any:
        """Return ``results`` with a dependency on everything that the step runs."""
        if self._scope is None:
            return results
        with record.stop_recording():
            return self._scope.end(results, self._independent_ops)

    # Values.

    def _value(self, tensor: tf.Tensor, mb: int, stage: int | None = None) -> Any:
        """Return the tensor of a microbatch; ``stage`` is the stage that uses it, if the timeline is to show that."""
        values = self._values[mb]
        if tensor.name in values:
            return values[tensor.name]
        segment = self._segment_graph.of.get(tensor.op.name)
        if segment is not None:
            self._call(segment, mb)
        elif tensor.op.name in self._segment_graph.free:
            copy_ops([tensor.op], values)
        else:
            values[tensor.name] = self._receive(tensor, mb, stage)
        return values[tensor.name]

    @property
    def _remote(self) -> Transfers:
        assert self._transfers is not None, "`build` creates them"
        return self._transfers

    def _receive(self, tensor: tf.Tensor, mb: int, stage: int | None) -> tf.Tensor:
        before = [] if tensor.name in self._received_at_once else self._anchors[-2:-1]
        posted = [] if stage is None else self._clock.read([*self._start, *before])
        value = self._remote.receive(tensor, mb, [*before, *posted])
        if stage is not None:
            self._clock.note("receive", stage, mb, posted, [value.op])
        return value

    def _send(self, segment: Segment, tensor: tf.Tensor, value: tf.Tensor, mb: int) -> None:
        ready = self._clock.read([value.op]) if segment.anchored else []
        begun, sent = self._remote.send(tensor, value, mb, ready)
        if segment.anchored:
            self._begun += begun
        self._clock.note("send", segment.stage, mb, ready, [sent])

    def _has_been_called(self, segment: Segment, mb: int) -> tf.Operation:
        """Return the operation that ends after a segment's call for a microbatch, on any rank."""
        if segment.ops:
            self._call(segment, mb)
        elif (segment, mb) not in self._calls:
            self._calls[segment, mb] = self._remote.receive_signal(segment, mb)
        return self._calls[segment, mb]

    def _run_independently(self, op: tf.Operation) -> None:
        """Exclude an operation that must run from automatic control dependencies; its dependencies are explicit."""
        self._independent_ops.append(op)
        order = getattr(self._graph, "experimental_acd_manager", None)
        if order is not None:
            order.run_independently(op)

    # Calls.

    def _call(self, segment: Segment, mb: int) -> None:
        if (segment, mb) in self._calls:
            return
        inputs = self._inputs(segment)
        stage = segment.stage if segment.anchored else None
        arguments = [self._value(tensor, mb, stage) for tensor in inputs]
        before = list(self._start) if not arguments else []
        before += [self._has_been_called(other, mb - back) for other, back in segment.after if mb >= back]
        if segment.anchored:
            before += self._anchors[-1:] + self._begun
            self._begun = []
            if segment.phase != "F":
                before, self._adding = before + self._adding, []
        elif mb > 0:
            # Variables change in the order of the microbatches.
            before.append(self._has_been_called(segment, mb - 1))
        ready = []
        if segment.anchored:
            # Most inputs come from the same call.
            here = list(dict.fromkeys(each.op for each in arguments if getattr(each, "graph", None) is self._graph))
            ready = self._clock.read([*before, *here])
            if mb == 0:
                before += self._begin_sums(segment, [*before, *here])
        with tf.control_dependencies([*before, *ready]):
            if (segment, mb) in self._split:
                call, results = self._call_split(segment, arguments)
            else:
                number, *results = self._function(segment)(*arguments)
                call = number.op
        self._run_independently(call)
        self._calls[segment, mb] = call
        if segment.anchored:
            self._anchors.append(call)
            self._clock.note("wait", segment.stage, mb, self._idle, ready)
            self._begun += self._clock.note(timeline.PHASES[segment.phase], segment.stage, mb, ready, [call])
            self._idle = self._clock.read([call])
            self._begun += self._idle
            if mb == self._microbatches - 1:
                for name in self._summed(segment):
                    if name not in self.sums:
                        self._end_sum(name, call)
        for tensor, value in zip(segment.outputs, results, strict=True):
            self._values[mb][tensor.name] = value
            if tensor.name in self._to_sum and tensor.name not in self._accumulators:
                self._adding += self._add(tensor.name, value)
        if segment.alone:
            transfers = self._segment_graph.transfers
            sent = [tensor for tensor in segment.outputs if tensor.name in transfers]
            # Sends wait for their turn in the channel (MSG-2).
            for tensor in sorted(sent, key=lambda each: transfers[each.name].number):
                self._send(segment, tensor, self._values[mb][tensor.name], mb)
        if segment.alone and segment in self._segment_graph.signals:
            self._remote.signal(segment, mb, call)

    # Accumulation (PROG-4).

    def _summed(self, segment: Segment) -> dict[str, Accumulator]:
        """Return the accumulators of a segment's gradients."""
        names = [tensor.name for tensor in segment.outputs if tensor.name in self._accumulators]
        return {name: self._accumulators[name] for name in names}

    def _begin_sums(self, segment: Segment, after: Sequence[Any]) -> list[tf.Operation]:
        made = [op for each in self._summed(segment).values() for op in each.begin(after)]
        for op in made:
            self._run_independently(op)
        return made

    def _end_sum(self, name: str, after: tf.Operation) -> None:
        self.sums[name], freed = self._accumulators[name].end([after])
        for op in (self.sums[name].op, freed):
            self._run_independently(op)

    def _add(self, name: str, value: tf.Tensor) -> list[tf.Operation]:
        """Add a microbatch's value to its sum; return the operation, if there is one."""
        if name not in self.sums:
            self.sums[name] = tf.convert_to_tensor(value)
            return []
        self.sums[name] = self.sums[name] + value
        return [self.sums[name].op]

    def _inputs(self, segment: Segment) -> list[tf.Tensor]:
        """Return the arguments of a segment's function, including captured tensors."""
        return [each for each in segment.inputs if each.name not in self._captures]

    def _function(self, segment: Segment) -> Any:
        """Return the function of a segment."""
        if segment in self._functions:
            return self._functions[segment]
        inputs = self._inputs(segment)

        def body(*arguments: tf.Tensor) -> list[tf.Tensor]:
            values, _ = self._compute(segment, arguments)
            for name, each in self._summed(segment).items():
                each.add(values[name])
            return [tf.constant(0), *(values[tensor.name] for tensor in segment.outputs)]

        body.__name__ = f"smp_{segment.name}"
        function = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
        concrete = function.get_concrete_function(*(tf.TensorSpec(each.shape, each.dtype) for each in inputs))
        # TensorFlow would evaluate a call with constant arguments only while it optimizes the graph, where it does
        # not find the function.
        options = concrete._inference_function._call_options
        concrete._inference_function._call_options = dataclasses.replace(options, is_stateful=True)
        self._functions[segment] = concrete
        return concrete

    def _compute(
        self, segment: Segment, arguments: Sequence[tf.Tensor]
    ) -> tuple[dict[str, tf.Tensor], list[tf.Operation]]:
        """Copy a segment's operations to the current graph; return the values by name."""
        graph = tf.compat.v1.get_default_graph()
        for function in self._trace.graph._functions.values():
            if not graph._is_function(function.name):
                graph._add_function(_without_graph(function))
        values: dict[str, Any] = dict(self._captures)
        for tensor, argument in zip(self._inputs(segment), arguments, strict=True):
            if tensor.dtype in (tf.resource, tf.variant):
                handle_data_util.copy_handle_data(tensor, argument)
            values[tensor.name] = argument
        return values, copy_ops(segment.ops, values)

    # Calls that are replaced by their operations (PROG-6).

    def _to_split(self, early: Collection[str]) -> set[tuple[Segment, int]]:
        """Return the last calls of segments that compute early results."""
        last = dict(self._segment_graph.order)
        return {
            (segment, mb)
            for segment, mb in last.items()
            if any(tensor.name in early for tensor in segment.outputs) and not any(map(has_effect, segment.ops))
        }

    def _call_split(self, segment: Segment, arguments: Sequence[tf.Tensor]) -> tuple[tf.Operation, list[tf.Tensor]]:
        """Replace a call by its operations; return the operation that represents the call, and the results."""
        with tf.control_dependencies([tf.no_op()]):
            values, made = self._compute(segment, arguments)
        for name, each in self._summed(segment).items():
            made.append(each.add(values[name]))
            self._end_sum(name, made[-1])
        for op in made:
            if auto_control_deps.op_is_stateful(op):
                self._run_independently(op)
        with tf.control_dependencies(made):
            return tf.no_op(), [values[tensor.name] for tensor in segment.outputs]
