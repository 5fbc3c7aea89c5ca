"""Describes a traced step to the core, which places its operations and cuts them into segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from smdistributed import _core
from smdistributed.modelparallel.tensorflow.tracing.fingerprints import OpFingerprints
from smdistributed.modelparallel.tensorflow.tracing.recording import Trace

#: A result of an operation: the operation's number, and the index of the result.
Output = tuple[int, int]

#: Stateful operations without an effect if their result is unused.
_ONLY_ASKED_FOR = {
    "Placeholder",
    "ReadVariableOp",
    "ResourceGather",
    "VarHandleOp",
    "VarIsInitializedOp",
    "VariableShape",
}
_COPIES = {"Identity", "IdentityN"}
_LOOPS = ("While", "StatelessWhile")
_PRODUCTS = ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative")


class Operation(NamedTuple):
    """An operation; the core's ``Operation`` documents the attributes."""

    name: str
    kind: str
    role: str
    inputs: list[Output]
    control_inputs: list[int]
    outputs: list[tuple[str, int, str | None]]
    variables: list[int]
    in_model: bool
    layer: tuple[int, int] | None
    requested: int | None
    gradient_of: list[int]
    created: int
    has_effect: bool
    assigns: bool
    flops: int


class Operations:
    """The operations of a trace, and the variables that they use.

    Attributes:
        ops: The operations in topological order, which is their numbering.
        handles: Handles of the variables.
        core: The core's object of the operations.
    """

    def __init__(self, trace: Trace) -> None:
        self.ops = trace.ordered()
        self._numbers = {op.name: number for number, op in enumerate(self.ops)}
        # By the name of the tensor that represents a handle in the graph.
        inner = {inside.name: outside for outside, inside in trace.graph.captures if inside.dtype == tf.resource}
        distinct = {id(handle): handle for handle in inner.values()}
        self.handles = list(distinct.values())
        numbers = {key: number for number, key in enumerate(distinct)}
        self._variables = {name: numbers[id(handle)] for name, handle in inner.items()}
        created = {op.name: number for number, op in enumerate(trace.graph.get_operations())}
        self._fingerprints = OpFingerprints(trace.graph)
        self._graph = trace.graph
        # For each function by name, whether it draws random numbers.
        self._drawing: dict[str, bool] = {}
        self._of_model = _follows_model(self.ops, trace)
        rows = [self._row(op, trace.labels[op.name], created[op.name]) for op in self.ops]
        self.core = _core.StepOperations(rows, [_variable(handle) for handle in self.handles])

    def output(self, tensor: tf.Tensor) -> Output:
        """Return the core's identifier of a tensor."""
        return self._numbers[tensor.op.name], tensor.value_index

    def tensors(self, outputs: Iterable[Output]) -> list[tf.Tensor]:
        """Return the tensors of the core's identifiers."""
        return [self.ops[number].outputs[index] for number, index in outputs]

    def _row(self, op: tf.Operation, label: Any, created: int) -> Operation:
        control_inputs = sorted({self._numbers[each.name] for each in waited_for(op)})
        variables = [self._variables[each.name] for each in op.inputs if each.name in self._variables]
        # Random operations of the body before the model's call must run on the same rank as those of the model;
        # otherwise the ranks' generators would draw different numbers.
        draws = self._draws(op.node_def) and (label.inside or op.name not in self._of_model)
        return Operation(
            op.name,
            op.type + self._fingerprints.of(op),
            _role(op, label.output),
            [self.output(tensor) for tensor in op.inputs],
            control_inputs,
            [_makes(tensor) for tensor in op.outputs],
            variables,
            label.inside or draws,
            None if label.unit is None else (label.unit, label.call),
            label.partition,
            [self._numbers[each.name] for each in _origins(op) if each.name in self._numbers],
            created,
            has_effect(op) or draws,
            bool(variables) and any(each.name in self._variables for each in get_read_write_resource_inputs(op)[1]),
            _flops(op),
        )

    def _draws(self, node: Any) -> bool:
        """Return whether an operation draws new random numbers each time, also in a branch, a loop or a call."""
        if node.op in auto_control_deps.LEGACY_RANDOM_OPS or node.op == "RngReadAndSkip":
            return True
        if node.op.startswith("Stateful") and node.op != "StatefulPartitionedCall":
            return True
        return any(self._function_draws(name) for name in _functions(node))

    def _function_draws(self, name: str) -> bool:
        if name not in self._drawing:
            # The gradient of a call refers to the call.
            self._drawing[name] = False
            function = self._graph._get_function(name)
            nodes = [] if function is None else function.cached_definition.node_def
            self._drawing[name] = any(map(self._draws, nodes))
        return self._drawing[name]


def has_effect(op: tf.Operation) -> bool:
    """Return whether an operation has an effect besides its results."""
    return auto_control_deps.op_is_stateful(op) and op.type not in _ONLY_ASKED_FOR


def _follows_model(ops: Sequence[tf.Operation], trace: Trace) -> set[str]:
    """Return the names of the model's operations and of those that use their results."""
    found: set[str] = set()
    for op in ops:
        label = trace.labels[op.name]
        if label.inside or label.output or any(each.op.name in found for each in op.inputs):
            found.add(op.name)
    return found


def waited_for(op: tf.Operation) -> list[tf.Operation]:
    """Return the operations with effects that ``op`` waits for.

    TensorFlow's gradients also wait for operations without effects, to be computed late; segments achieve that
    anyway. An operation without effects may represent others: ``tf.group`` its control inputs, and an identity the
    operation whose result it copies, as in assertions, branches and loops.
    """
    found, pending, seen = [], list(op.control_inputs), set()
    while pending:
        other = pending.pop()
        if other.name in seen:
            continue
        seen.add(other.name)
        if auto_control_deps.op_is_stateful(other):
            found.append(other)
        else:
            pending += other.control_inputs
            if other.type in _COPIES:
                pending += [tensor.op for tensor in other.inputs]
    return found


def _role(op: tf.Operation, is_model_result: bool) -> str:
    if op.type == "Const":
        return "constant"
    if op.type == "Placeholder":
        return "input"
    return "model_result" if is_model_result else "computes"


def _origins(op: tf.Operation) -> list[tf.Operation]:
    found = []
    while op._original_op is not None:
        op = op._original_op
        found.append(op)
    return found


def _makes(tensor: tf.Tensor) -> tuple[str, int, str | None]:
    stays = None
    if tensor.shape.rank is None:
        stays = "of unknown rank"
    elif tensor.dtype in (tf.resource, tf.variant, tf.string):
        stays = f"of type {tensor.dtype.name}"
    sizes = "?" if tensor.shape.rank is None else ",".join(str(size or "?") for size in tensor.shape)
    return f"{tensor.dtype.name}[{sizes}]", _elems(tensor.shape) * tensor.dtype.size, stays


def _elems(shape: Sequence[int | None] | tf.TensorShape) -> int:
    """Return the number of elements; unknown dimensions count as one."""
    if isinstance(shape, tf.TensorShape) and shape.rank is None:
        return 0
    return int(np.prod([size or 1 for size in shape], dtype=np.int64))


def _flops(op: tf.Operation) -> int:
    branches = [_flops_of_function(op, name) for name in _functions(op.node_def)]
    if op.type in _LOOPS:
        # An unknown dimension counts as one.
        most = tf.get_static_value(op.inputs[1])
        return sum(branches) * max(1, int(most) if np.size(most) == 1 and most is not None else 1)
    if branches:
        return max(branches)
    elems = sum(_elems(tensor.shape) for tensor in op.outputs if tensor.dtype.size)
    if op.type in _PRODUCTS and op.inputs[-1].shape.rank:
        # With weights `[.., in, out]`, each output element uses all dimensions but the last.
        elems *= 2 * _elems(op.inputs[-1].shape[:-1])
    return elems


def _functions(node: Any) -> list[str]:
    """Return the functions of a call, a branch or a loop."""
    kinds = list(node.attr.values())
    functions = [value.func.name for value in kinds if value.WhichOneof("value") == "func"]
    return functions + [each.name for value in kinds for each in value.list.func]


def _flops_of_function(op: tf.Operation, name: str) -> int:
    function = op.graph._get_function(name)
    return 0 if function is None else sum(map(_flops, function.graph.get_operations()))


def _variable(handle: Any) -> tuple[str, int, bool]:
    """Return a variable's shape, its bytes, and whether it is more than the state of a random generator."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return "unknown", 0, True
    shape, dtype = tf.TensorShape(data.shape_and_type[0].shape), tf.as_dtype(data.shape_and_type[0].dtype)
    text = "unknown" if shape.rank is None else str(tuple(shape))
    return text, _elems(shape) * dtype.size, not dtype.is_integer
