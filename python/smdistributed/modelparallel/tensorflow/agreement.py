"""Whether ranks run the same step, asked in its graph."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import SMPMismatchError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication


def compare(lines: Sequence[str], group: int, kind: CommGroup, differ: str, names: Sequence[str]) -> tf.Operation:
    """An operation that fails unless all ranks of a group have the same lines.

    Args:
        lines: This rank's.
        group: The core's number of the group.
        kind: Which group that is.
        differ: What is wrong then.
        names: What ranks are called, in the group's order.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    everybody = core_ops.smd_all_gather(tensor=tf.constant([digest], tf.int64), group=group).output
    is_other = tf.reduce_any(everybody != tf.constant(digest, tf.int64))

    def tell(_: Any) -> int:
        story = communication.allgather(list(lines), kind)
        raise SMPMismatchError(f"{differ}: {_difference(story, names)} [smd:mismatch]")

    def fail() -> tf.Tensor:
        return tf.numpy_function(tell, [everybody], tf.int64)

    return tf.cond(is_other, fail, lambda: tf.constant(0, tf.int64)).op


def _difference(story: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """What the ranks have at the first place where they differ."""
    first = story[0]
    for name, other in zip(names, story, strict=True):
        for place in range(max(len(first), len(other))):
            ours = first[place] if place < len(first) else "nothing"
            theirs = other[place] if place < len(other) else "nothing"
            if ours != theirs:
                return f"{names[0]} has `{ours}` where {name} has `{theirs}`"
    return "what they have looks alike"
