"""The reduction of a step's gradients: what the tape and the optimizers share.

Each gradient is passed to a reducer of the core by an operation of its own as soon as it is computed. The core
reduces gradients bucket by bucket while the rest of backward runs. The reducer is found by the gradients' properties
and their place in the graph, so that a function that is traced again uses the same one.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.bucket_size import bucket_bytes
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name
from smdistributed.dataparallel.tensorflow.collectives import call, ops
from smdistributed.dataparallel.tensorflow.compression import (
    BF16Compression,
    Compression,
    FP16Compression,
    NoneCompression,
)
from smdistributed.dataparallel.tensorflow.keras_variable import underlying

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# Compressions that the core performs itself, and the types in which gradients are then reduced.
_WIRES: dict[type, str | None] = {NoneCompression: None, FP16Compression: "float16", BF16Compression: "bfloat16"}

# Each graph has a number; 0 is for operations outside of graphs.
_graphs: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
# Reducer specifications outside of graphs, by their content; steps run one after the other there.
_eager_plans: dict[Any, int] = {}
# The reduction and the group of each specification, for the gradient of the operation.
_ways_of_plans: dict[int, tuple[str, int]] = {}

# The suffixes with which TensorFlow and Keras make names unique.
_COUNT = re.compile(r"_\d+(?=[/:]|$)")


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    *,
    compression: Any = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    sparse_as_dense: bool = True,
    bucket_cap_mb: float | None = 25,
    name: str | None = None,
    group: int = 0,
) -> list[Gradient]:
    """Reduce the gradients of one step over the ranks.

    Args:
        gradients: One for each variable: a tensor, ``tf.IndexedSlices``, or ``None``. All ranks have the same kinds,
            shapes and types.
        variables: The variables of the gradients, in the same order.
        compression: A member of ``Compression``.
        op: ``AVERAGE``, which ``None`` means too, or ``SUM``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense first; otherwise the ranks' slices are gathered.
        bucket_cap_mb: Most MiB of gradients that are reduced together.
        name: A prefix for the operations in a graph.
        group: The core's number of the group of ranks that take part; 0 for all.

    Returns:
        The reduced gradients, in the same order; ``None`` stays ``None``.

    Raises:
        ValueError: ``op`` or ``bucket_cap_mb`` is none of those.
    """
    check_options(op, bucket_cap_mb)
    if len(gradients) != len(variables):
        raise ValueError(
            f"got {len(gradients)} gradients for {len(variables)} variables: expected one for each variable"
        )
    op = op or ReduceOp.AVERAGE
    names = [f"{name_of(variable)} (number {index})" for index, variable in enumerate(variables)]
    reduced: list[Gradient] = list(gradients)
    # By device, because a reducer's gradients are on one device. Without GPUs there is only one.
    planned: dict[str | None, list[tuple[int, tf.Tensor, Any]]] = {}
    graph = not tf.executing_eagerly()
    has_gpus = bool(tf.config.list_logical_devices("GPU"))
    last: list[tf.Tensor] = []
    unknown: list[str] = []
    with tf.name_scope(name or "smd_reduce_gradients"):
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                if not sparse_as_dense:
                    # One after the other, which needs control dependencies in a graph.
                    with tf.control_dependencies(last if graph else []):
                        gathered = _gather(gradient, op, graph, group)
                    reduced[index], last = gathered, [gathered.values]
                    continue
                gradient = tf.convert_to_tensor(gradient)
            if not gradient.shape.is_fully_defined():
                # Slices that became dense have lost their static shape.
                gradient.set_shape(variables[index].shape)
            sent, ctx = (gradient, None) if compression in _WIRES else compression.compress(gradient)
            if not sent.shape.is_fully_defined():
                # The specification is made when the graph is traced, and needs static shapes.
                unknown.append(names[index])
                summed = call(ops.smd_all_reduce, tensor=sent, op=op.value, group=group)
                reduced[index] = compression.decompress(summed, ctx)
                continue
            place = place_of(variables[index]) if has_gpus else None
            planned.setdefault(place, []).append((index, sent, ctx))
        if unknown:
            _note_unknown_shapes(unknown)
        absent = [names[index] for index, gradient in enumerate(gradients) if gradient is None]
        if absent and len(absent) == len(gradients):
            # Other ranks may have gradients and wait for this rank. It takes part with none, so that all ranks get an
            # error.
            plan = _plan([("nothing", (1,), "float32")], absent, bucket_bytes(bucket_cap_mb), None, op, None, group)
            with tf.device("/device:CPU:0"):
                _reduce([tf.zeros(1)], plan)
        # In the order of each group's first gradient, which is equal on all ranks.
        for place, together in planned.items():
            described = [(names[index], tuple(sent.shape), sent.dtype.name) for index, sent, _ in together]
            plan = _plan(described, absent, bucket_bytes(bucket_cap_mb), _WIRES.get(compression), op, place, group)
            with tf.device(place) if place else contextlib.nullcontext():
                outputs = _reduce([sent for _, sent, _ in together], plan)
            for (index, _, ctx), output in zip(together, outputs, strict=True):
                reduced[index] = output if compression in _WIRES else compression.decompress(output, ctx)
    return reduced


def _note_unknown_shapes(names: list[str]) -> None:
    """Count a function in which gradients are not in buckets, when it is traced; warn of each gradient once."""
    _core.note_fallback("gradients_one_by_one")
    fresh = [name for name in names if name not in _warned_names]
    _warned_names.update(fresh)
    if fresh:
        others = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
        warnings.warn(
            f"the gradient of `{fresh[0]}`{others} is reduced alone instead of in buckets, because its shape is not "
            "known when the function is traced: declare the shape of the variable, or set that of the tensor or of the "
            "compressed gradient with `tf.ensure_shape`",
            stacklevel=3,
        )


_warned_names: set[str] = set()


def check_options(op: ReduceOp | None, bucket_cap_mb: float | None) -> None:
    """Check that gradients can be reduced with these options.

    Args:
        op: The reduction.
        bucket_cap_mb: Size of a bucket in MiB.

    Raises:
        ValueError: ``op`` is neither ``AVERAGE`` nor ``SUM``, or the size is not acceptable.
    """
    if core_name(op, ReduceOp.AVERAGE) not in ("average", "sum"):
        raise ValueError(f"gradients are reduced by ReduceOp.AVERAGE or ReduceOp.SUM, not by {op}")
    bucket_bytes(bucket_cap_mb)


def name_of(variable: Any) -> str:
    """Return a variable's name, without the counts that Keras appends.

    Ranks may have built different numbers of models before this one, so the counts may differ between ranks.

    Args:
        variable: A variable or a tensor.

    Returns:
        The name, which is the same on all ranks.
    """
    name = getattr(variable, "path", None)
    if not name and not isinstance(variable, tf.Tensor):
        name = getattr(variable, "name", None)
    return _COUNT.sub("", (name or "").removesuffix(":0")) or "tensor"


def place_of(variable: Any) -> str:
    """Return the device on which a variable's gradients are reduced, in a process with GPUs.

    Args:
        variable: The variable.

    Returns:
        The device of the variable, such as ``/device:GPU:0``.
    """
    device = tf.DeviceSpec.from_string(getattr(underlying(variable), "device", None) or "")
    if device.device_type is None:
        # For a variable without a device in a graph, TensorFlow would choose the first GPU, too.
        return "/device:GPU:0"
    return f"/device:GPU:{device.device_index or 0}" if device.device_type == "GPU" else "/device:CPU:0"


def _plan(
    described: list[tuple[str, tuple[int, ...], str]],
    absent: list[str],
    cap: int,
    wire: str | None,
    op: ReduceOp,
    place: str | None,
    group: int,
) -> int:
    on_device = place is not None and "GPU" in place
    with errors.translated(CLASSES):
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if graph not in _graphs:
                _graphs[graph] = next(_numbers)
            plan = _core.plan_gradients(
                _graphs[graph], described, absent, cap, wire, op is ReduceOp.SUM, on_device, group
            )
        else:
            key = (tuple(described), tuple(absent), cap, wire, op, place, group)
            plan = _eager_plans.get(key, -1)
            if plan < 0:
                plan = _core.plan_gradients(0, described, absent, cap, wire, op is ReduceOp.SUM, on_device, group)
                _eager_plans[key] = plan
    _ways_of_plans[plan] = op.value, group
    return plan


def _reduce(gradients: list[tf.Tensor], plan: int) -> list[tf.Tensor]:
    everything = list(range(len(gradients)))
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    order = getattr(graph, "experimental_acd_manager", None)
    if graph is None or (order is None and getattr(graph, "_add_control_dependencies", False)):
        return call(ops.smd_reduce_gradients, gradients=gradients, plan=plan, params=everything, whole=True)
    outputs = [
        call(ops.smd_reduce_gradients, gradients=[gradient], plan=plan, params=[index], whole=False)[0]
        for index, gradient in enumerate(gradients)
    ]
    if order is not None:
        for output in outputs:
            # Must run, but without an order: a reduction completes only when the other gradients are there, too.
            order.run_independently(output.op)
        return outputs
    # A session runs only the fetched operations; if one gradient is fetched, all must be computed.
    with tf.control_dependencies(outputs):
        return [tf.identity(output) for output in outputs]


@tf.RegisterGradient("SmdReduceGradients")
def _gradient(op: tf.Operation, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
    how, group = _ways_of_plans[op.get_attr("plan")]
    return [None if each is None else call(ops.smd_all_reduce, tensor=each, op=how, group=group) for each in gradients]


def _gather(slices: tf.IndexedSlices, op: ReduceOp, graph: bool, group: int) -> tf.IndexedSlices:
    """Concatenate the slices of all ranks."""
    indices = call(ops.smd_all_gather, tensor=slices.indices, group=group).output
    with tf.control_dependencies([indices] if graph else []):
        values = call(ops.smd_all_gather, tensor=slices.values, group=group).output
    if op is ReduceOp.AVERAGE:
        values = values / tf.cast(len(_core.group_ranks(group)), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
