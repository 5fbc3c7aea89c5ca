"""Whether ranks run the same step, asked in its graph, and, before it divides the model, when it is traced."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from smdistributed import _core
from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import SMPMismatchError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication

if TYPE_CHECKING:
    from smdistributed.modelparallel.tensorflow.attempt import Attempt
    from smdistributed.modelparallel.tensorflow.job import TensorFlowGroups

#: Begins the only line of a rank that could not trace its step.
_FAILURE = "failed: "
_HOST = "/device:CPU:0"
#: What a rank has in the place of a digest that could not trace its step.
_FAILED = -1
#: How long it waits for the others to ask: they may be elsewhere, and wait for this rank.
_SECONDS = 10.0


def compare(
    lines: Sequence[str],
    group: int,
    kind: CommGroup,
    differ: str,
    names: Sequence[str],
    attempt: Attempt | None = None,
) -> tf.Operation:
    """An operation that fails unless all ranks of a group have the same lines.

    Args:
        lines: This rank's.
        group: The core's number of the group.
        kind: Which group that is.
        differ: What is wrong then.
        names: What ranks are called, in the group's order.
        attempt: The step that none of them runs then.
    """
    digest = _digest(lines)
    # On a GPU, the first operation of a group loads kernels, which waits for the ones that run, and a partition's first message
    # may run already until the next one, which compares first, takes it.
    with tf.device(_HOST):
        everybody = core_ops.smd_all_gather(tensor=tf.constant([digest], tf.int64), group=group).output
        is_other = tf.reduce_any(everybody != tf.constant(digest, tf.int64))

    def tell(_: Any) -> NoReturn:
        raise SMPMismatchError(f"{_told(lines, kind, differ, names)} [smd:mismatch]")

    def fail() -> tf.Tensor:
        with tf.control_dependencies([] if attempt is None else [attempt.excuse()]):
            return tf.numpy_function(tell, [everybody], tf.int64)

    with tf.device(_HOST):
        return tf.cond(is_other, fail, lambda: tf.constant(0, tf.int64)).op


def compare_now(lines: Sequence[str], group: int, kind: CommGroup, differ: str, names: Sequence[str]) -> None:
    """As :func:`compare`, at once.

    Raises:
        SMPMismatchError: another rank has other lines, or none, on all of them.
    """
    digest = _digest(lines)
    if any(each != digest for each in _gather(digest, group)):
        raise SMPMismatchError(_told(lines, kind, differ, names))


def of_pipeline(groups: TensorFlowGroups) -> tuple[int, CommGroup, str, list[str]]:
    """With whom partitions compare their steps, and what is said of it."""
    names = [f"partition {place}" for place in range(len(groups.members["pp"]))]
    return groups.pipe, CommGroup.PP_GROUP, "the ranks of this pipeline run different steps", names


def tell_failure(text: str, groups: TensorFlowGroups) -> None:
    """Takes part in the comparison of a step that this rank could not trace, so that the others hear why: within ten seconds, or whenever
    they ask; see :func:`wait_until_told`."""
    group, kind, *_ = of_pipeline(groups)

    def take_part() -> None:
        with contextlib.suppress(Exception):
            # Whoever has departed will not be told.
            if all(each == _FAILED for each in _gather(_FAILED, group)):
                return
            communication.allgather([_FAILURE + text], kind)
            if groups.data is not None:
                # The replicas wait for this partition's gradients.
                _core.report_failure(text)

    groups.telling = threading.Thread(target=take_part, name="smp-failure", daemon=True)
    groups.telling.start()
    groups.telling.join(_SECONDS)


def wait_until_told(groups: TensorFlowGroups) -> None:
    """Another step begins: it is compared after one that this rank could not trace, of which the others may not have heard yet."""
    if groups.telling is not None:
        groups.telling.join()
        groups.telling = None


def _digest(lines: Sequence[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())


def _gather(digest: int, group: int) -> list[int]:
    with tf.init_scope(), tf.device(_HOST):
        return (
            call(core_ops.smd_all_gather, tensor=tf.constant([digest], tf.int64), group=group).output.numpy().tolist()
        )


def _told(lines: Sequence[str], kind: CommGroup, differ: str, names: Sequence[str]) -> str:
    """What is wrong, by what all ranks have; all of them ask."""
    story = communication.allgather(list(lines), kind)
    for name, theirs in zip(names, story, strict=True):
        if len(theirs) == 1 and theirs[0].startswith(_FAILURE):
            return f"{name} could not trace a step that others run: {theirs[0].removeprefix(_FAILURE)}"
    return f"{differ}: {_difference(story, names)}"


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
