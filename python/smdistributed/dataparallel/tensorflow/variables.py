"""Variables that are the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import broadcast, call
from smdistributed.dataparallel.tensorflow.job import size
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.replicas import note_broadcast

#: The calls that make replicas equal, for messages.
BROADCAST = (
    "`sdp.broadcast_variables(model.variables, root_rank=0)` before the first step, or give `fit` the callback "
    "`BroadcastGlobalVariablesCallback(0)`"
)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Iterable[Any], root_rank: int) -> tf.Operation | None:
    """Assign the values of rank ``root_rank`` to variables on all ranks.

    It works in eager mode, in graphs of TF1, and in a ``tf.function``, also under a condition that is the same on all
    ranks.

    Args:
        variables: ``tf.Variable`` and Keras variables, the same on all ranks in the same order; or a single one.
        root_rank: Global rank whose values are sent.

    Returns:
        ``None``; in a graph of TF1, the operation to run.

    Raises:
        TypeError: An object is not a variable, or of a type that cannot be sent.
        ValueError: There is no rank ``root_rank``.

    Examples:
        >>> sdp.broadcast_variables(model.variables, root_rank=0)
        >>> sdp.broadcast_variables(optimizer.variables, root_rank=0)
    """
    _check_root(root_rank)
    note_broadcast()
    if isinstance(underlying(variables), tf.Variable):
        variables = [variables]
    # A variable that is listed twice is sent once.
    distinct = {id(variable): variable for variable in map(_sendable, variables)}
    assignments: list[Any] = []

    def assign() -> None:
        # By name, so in a graph all broadcasts run at the same time, and the core packs the small ones.
        assignments.extend(variable.assign(broadcast(variable, root_rank)) for variable in distinct.values())

    if tf.executing_eagerly() and len(distinct) > 1:
        call(tf.function(assign, autograph=False).get_concrete_function())
        return None
    assign()
    return tf.group(*assignments) if _is_tf1_graph() else None


def broadcast_global_variables(root_rank: int) -> tf.Operation | None:
    """Assign the values of rank ``root_rank`` to all global variables of a TF1 graph on all ranks.

    Args:
        root_rank: Global rank whose values are sent.

    Returns:
        The operation for the session to run. In eager mode and in a ``tf.function``, which have no such collection,
        the function warns and returns ``None``; use :func:`broadcast_variables` there.

    Raises:
        ValueError: There is no rank ``root_rank``.
    """
    _check_root(root_rank)
    if not _is_tf1_graph():
        warnings.warn(
            "there are no global variables in eager mode, so nothing is broadcast: "
            "use `broadcast_variables(model.variables, root_rank)`",
            stacklevel=2,
        )
        return None
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def _is_tf1_graph() -> bool:
    return not tf.executing_eagerly() and not tf.inside_function()


def _check_root(root_rank: int) -> None:
    ranks = size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < ranks:
        raise ValueError(f"`root_rank` is {root_rank!r}: expected a rank, 0 to {ranks - 1}")


def _sendable(variable: Any) -> tf.Variable:
    inner = underlying(variable)
    if not isinstance(inner, tf.Variable):
        raise TypeError(f"{variable!r} is not a variable: expected tf.Variable, or Keras variables that are built")
    if not (inner.dtype.is_numeric or inner.dtype.is_bool):
        raise TypeError(f"variable `{inner.name}` is of {inner.dtype.name}, which cannot be sent")
    return inner
