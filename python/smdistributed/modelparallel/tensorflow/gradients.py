"""Gradients in a step: the functions that scripts call, and the detection of gradients among a body's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.reduction import name_of, reduce_gradients
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow.output import origins_of
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.runtime import agreement
from smdistributed.modelparallel.tensorflow.state import state
from smdistributed.modelparallel.tensorflow.tracing.gradient_tracking import GradientTracker, can_be_gradient


def get_gradients(loss: tf.Tensor, params: Any) -> list[Any]:
    """Return the gradients of ``loss`` with respect to ``params``; ``None`` where it does not depend on one."""
    return tf.gradients(loss, [underlying(variable) for variable in tf.nest.flatten(params)])


def compute_gradients(loss: Any, var_list: Any = None, grad_loss: Any = None) -> list[tuple[Any, Any]]:
    """Return pairs of gradients and variables."""
    if var_list is None:
        if state.model is None:
            raise SMPUsageError("`compute_gradients` needs `var_list`: there is no `smp.DistributedModel`")
        var_list = state.model.trainable_variables
    variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
    loss = loss() if callable(loss) else loss
    found = tf.gradients(loss, [underlying(variable) for variable in variables], grad_ys=grad_loss)
    return list(zip(found, variables, strict=True))


def starts_with_gradients(values: Any, variables: Sequence[Any], gradient_tracker: GradientTracker) -> bool:
    """Return whether ``values`` begins with the gradients of the model.

    That is a list or tuple with one entry for each trainable variable, of the variable's shape and type, derived from
    its gradient, or ``None``. Gradients of variables outside of the model may follow.
    """
    if type(values) not in (list, tuple) or len(values) < len(variables):
        return False
    found = zip(values, variables)  # noqa: B905 - more may follow
    pairs = [(value, variable) for value, variable in found if value is not None]
    return (
        bool(pairs)
        and all(can_be_gradient(value, variable) for value, variable in pairs)
        and all(id(handle_of(variable)) in gradient_tracker.variables_of(value) for value, variable in pairs)
    )


def between_replicas(everywhere: Sequence[tuple[Any, Any]]) -> agreement.Comparison:
    """Return the comparison of the gradients that replicas of the model reduce.

    Without it, replicas that pass different gradients to a reducer would wait forever.

    Args:
        everywhere: Gradients of a microbatch with their variables, of all partitions; empty if the body computes
        gradients without returning them, which other replicas might do.
    """
    groups = state.groups
    assert groups.dp_group is not None, "one replica has nothing to reduce"
    lines = [
        f"{'no gradient' if value is None else f'a gradient {value.dtype.name}{list(variable.shape)}'} of "
        f"{name_of(variable)}"
        for value, variable in everywhere
    ]
    differ = "the replicas of this partition reduce different gradients"
    names = [f"rank {rank}" for rank in groups.members["dp"]]
    return agreement.Comparison(lines, groups.dp_group, CommGroup.DP_GROUP, differ, names)


def over_replicas(sums: Sequence[Any], variables: Sequence[Any], compared: tf.Operation | None) -> list[Any]:
    """Average gradients over the replicas of the model in a step's graph, each as soon as it is computed.

    Args:
        sums: This rank's gradients, which may contain ``None``; slices become dense.
        variables: Their variables.
        compared: The operation after which all replicas are known to have these gradients; see
        :func:`between_replicas`.
    """
    group = state.groups.dp_group
    assert group is not None, "one replica has nothing to reduce"
    with tf.control_dependencies([] if compared is None else [compared]):
        return reduce_gradients(sums, variables, group=group)


def clip_by_global_norm(gradients: Sequence[Any], clip_norm: Any) -> tuple[list[Any], tf.Tensor]:
    """Clip gradients as ``tf.clip_by_global_norm``, by the norm of the gradients of all partitions.

    All ranks call it, outside of steps.

    Args:
        gradients: This rank's gradients, which may contain ``None``. Gradients that all partitions have count once.
        clip_norm: The largest norm that is not clipped.

    Returns:
        The clipped gradients, and the norm over all partitions.
    """
    gradients = list(gradients)
    here = state.model.trainable_variables if state.model is not None else []
    known = here if len(here) == len(gradients) else [None] * len(gradients)
    return clip(gradients, [_is_counted(*each) for each in zip(gradients, known, strict=True)], clip_norm)


def clip(gradients: Sequence[Any], counted: Sequence[bool], clip_norm: Any) -> tuple[list[Any], tf.Tensor]:
    """Clip as :func:`clip_by_global_norm`; ``counted`` says which gradients this partition counts."""
    present = [gradient for gradient in gradients if gradient is not None]
    ours = [gradient for gradient, counts in zip(gradients, counted, strict=True) if counts and gradient is not None]
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in ours]
    squares = [tf.reduce_sum(tf.square(tf.cast(value, tf.float64))) for value in values]
    total = tf.add_n(squares) if squares else tf.zeros([], tf.float64)
    if state.groups.pp_group is not None:
        total = core_ops.smd_all_reduce(tensor=total, op="sum", group=state.groups.pp_group)
    norm = tf.sqrt(total)
    scale = tf.cast(clip_norm, tf.float64) / tf.maximum(norm, tf.cast(clip_norm, tf.float64))

    def clipped(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(clipped(value.values), value.indices, value.dense_shape)
        return value * tf.cast(scale, value.dtype)

    return [clipped(gradient) for gradient in gradients], tf.cast(norm, present[0].dtype if present else tf.float32)


def is_counted(variable: Any) -> bool:
    """Return whether this rank counts a variable; the first partition counts those that all partitions have."""
    model, rank = state.model, state.groups.rank_in("pp")
    return (
        rank == 0
        or model is None
        or not model.is_partitioned
        or id(handle_of(variable)) in model._smp_assignment.variables
    )


def _is_counted(gradient: Any, variable: Any) -> bool:
    """Return whether this rank counts a gradient, as :func:`is_counted`.

    ``variable`` is the variable that the gradient may belong to, if known.
    """
    origins = set() if gradient is None else origins_of(gradient)
    if origins:
        return state.groups.rank_in("pp") == 0 or any(origin.partition is not None for origin in origins)
    return variable is None or is_counted(variable)
