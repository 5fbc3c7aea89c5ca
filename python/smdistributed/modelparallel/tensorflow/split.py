"""From the arguments of a step to those of its microbatches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPValidationError


def split(value: Any, name: str, microbatches: int, axis: int, keep: bool, uneven: bool = False) -> list[Any]:
    """``value`` for each microbatch: tensors in it are cut along ``axis`` unless ``keep``.

    Args:
        value: An argument of the step, or a part of one.
        name: For messages.
        microbatches: How many pieces.
        axis: The batch's.
        keep: Whether every microbatch gets the whole.
        uneven: Whether the first pieces may have a row more than the others.

    Raises:
        SMPValidationError: it cannot be cut into equal pieces. Where that shows when the step runs only, TensorFlow's
            `InvalidArgumentError`.
    """
    if keep or value is None:
        return [value] * microbatches
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        if not isinstance(value, tf.Tensor):
            raise SMPValidationError(
                f"`{name}` is a {type(value).__name__}: expected a tensor, or a name in `non_split_inputs`"
            )
        return _pieces(value, name, microbatches, axis, uneven)
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(microbatches, index, axis) for index in range(microbatches)]
    if isinstance(value, dict):
        parts = {key: split(item, f"{name}[{key!r}]", microbatches, axis, False, uneven) for key, item in value.items()}
        rows = [{key: part[index] for key, part in parts.items()} for index in range(microbatches)]
        return rows if type(value) is dict else [_made(type(value), row) for row in rows]
    if isinstance(value, tuple | list):
        items = [split(item, f"{name}[{place}]", microbatches, axis, False, uneven) for place, item in enumerate(value)]
        rows = [[item[index] for item in items] for index in range(microbatches)]
        if hasattr(value, "_fields"):
            return [type(value)(*row) for row in rows]
        return [tuple(row) if isinstance(value, tuple) else row for row in rows]
    if isinstance(value, set | frozenset):
        items = [split(item, name, microbatches, axis, False, uneven) for item in value]
        return [type(value)(item[index] for item in items) for index in range(microbatches)]
    return [value] * microbatches


def _made(kind: type, items: dict[Any, Any]) -> Any:
    try:
        return kind(items)
    except TypeError:
        return items


def _pieces(tensor: tf.Tensor, name: str, microbatches: int, axis: int, uneven: bool) -> list[tf.Tensor]:
    if tensor.shape.rank is None:
        raise SMPValidationError(f"`{name}` has no known number of axes: give it one by `input_signature`")
    if tensor.shape.rank == 0:
        raise SMPValidationError(f"`{name}` has no axis to split: name it in `non_split_inputs`")
    if not -tensor.shape.rank <= axis < tensor.shape.rank:
        raise SMPValidationError(f"`{name}` has {tensor.shape.rank} axes, and its `input_split_axes` is {axis}")
    if microbatches == 1:
        return [tensor]
    size = tensor.shape[axis]
    said = f"along axis {axis}, which {microbatches} microbatches cannot divide evenly"
    if size is not None:
        if size % microbatches:
            if uneven and size > microbatches:
                return tf.split(tensor, [len(range(place, size, microbatches)) for place in range(microbatches)], axis)
            raise SMPValidationError(f"`{name}` has {size} rows {said}")
        return tf.split(tensor, microbatches, axis)
    rows = tf.shape(tensor)[axis]
    check = tf.debugging.Assert(rows % microbatches == 0, [f"`{name}` has", rows, f"rows {said}"])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.split(tf.identity(tensor), microbatches, axis)


def check_names(names: Collection[str], parameters: Collection[str], what: str) -> None:
    """Refuses names that the function does not have."""
    for name in names:
        if name not in parameters:
            raise SMPValidationError(f"`{what}` names `{name}`, which is no parameter of the function")
