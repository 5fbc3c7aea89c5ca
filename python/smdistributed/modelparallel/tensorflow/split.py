"""Splits a step's arguments into those of its microbatches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel import splitting
from smdistributed.modelparallel.exceptions import SMPValidationError


def split(value: Any, name: str, microbatches: int, axis: int, keep: bool, uneven: bool = False) -> list[Any]:
    """Return ``value`` for each microbatch: tensors in it are split along ``axis`` unless ``keep``.

    Args:
        value: An argument of the step, or a part of one.
        name: Its name in errors.
        microbatches: The number of pieces.
        axis: The batch's axis.
        keep: Whether every microbatch gets the whole value.
        uneven: Whether the first pieces may have one row more than the others.

    Raises:
        SMPValidationError: A tensor cannot be split into equal pieces. Where only the running step shows that,
            TensorFlow raises ``InvalidArgumentError``.
    """

    def split_tensor(item: Any, item_name: str) -> list[Any] | None:
        if not tf.is_tensor(item) or isinstance(item, tf.Variable):
            return None
        if not isinstance(item, tf.Tensor):
            raise SMPValidationError(
                f"`{item_name}` is a {type(item).__name__}: expected a tensor, or a name in `non_split_inputs`"
            )
        return _pieces(item, item_name, microbatches, axis, uneven)

    return splitting.split(value, name, microbatches, axis, keep, split_tensor, _make_sequence)


def _make_sequence(like: Any, items: list[Any]) -> Any:
    """Return a plain list or tuple, because TensorFlow replaces those in attributes of a module by own classes."""
    return tuple(items) if isinstance(like, tuple) else items


def _pieces(tensor: tf.Tensor, name: str, microbatches: int, axis: int, uneven: bool) -> list[tf.Tensor]:
    if tensor.shape.rank is None:
        raise SMPValidationError(f"the number of axes of `{name}` is unknown: set its shape in `input_signature`")
    if tensor.shape.rank == 0:
        raise SMPValidationError(f"`{name}` has no axis to split: name it in `non_split_inputs`")
    if not -tensor.shape.rank <= axis < tensor.shape.rank:
        raise SMPValidationError(f"`{name}` has {tensor.shape.rank} axes, and its `input_split_axes` is {axis}")
    if microbatches == 1:
        return [tensor]
    size = tensor.shape[axis]
    where = f"along axis {axis}, which {microbatches} microbatches cannot divide evenly"
    if size is not None:
        if size % microbatches:
            if uneven and size > microbatches:
                return tf.split(tensor, [len(range(place, size, microbatches)) for place in range(microbatches)], axis)
            raise SMPValidationError(f"`{name}` has {size} rows {where}")
        return tf.split(tensor, microbatches, axis)
    rows = tf.shape(tensor)[axis]
    check = tf.debugging.Assert(rows % microbatches == 0, [f"`{name}` has", rows, f"rows {where}"])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.split(tf.identity(tensor), microbatches, axis)
