"""Compares the variables of the ranks in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import replicas
from smdistributed.dataparallel.tensorflow.keras_variable import underlying

# Attribute of the first variable of a list: the session in which its checksum was written.
_MARK = "_smd_told"

note_broadcast = replicas.note_broadcast


@tf.autograph.experimental.do_not_convert
def compare(variables: Sequence[Any], ranks: Sequence[int] | None, remedy: str) -> None:
    """Report a checksum of these variables, the first time in a session.

    The first rank warns in the second step if ranks have other values and nothing was broadcast. The function waits for
    no other rank, and only reads the variables.

    Inside a ``tf.function`` it runs when the function is traced. In a graph of TensorFlow 1, variables have no values
    yet, and the function does nothing.

    Args:
        variables: The variables that are trained.
        ranks: Ranks that reduce the gradients together; ``None`` for all.
        remedy: The call that makes replicas equal.
    """
    own = [inner for inner in map(underlying, variables) if isinstance(inner, tf.Variable)]
    if not own or getattr(own[0], _MARK, None) == _core.session_id():
        return
    ranks = range(_core.size()) if ranks is None else ranks
    setattr(own[0], _MARK, _core.session_id())
    if len(ranks) < 2:
        return
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        try:
            values = [_sample(variable) for variable in own]
        except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
            # Created by the function that is being traced, so it has no value yet.
            return
    described = [(variable.shape.as_list(), variable.dtype.name) for variable in own]
    replicas.report(described, values, ranks, remedy)


def _sample(variable: tf.Variable) -> bytes:
    return tf.reshape(variable.read_value(), [-1])[: replicas.SAMPLE].numpy().tobytes()
