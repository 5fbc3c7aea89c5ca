"""Traces the body of a step into one graph.

The trace contains every operation of one microbatch, with the layer or script line that created it.

Every rank traces the whole body, with the layers of all partitions and the gradients, into a graph that is never run.
Shapes and gradients are TensorFlow's own. The segments that run are cut out of this graph (``tracing/operations.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.core.function.capture import capture_container
from tensorflow.python.eager import backprop
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework import func_graph as func_graph_lib

from smdistributed.modelparallel.exceptions import SMPPartitionError, SMPUsageError
from smdistributed.modelparallel.tensorflow.partitioning import delayed_initialization
from smdistributed.modelparallel.tensorflow.state import state
from smdistributed.modelparallel.tensorflow.tracing.fingerprints import OpFingerprints
from smdistributed.modelparallel.tensorflow.tracing.gradient_tracking import GradientTracker


@dataclass(frozen=True)
class Label:
    """The part of the program that created an operation.

    Attributes:
        inside: Whether it was created in a call of the model.
        unit: The number of the layer among those that were called: the outermost layer that is not a model.
        call: The number of that layer's call.
        partition: The partition of the innermost ``smp.partition``.
        output: Whether it returns the model's result.
    """

    inside: bool = False
    unit: int | None = None
    call: int = -1
    partition: int | None = None
    output: bool = False


class TraceGraph(func_graph_lib.FuncGraph):
    """Records the label of each operation."""

    def __init__(self, name: str, trace: Trace) -> None:
        super().__init__(name)
        self._trace = trace

    def _create_op_internal(self, *args: Any, **kwargs: Any) -> tf.Operation:
        op = super()._create_op_internal(*args, **kwargs)
        self._trace.note(op)
        return op


class Trace:
    """A traced body.

    Attributes:
        graph: The operations.
        labels: The label of each operation, by the operation's name.
        units: The layers that were called, in the order of their first calls, with their paths.
        inputs: Placeholders of the body's arguments.
        returned: The result of the body.
        gradient_tracker: Knows which tensors are gradients.
    """

    def __init__(self) -> None:
        self.graph = TraceGraph("smp_body", self)
        self.labels: dict[str, Label] = {}
        self.units: list[Any] = []
        self.paths: list[str] = []
        self.returned: Any = None
        self.inputs: list[tf.Tensor] = []
        self.called = False
        self.gradient_tracker = GradientTracker()
        self._numbers: dict[int, int] = {}
        self._label = Label()
        self._models: list[Any] = []
        self._calls = 0

    def note(self, op: tf.Operation) -> None:
        """Record the label of a new operation."""
        self.labels[op.name] = self._label

    def ordered(self) -> list[tf.Operation]:
        """Return all operations in topological order.

        The order of creation is different: the gradient of a loop adds inputs to the loop afterwards.
        """
        found: dict[str, tf.Operation] = {}
        for root in self.graph.get_operations():
            pending = [root]
            while pending:
                op = pending[-1]
                missing = [
                    each
                    for each in (*(tensor.op for tensor in op.inputs), *op.control_inputs)
                    if each.name not in found
                ]
                if missing:
                    pending += missing
                else:
                    found.setdefault(pending.pop().name, op)
        return list(found.values())

    def is_current(self) -> bool:
        """Return whether operations are being created for this graph, or for a branch or a loop in it."""
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if graph is self.graph:
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    @contextmanager
    def _labelled(self, label: Label) -> Iterator[None]:
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def in_model(self) -> Any:
        """Return a context for the call of the model."""
        if self._label.inside:
            raise SMPUsageError("the `smp.DistributedModel` was called inside of its own call")
        self.called = True
        return self._labelled(Label(inside=True))

    def out_of_model(self) -> Any:
        """Return a context for the operations that return the model's results."""
        return self._labelled(Label(output=True))

    @contextmanager
    def in_layer(self, layer: Any, is_model: bool) -> Iterator[None]:
        """Return a context for the call of a layer."""
        label = self._label
        if not label.inside or label.unit is not None:
            yield
            return
        if is_model:
            self._models.append(layer)
            try:
                yield
            finally:
                self._models.pop()
            return
        number = self._numbers.get(id(layer))
        if number is None:
            number = self._numbers[id(layer)] = len(self.units)
            self.units.append(layer)
            path = "/".join([*(each.name for each in self._models[1:]), layer.name])
            # Layers of the same name are numbered in the order of their calls.
            others = sum(each == path or each.startswith(f"{path}:") for each in self.paths)
            self.paths.append(f"{path}:{others}" if others else path)
        self._calls += 1
        with self._labelled(Label(True, number, self._calls, label.partition)):
            yield

    @contextmanager
    def in_partition(self, index: int) -> Iterator[None]:
        """Return a context for ``smp.partition``."""
        label = self._label
        if tf.compat.v1.get_default_graph() is not self.graph and label.partition != index:
            raise SMPPartitionError(
                f"`smp.partition({index})` inside of a branch or a loop, which runs on one partition as a "
                "whole: enter the context outside of it"
            )
        with self._labelled(Label(label.inside, label.unit, label.call, index)):
            yield


def trace(
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    shapes: Sequence[tf.TensorShape],
    again: bool = False,
) -> Trace:
    """Trace ``body``.

    Args:
        body: The function, converted by AutoGraph if necessary.
        args: The positional arguments of one microbatch.
        kwargs: The keyword arguments of one microbatch.
        shapes: The shapes of the tensors in the arguments, general enough for all microbatches.
        again: Whether the body was traced before, and so has created its variables.

    Returns:
        The trace; its inputs correspond to the tensors of ``args`` and ``kwargs`` in their order.

    Raises:
        ValueError: The body creates variables again.
    """
    found = Trace()
    before, state.trace = state.trace, found
    shapes_left = iter(shapes)
    try:
        # Operations with effects keep the order of the script, as in any `tf.function`.
        ordered = auto_control_deps.AutomaticControlDependencies()
        with (
            found.graph.as_default(),
            ordered,
            tf.variable_creator_scope(_refused if again else delayed_initialization.with_its_value),
        ):

            def placeholder(value: Any) -> Any:
                if not isinstance(value, tf.Tensor):
                    return value
                inside = tf.compat.v1.placeholder(value.dtype, next(shapes_left))
                if hasattr(value, "_keras_mask"):
                    inside._keras_mask = value._keras_mask
                return inside

            placed_args, placed_kwargs = tf.nest.map_structure(placeholder, (list(args), dict(kwargs)))
            found.inputs = [op.outputs[0] for op in found.graph.get_operations() if op.type == "Placeholder"]
            with _tapes_remember(), found.gradient_tracker.tracking():
                found.returned = body(*placed_args, **placed_kwargs)
            _refuse_pairs(found.returned)
            found.returned = tf.nest.map_structure(_as_tensor, found.returned)
    finally:
        state.trace = before
    return found


def trace_calls(
    body: Callable[..., Any], calls: Sequence[tuple[Sequence[Any], dict[str, Any]]], again: bool
) -> tuple[Trace, list[list[tf.Tensor]]]:
    """Trace ``body`` with the arguments of the first microbatch.

    Tensors in arguments become inputs. Objects that slice themselves (``smp_slice``) may contain tensors anywhere.
    The body is then traced with the arguments of every microbatch, and tensors that differ between these traces
    become inputs, too.

    Args:
        body: The function, converted by AutoGraph if necessary.
        calls: The arguments of each microbatch.
        again: Whether the body was traced before.

    Returns:
        The trace, and for each microbatch the tensors of the graph's inputs, in their order.

    Raises:
        SMPUsageError: The body computes something else for another microbatch.
        ValueError: The body creates variables again.
    """
    hidden = any(_hide_tensors(calls[0], call) for call in calls[1:])
    rows = [[each for each in _flat(call) if isinstance(each, tf.Tensor)] for call in calls]
    if not hidden:
        return trace(body, *calls[0], [_shape_of_all(column) for column in zip(*rows, strict=True)], again), rows
    with _small_tensors_captured():
        others = [
            trace(body, *call, [each.shape for each in row], again) for call, row in zip(calls, rows, strict=True)
        ]
    found = others[0]
    first = _lines(found)
    for number, other in enumerate(others):
        for ours, theirs in itertools.zip_longest(first, _lines(other), fillvalue="nothing"):
            if ours != theirs:
                raise SMPUsageError(
                    f"a `smp.step` function computes `{theirs}` with microbatch {number} and `{ours}` with the first "
                    f"one: what an "
                    "argument's `smp_slice` returns differs in tensors that are made of tensors, and in nothing else"
                )
    for taken in zip(*(each.graph.captures for each in others), strict=True):
        (outer, inner), *_ = taken
        if any(other is not outer for other, _ in taken):
            if outer.dtype == tf.resource:
                raise SMPUsageError("a `smp.step` function uses a different variable for each microbatch")
            found.inputs.append(inner)
            for row, (other, _) in zip(rows, taken, strict=True):
                row.append(other)
    return found, rows


@contextmanager
def _small_tensors_captured() -> Iterator[None]:
    """Return a context in which graphs capture small eager tensors as inputs instead of copying them as constants."""
    plain = capture_container._EAGER_CONST_THRESHOLD
    capture_container._EAGER_CONST_THRESHOLD = -1
    try:
        yield
    finally:
        capture_container._EAGER_CONST_THRESHOLD = plain


def _flat(call: tuple[Sequence[Any], dict[str, Any]]) -> list[Any]:
    args, kwargs = call
    return tf.nest.flatten((list(args), dict(kwargs)))


def _shape_of_all(tensors: Sequence[tf.Tensor]) -> tf.TensorShape:
    """Return the most specific shape that fits all of the tensors."""
    return functools.reduce(tf.TensorShape.most_specific_compatible_shape, (each.shape for each in tensors))


def _hide_tensors(first: Any, other: Any) -> bool:
    """Return whether arguments of microbatches differ in more than tensors."""
    pairs = zip(_flat(first), _flat(other), strict=True)
    return any(one is not two and not isinstance(one, tf.Tensor) for one, two in pairs)


def _lines(found: Trace) -> list[str]:
    """Return a line for each operation, equal for two traces that differ only in captured tensors."""
    contents, ops = OpFingerprints(found.graph), found.graph.get_operations()
    numbers = {op.name: number for number, op in enumerate(ops)}

    def line(op: tf.Operation) -> str:
        takes = ", ".join(f"%{numbers[each.op.name]}:{each.value_index}" for each in op.inputs)
        makes = ", ".join(f"{each.dtype.name}{each.shape}" for each in op.outputs)
        return f"{op.type}{contents.of(op)}({takes}) -> {makes}"

    return [line(op) for op in ops]


def _refused(_: Callable[..., Any], **options: Any) -> NoReturn:
    """Raise an error for a new variable, as a ``tf.function`` does: each trace would have its own variables."""
    raise ValueError(
        f"a `smp.step` function creates the variable `{options.get('name') or 'without a name'}` when it is traced "
        "again: as in a `tf.function`, variables are made in the first call only, or outside"
    )


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if _is_variable(value) else value


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable) or hasattr(value, "assign")


def _refuse_pairs(value: Any) -> None:
    """Reject pairs of gradients and variables: gradients are recognized by their position in a list."""
    if not isinstance(value, tuple | list):
        return
    for each in value:
        if isinstance(value, list) and isinstance(each, tuple) and len(each) == 2 and _is_variable(each[1]):
            raise SMPUsageError(
                "a `smp.step` function returns pairs of gradients and variables: return the gradients alone, as in "
                "`[gradient for gradient, _ in optimizer.compute_gradients(loss, model.trainable_variables)]`"
            )
        _refuse_pairs(each)


@contextmanager
def _tapes_remember() -> Iterator[None]:
    """Return a context in which tapes record which operation's gradient is being computed, as ``tf.gradients`` does."""
    plain = backprop._gradient_function

    @functools.wraps(plain)
    def remembering(op_name: Any, attrs: Any, count: Any, inputs: Any, outputs: Any, *rest: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        op = _made_by(graph, op_name, inputs, outputs) if isinstance(graph, TraceGraph) else None
        if op is not None:
            with graph._original_op(op):
                return plain(op_name, attrs, count, inputs, outputs, *rest)
        return plain(op_name, attrs, count, inputs, outputs, *rest)

    backprop.pywrap_tfe.TFE_Py_RegisterGradientFunction(remembering)
    try:
        yield
    finally:
        backprop.pywrap_tfe.TFE_Py_RegisterGradientFunction(plain)


def _made_by(graph: TraceGraph, op_type: str, inputs: Any, outputs: Any) -> tf.Operation | None:
    """Return the operation of a tape's record, which may omit tensors that the gradient does not need."""
    for each in outputs or ():
        if isinstance(each, tf.Tensor) and getattr(each, "graph", None) is graph:
            return each.op
    for each in inputs or ():
        if isinstance(each, tf.Tensor) and getattr(each, "graph", None) is graph:
            for op in each.consumers():
                if op.type == op_type:
                    return op
    return None
