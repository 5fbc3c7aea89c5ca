"""Gradients in a step: the calls that the original's scripts use, and which of what a body returns are gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.reduction import name_of, reduce_gradients
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import agreement
from smdistributed.modelparallel.tensorflow.delayed import handle_of
from smdistributed.modelparallel.tensorflow.derivatives import Derivatives, fits
from smdistributed.modelparallel.tensorflow.state import state


def get_gradients(loss: tf.Tensor, params: Any) -> list[Any]:
    """The gradients of ``loss`` with respect to ``params``; ``None`` for those that it does not depend on."""
    return tf.gradients(loss, [underlying(variable) for variable in tf.nest.flatten(params)])


def compute_gradients(loss: Any, var_list: Any = None, grad_loss: Any = None) -> list[tuple[Any, Any]]:
    """Pairs of gradients and variables."""
    if var_list is None:
        if state.model is None:
            raise SMPUsageError("`compute_gradients` needs `var_list`: there is no `smp.DistributedModel`")
        var_list = state.model.trainable_variables
    variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
    loss = loss() if callable(loss) else loss
    found = tf.gradients(loss, [underlying(variable) for variable in variables], grad_ys=grad_loss)
    return list(zip(found, variables, strict=True))


def are_gradients(values: Any, variables: Sequence[Any], derivatives: Derivatives) -> bool:
    """Whether a part of what a body returns is the gradients of the model: a list or tuple with one for each of its
    trainable variables, of its shape and type, that comes from the variable's gradient, or ``None``."""
    if type(values) not in (list, tuple) or len(values) != len(variables):
        return False
    pairs = [(value, variable) for value, variable in zip(values, variables, strict=True) if value is not None]
    return (
        bool(pairs)
        and all(fits(value, variable) for value, variable in pairs)
        and all(id(handle_of(variable)) in derivatives.variables_of(value) for value, variable in pairs)
    )


def over_replicas(sums: Sequence[Any], variables: Sequence[Any], everywhere: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The means over the replicas of the model, in the graph of a step: each starts on its way when it is there.

    What a reducer does with gradients has no end if its ranks give it different ones, so they are compared when the step
    begins, while the pipeline runs.

    Args:
        sums: This rank's gradients, ``None`` among them or not; slices become dense.
        variables: What they are gradients of.
        everywhere: A microbatch's gradient and its variable, those of all partitions; none if a body computes gradients and does not
            return them, which another replica may do.
    """
    groups = state.groups
    lines = [
        f"{'no gradient' if value is None else f'a gradient {value.dtype.name}{list(variable.shape)}'} of "
        f"{name_of(variable)}"
        for value, variable in everywhere
    ]
    differ = "the replicas of this partition reduce different gradients"
    names = [f"rank {rank}" for rank in groups.members["dp"]]
    told = agreement.compare(lines, groups.data, CommGroup.DP_GROUP, differ, names)
    with tf.control_dependencies([told]):
        return reduce_gradients(sums, variables, group=groups.data)


def clip_by_global_norm(gradients: Sequence[Any], clip_norm: Any) -> tuple[list[Any], tf.Tensor]:
    """As ``tf.clip_by_global_norm``, by the norm of the gradients of all partitions. All ranks call it, outside of steps.

    Args:
        gradients: This rank's, ``None`` among them or not.
        clip_norm: The largest norm that is left as it is.

    Returns:
        The clipped gradients, and the norm over all partitions.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in present]
    squares = [tf.reduce_sum(tf.square(tf.cast(value, tf.float64))) for value in values]
    total = tf.add_n(squares) if squares else tf.zeros([], tf.float64)
    if state.groups.pipe is not None:
        total = core_ops.smd_all_reduce(tensor=total, op="sum", group=state.groups.pipe)
    norm = tf.sqrt(total)
    scale = tf.cast(clip_norm, tf.float64) / tf.maximum(norm, tf.cast(clip_norm, tf.float64))

    def clipped(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(clipped(value.values), value.indices, value.dense_shape)
        return value * tf.cast(scale, value.dtype)

    return [clipped(gradient) for gradient in gradients], tf.cast(norm, present[0].dtype if present else tf.float32)
