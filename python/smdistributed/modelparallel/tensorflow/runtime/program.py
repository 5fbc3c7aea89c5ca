"""Builds this rank's graph: each segment becomes a function that is called once for each microbatch.

- PROG-1: calls of anchored segments follow the schedule; a control edge leads from each to the next. Other calls, and
  all messages, run when their operands are there.
- PROG-2: inputs that only anchored calls use are received two calls ahead, so that no more memory than that waits.
  Other inputs are received at once, because other ranks may wait for results. An anchored call's outputs for other
  ranks are sent before the next call begins: with one thread for all operations, TensorFlow would run the longer one
  first.
- PROG-3: functions are called, not inlined, so control edges hold for whole calls, and a call's results are freed after
  their last use. PROG-6 is the exception.
- PROG-4: gradients are accumulated as they are computed, in variables that exist while the step runs. Beside the sums,
  a call holds the gradients that it has not added yet, which is one at a time where operations run one after the other.
  Values that the body derives from gradients outside of the schedule are added when their call has ended, and the next
  backward waits for that. Other results of a microbatch are held only if they are used.
- PROG-5: a call comes after the calls whose effects its operations depend on, and after those of the microbatch before
  that read or change a variable which it changes or reads (SEG-3 in the core). A message tells other ranks of effects.
- PROG-6: gradients that replicas reduce during the rest of the backward are not held until a call ends. The last call
  that makes some of them is replaced by its operations, with the same dependencies. A segment with effects is called
  all the same.
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

#: Attributes of operations that name others of their graph.
_NAMING = ("_class", "_output_shapes")


def copy_ops(ops: Sequence[tf.Operation], values: dict[str, tf.Tensor]) -> list[tf.Operation]:
    """Makes ``ops`` again in the current graph, and returns them.

    Args:
        ops: In an order in which they can be made.
        values: What stands here for a tensor there, by its name; those that are made are added.
    """
    made: dict[str, tf.Operation] = {}
    # To enter a device takes as long as to make an operation, and neighbours are mostly on one.
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
            # A constant.
            copy_ops([tensor.op], values)
        inputs.append(values[tensor.name])
    # Stand-ins for effects may be missing here, because no operation uses them.
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
    """Returns a traced function as the runtime knows it, without its Python graph.

    The Python graph of a branch or a loop refers to the trace's tensors and would keep the whole trace alive as long as
    the step.
    """
    if not isinstance(function, AtomicFunction):
        return function
    return AtomicFunction(
        function.name, function._bound_context, function.function_type, call_options=function.call_options
    )


class Program:
    """Builds the step's graph, in the graph that is traced now.

    Args:
        trace: What is run.
        segment_graph: This rank's part of it.
        given: For each microbatch, what stands for the inputs of the trace.
        groups: The pipeline.
        to_sum: Tensors that the step returns here, whose sums over the microbatches are wanted, by name, each with the
            device that its sum is for.
        early: Names of tensors that the step returns here, each of which is wanted as soon as it is there.

    Attributes:
        sums: These sums, by name, when the graph has been built.
    """

    def __init__(
        self,
        trace: Trace,
        segment_graph: SegmentGraph,
        given: Sequence[Sequence[tf.Tensor]],
        groups: TensorFlowGroups,
        to_sum: Mapping[str, str],
        early: Collection[str],
    ) -> None:
        self.sums: dict[str, tf.Tensor] = {}
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
        # Of a segment of another rank, what has received the message that it has been called.
        self._calls: dict[tuple[Segment, int], tf.Operation] = {}
        self._anchors: list[tf.Operation] = []
        self._start: list[tf.Operation] = []
        # What others wait for while it runs; and what runs by itself.
        self._scope: StepScope | None = None
        self._independent_ops: list[tf.Operation] = []
        self._transfers: Transfers | None = None
        self._clock = timeline.Clock(self._run_independently)
        # When the last anchored call ended.
        self._idle: list[tf.Operation] = []
        # What the next anchored call waits for: that messages have begun, and, with a timeline, that clocks were read.
        self._begun: list[tf.Operation] = []
        self._to_sum = to_sum
        # PROG-4: by the name of what they are sums of.
        self._accumulators: dict[str, Accumulator] = {}
        if self._microbatches > 1:
            for segment in dict.fromkeys(segment for segment, _ in segment_graph.order):
                for tensor in segment.outputs:
                    if tensor.name in to_sum and Accumulator.supports(tensor):
                        self._accumulators[tensor.name] = Accumulator(tensor, to_sum[tensor.name])
        self._split = self._to_split(early)
        # Additions of the last anchored call.
        self._adding: list[tf.Operation] = []
        unanchored = [each for each in segment_graph.segments if not each.anchored]
        self._taken_at_once = {tensor.name for each in unanchored for tensor in each.inputs}

    def build(self) -> list[dict[str, tf.Tensor]]:
        """Makes all of it; returns the tensors that the step returns here, for each microbatch, by name."""
        segment_graph = self._segment_graph
        if self._groups.pp_group is not None:
            self._scope = StepScope()
            with tf.control_dependencies([self._scope.begin_op]):
                start = agreement.compare(
                    segment_graph.lines, *agreement.pipeline_group(self._groups), scope=self._scope
                )
            self._start = [start]
            self._transfers = Transfers(segment_graph, self._groups, self._microbatches, start, self._run_independently)
        # A tape around the step has nothing to record in it.
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
                # No call has made it here.
                for row in rows:
                    self._add(name, row[name])
            return rows

    def end(self, results: Any) -> Any:
        """The step ends when ``results``, and all that has been made, are there; returns them as they are then."""
        if self._scope is None:
            return results
        with record.stop_recording():
            return self._scope.end(results, self._independent_ops)

    # Values.

    def _value(self, tensor: tf.Tensor, mb: int, stage: int | None = None) -> Any:
        """What stands for a tensor here; ``stage`` is the one that it is for, if that is to be told in the timeline."""
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
        assert self._transfers is not None, "`build` makes them"
        return self._transfers

    def _receive(self, tensor: tf.Tensor, mb: int, stage: int | None) -> tf.Tensor:
        before = [] if tensor.name in self._taken_at_once else self._anchors[-2:-1]
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
        """The operation that ends after a segment's call for a microbatch, on whichever rank it is."""
        if segment.ops:
            self._call(segment, mb)
        elif (segment, mb) not in self._calls:
            self._calls[segment, mb] = self._remote.receive_signal(segment, mb)
        return self._calls[segment, mb]

    def _run_independently(self, op: tf.Operation) -> None:
        """Excludes an operation that must run from automatic control dependencies; its dependencies are explicit."""
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
            # States change in the order of the microbatches.
            before.append(self._has_been_called(segment, mb - 1))
        ready = []
        if segment.anchored:
            # Most come from one call.
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
            # MSG-2.
            for tensor in sorted(sent, key=lambda each: transfers[each.name].number):
                self._send(segment, tensor, self._values[mb][tensor.name], mb)
        if segment.alone and segment in self._segment_graph.signals:
            self._remote.signal(segment, mb, call)

    # PROG-4.

    def _summed(self, segment: Segment) -> dict[str, Accumulator]:
        """The accumulators of a segment's gradients."""
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
        """Adds a microbatch's value; returns the operation, if there is one."""
        if name not in self.sums:
            self.sums[name] = tf.convert_to_tensor(value)
            return []
        self.sums[name] = self.sums[name] + value
        return [self.sums[name].op]

    def _inputs(self, segment: Segment) -> list[tf.Tensor]:
        """The tensors that a segment's function takes; captured ones are captured again."""
        return [each for each in segment.inputs if each.name not in self._captures]

    def _function(self, segment: Segment) -> Any:
        """The function of a segment."""
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
        # TensorFlow would compute a call that takes constants alone when it optimizes the graph, where it does not find
        # the function.
        options = concrete._inference_function._call_options
        concrete._inference_function._call_options = dataclasses.replace(options, is_stateful=True)
        self._functions[segment] = concrete
        return concrete

    def _compute(
        self, segment: Segment, arguments: Sequence[tf.Tensor]
    ) -> tuple[dict[str, tf.Tensor], list[tf.Operation]]:
        """A segment's operations in the current graph, and the values in it by name."""
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

    # PROG-6.

    def _to_split(self, early: Collection[str]) -> set[tuple[Segment, int]]:
        """The last calls of segments that make something early."""
        last = dict(self._segment_graph.order)
        return {
            (segment, mb)
            for segment, mb in last.items()
            if any(tensor.name in early for tensor in segment.outputs) and not any(map(has_effect, segment.ops))
        }

    def _call_split(self, segment: Segment, arguments: Sequence[tf.Tensor]) -> tuple[tf.Operation, list[tf.Tensor]]:
        """Replaces a call by its operations; returns what stands for the call, and its results."""
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
