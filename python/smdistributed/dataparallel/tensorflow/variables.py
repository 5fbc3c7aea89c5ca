"""Variables that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import broadcast


def broadcast_variables(variables: Iterable[tf.Variable], root_rank: int) -> None:
    """Assigns the values of rank ``root_rank`` to variables on all ranks.

    Args:
        variables: The same on all ranks, in the same order.
        root_rank: Whose values.
    """
    for variable in variables:
        variable.assign(broadcast(variable, root_rank))
