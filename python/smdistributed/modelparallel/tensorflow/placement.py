"""Which operation of a step is computed where.

- PLACE-1: an operation of the model is on one partition: that of its layer, or of its ``smp.partition``.
- PLACE-2: without one (a layer without variables, an operation between layers, a gradient) it is where the operation
  that it is the gradient of is, else where its last operand is.
- PLACE-3: what has no operand on a partition is *replicated*: every rank computes it that needs it. So is all that
  follows from the model's results, which every rank gets.
- PLACE-4: a variable is where the operations of the model that take it are; all of them are on one partition.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel import partition_file
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES, SMPPartitionError
from smdistributed.modelparallel.tensorflow.tracing import Trace

_log = logging.getLogger("smdistributed.modelparallel")

#: What an operation costs and a transfer takes, roughly: only the proportions count.
_FLOPS_PER_NANOSECOND = 10
_LINK_NANOSECONDS, _LINK_BYTES_PER_NANOSECOND = 10_000, 10

#: Computed wherever needed, as it costs nothing.
FREE = -2
REPLICATED = -1


@dataclass(frozen=True)
class Module:
    """What the core is told of a layer; see ``partition/tree.rs``."""

    path: str
    parent: int | None
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    time: int = 0
    first_run: int | None = None
    follows: int | None = None


@dataclass
class Homes:
    """What was decided when the model was divided.

    Attributes:
        layers: Partitions of layers with variables, by identity.
        paths: The same by path, for people and files.
        variables: Partitions of variables, by the identity of their handles; others are on every rank.
    """

    layers: dict[int, int] = field(default_factory=dict)
    paths: dict[str, int] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)


def operands_of(op: tf.Operation) -> list[tf.Operation]:
    """Operations that come before ``op``: those whose results it takes, and those whose effects it waits for. TensorFlow's
    gradients also wait for what has no effect, to be computed late; segments do that better."""
    effects = [each for each in op.control_inputs if auto_control_deps.op_is_stateful(each)]
    return [tensor.op for tensor in op.inputs] + effects


def handles_of(trace: Trace) -> dict[str, Any]:
    """The handles of variables, by the name of the tensor that stands for them in the graph."""
    return {inner.name: outer for outer, inner in trace.graph.captures if inner.dtype == tf.resource}


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Of a tensor for one microbatch; dimensions that are not known count as one."""
    if tensor.shape.rank is None or not tensor.dtype.size:
        return 0
    return int(np.prod([size or 1 for size in tensor.shape], dtype=np.int64)) * tensor.dtype.size


def _flops(op: tf.Operation) -> int:
    elems = sum(tensor_bytes(each) // max(1, each.dtype.size) for each in op.outputs)
    if op.type in ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        shape = op.inputs[-1].shape
        if shape.rank:
            # Of weights `[.., in, out]`, each output takes all but the last.
            elems *= 2 * int(np.prod([size or 1 for size in shape[:-1]], dtype=np.int64))
    return elems


def decide(trace: Trace, config: Config) -> Homes:
    """Divides the layers that were called.

    Raises:
        SMPPartitionError: they cannot be divided so.
    """
    homes = Homes()
    if config.partitions == 1:
        homes.paths = dict.fromkeys(_own_variables(trace), 0)
    elif config.load_partition and config.partition_file:
        homes.paths = partition_file.read(config.partition_file, config.partitions)
        unknown = sorted(set(homes.paths) - set(trace.paths))
        if unknown:
            raise SMPPartitionError(
                f"`{config.partition_file}` names layers that the model does not have: {', '.join(unknown[:5])}"
            )
    elif config.auto_partition:
        homes.paths = _automatic(trace, config)
    else:
        return homes
    if config.partition_file and not config.load_partition:
        partition_file.write(config.partition_file, homes.paths)
    for layer, path in zip(trace.units, trace.paths, strict=True):
        if path in homes.paths:
            homes.layers[id(layer)] = homes.paths[path]
    return homes


def _own_variables(trace: Trace) -> dict[str, dict[str, Any]]:
    """For each layer that takes variables, by path, their handles by name in the graph."""
    handles = handles_of(trace)
    found: dict[str, dict[str, Any]] = {}
    for op in trace.ordered():
        unit = trace.labels[op.name].unit
        if unit is None:
            continue
        taken = {each.name: handles[each.name] for each in op.inputs if each.name in handles}
        if taken and any(not _is_seed(handle) for handle in taken.values()):
            found.setdefault(trace.paths[unit], {}).update(taken)
    return found


def _is_seed(handle: Any) -> bool:
    """Whether a variable is the state of a random generator, which binds a layer to no partition."""
    data = _handle_data(handle)
    return data is not None and data[1].is_integer


def _handle_data(handle: Any) -> tuple[tf.TensorShape, tf.DType] | None:
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    one = data.shape_and_type[0]
    return tf.TensorShape(one.shape), tf.as_dtype(one.dtype)


def variable_bytes(handle: Any) -> int:
    """Of a variable's value."""
    data = _handle_data(handle)
    if data is None or data[0].rank is None:
        return 0
    return int(np.prod([size or 1 for size in data[0]], dtype=np.int64)) * data[1].size


def _automatic(trace: Trace, config: Config) -> dict[str, int]:
    own = _own_variables(trace)
    if not own:
        raise SMPPartitionError("no layer of the model has variables: there is nothing to divide")
    # In the order of first calls.
    paths = [path for path in trace.paths if path in own]
    place = {path: number + 1 for number, path in enumerate(paths)}
    first_of: dict[int, int] = {}
    ties: dict[int, list[int]] = {}
    parameters = dict.fromkeys(place.values(), 0)
    for path in paths:
        for handle in own[path].values():
            first = first_of.setdefault(id(handle), place[path])
            if first == place[path]:
                parameters[first] += variable_bytes(handle)
            else:
                ties.setdefault(id(handle), [first]).append(place[path])
    time, kept, values = dict.fromkeys(place.values(), 0), dict.fromkeys(place.values(), 0), {}
    owner: dict[str, int] = {}
    runs: dict[int, int] = {}
    for number, op in enumerate(trace.ordered()):
        label = trace.labels[op.name]
        if not label.inside:
            continue
        mine = place.get(trace.paths[label.unit], 0) if label.unit is not None else 0
        makers = [owner[each.op.name] for each in op.inputs if each.op.name in owner]
        mine = mine or max(makers, default=0, key=lambda module: runs.get(module, 0))
        if not mine:
            continue
        owner[op.name] = mine
        runs.setdefault(mine, number)
        time[mine] += 3 * _flops(op)
        for each in op.inputs:
            maker = owner.get(each.op.name)
            if maker is not None and maker != mine:
                values.setdefault(each.name, (maker, set(), tensor_bytes(each)))[1].add(mine)
        for each in op.outputs:
            if any(not trace.labels[taker.name].inside for taker in each.consumers()):
                kept[mine] += tensor_bytes(each)
    modules = [Module("", None)]
    for path in paths:
        at = place[path]
        modules.append(
            Module(
                path,
                0,
                parameter_bytes=parameters[at],
                # Its gradient, and what Adam keeps.
                state_bytes=3 * parameters[at],
                activation_bytes=kept[at],
                time=time[at] // _FLOPS_PER_NANOSECOND + 1,
                first_run=runs.get(at),
            )
        )
    with errors.translated(CLASSES):
        assignment, table, _ = _core.partition_modules(
            modules,
            [(maker, sorted(takers), size) for maker, takers, size in values.values()],
            list(ties.values()),
            partitions=config.partitions,
            memory_weight=config.memory_weight,
            microbatches=config.microbatches,
            active_microbatches=config.active_microbatches,
            simple=config.pipeline == "simple",
            link_nanoseconds=_LINK_NANOSECONDS,
            link_bytes_per_nanosecond=_LINK_BYTES_PER_NANOSECOND,
        )
    _log.info("Partition assignments:\n%s", table.rstrip())
    return {path: assignment[place[path]] for path in paths}


class Placement:
    """The place of every operation of a trace: a partition, ``REPLICATED`` or ``FREE``.

    Attributes:
        places: By name of the operation.
        levels: How often the place changed on the longest way to an operation, by its name (see ``layout.py``).
    """

    def __init__(self, trace: Trace, homes: Homes, config: Config) -> None:
        self._trace, self._homes, self._config = trace, homes, config
        self._handles = handles_of(trace)
        self._ops = trace.ordered()
        self._calls: dict[int, list[tf.Operation]] = {}
        self._call_places: dict[int, int] = {}
        for op in self._ops:
            label = trace.labels[op.name]
            if label.call >= 0:
                self._calls.setdefault(label.call, []).append(op)
        self._given_later = _given_later(trace)
        self.places: dict[str, int] = {}
        self.levels: dict[str, int] = {}
        # Before anything that comes first in the script but outside of the model, such as a penalty on variables.
        for op in self._ops:
            explicit = self._explicit(trace.labels[op.name])
            if explicit is not None:
                self._settle_variables(op, explicit)
        for op in self._ops:
            self._place(op)

    def is_forward(self, op: tf.Operation) -> bool:
        """Whether it is a part of the model's call, on one partition."""
        inside = self._trace.labels[op.name].inside or op.name in self._given_later
        return inside and self.places[op.name] >= 0

    def _place(self, op: tf.Operation) -> None:
        place = self._chosen(op)
        self.places[op.name] = place
        if place >= 0:
            self._settle_variables(op, place)
        forward = self.is_forward(op)
        level = 0
        for each in operands_of(op):
            before, theirs = self.places[each.name], self.levels[each.name]
            if before >= 0 and (before != place or (forward and not self.is_forward(each))):
                theirs += 1
            level = max(level, theirs)
        self.levels[op.name] = level

    def _chosen(self, op: tf.Operation) -> int:
        label = self._trace.labels[op.name]
        if op.type == "Const":
            return FREE
        if op.type == "Placeholder" or label.output:
            return REPLICATED
        explicit = self._explicit(label)
        if explicit is not None:
            return explicit
        home = self._home_of_inputs(op)
        if home is not None:
            return home
        if label.inside and label.call >= 0:
            if label.call not in self._call_places:
                operands = [
                    tensor.op
                    for each in self._calls[label.call]
                    for tensor in each.inputs
                    if tensor.op.name in self.places
                ]
                self._call_places[label.call] = self._last(operands)
            return self._call_places[label.call]
        if self._assigns_replicated(op):
            return REPLICATED
        origin = op._original_op
        while origin is not None:
            if self.places.get(origin.name, REPLICATED) >= 0:
                return self.places[origin.name]
            origin = origin._original_op
        operands = [tensor.op for tensor in op.inputs]
        made_inside = [each for each in operands if self.is_forward(each)]
        return self._last(made_inside if not label.inside and made_inside else operands)

    def _explicit(self, label: Any) -> int | None:
        if not label.inside:
            return None
        if not self._config.auto_partition and not self._config.load_partition:
            return label.partition if label.partition is not None else self._config.default_partition
        return self._homes.layers.get(id(self._trace.units[label.unit])) if label.unit is not None else None

    def _home_of_inputs(self, op: tf.Operation) -> int | None:
        homes = self._homes.variables
        for each in op.inputs:
            handle = self._handles.get(each.name)
            if handle is not None and id(handle) in homes:
                return homes[id(handle)]
        return None

    def _assigns_replicated(self, op: tf.Operation) -> bool:
        """Whether it changes a variable that every rank has: a metric's."""
        return op.type.startswith(("Assign", "ResourceScatter")) and self._home_of_inputs(op) is None

    def _last(self, operands: list[tf.Operation]) -> int:
        located = [each for each in operands if self.places[each.name] >= 0]
        return self.places[max(located, key=lambda each: self.levels[each.name]).name] if located else REPLICATED

    def _settle_variables(self, op: tf.Operation, place: int) -> None:
        for each in op.inputs:
            handle = self._handles.get(each.name)
            if handle is None:
                continue
            home = self._homes.variables.setdefault(id(handle), place)
            if home != place:
                raise SMPPartitionError(
                    f"a variable of shape {_shape_text(handle)} is taken on partition {home} and by `{op.name}` on partition "
                    f"{place}: layers and operations that share a variable go to one partition"
                )


def _given_later(trace: Trace) -> set[str]:
    """Operations that were made outside of the model for operations of it that were there before: the gradient of a loop
    has the loop keep what it needs, in lists that it gives it. They are computed with the loop."""
    numbers = {op.name: number for number, op in enumerate(trace.graph.get_operations())}
    found: set[str] = set()
    for op in reversed(trace.ordered()):
        if trace.labels[op.name].inside or op.type == "Placeholder":
            continue
        for taker in (each for tensor in op.outputs for each in tensor.consumers()):
            earlier = trace.labels[taker.name].inside and numbers[taker.name] < numbers[op.name]
            if earlier or taker.name in found:
                found.add(op.name)
    return found


def _shape_text(handle: Any) -> str:
    data = _handle_data(handle)
    return str(tuple(data[0])) if data is not None and data[0].rank is not None else "unknown"
