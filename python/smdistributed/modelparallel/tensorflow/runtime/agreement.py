"""Whether the ranks of a pipeline do the same: whether they run the same step, asked in its graph, and, before it divides the model, when it is
traced; and whether they run a step at all.

- AGR-1: whatever all ranks of a pipeline wait for each other in begins with a comparison, in one group: steps, batches of ``fit``, checkpoints,
  barriers. So a rank that does something else than the others is no wait without an end but an error on all of them, after which they may go on.
- AGR-2: a rank that leaves what others still do, by an error, takes part in their next comparison with its error.
"""

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
from smdistributed.modelparallel.tensorflow.runtime import object_transport

if TYPE_CHECKING:
    from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
    from smdistributed.modelparallel.tensorflow.runtime.step_scope import Attempt

#: Begins the only line of a rank that could not do what others do, and of one that does something else than a step.
_FAILURE, _ACTIVITY = "failed: ", "does: "
_HOST = "/device:CPU:0"
#: What a rank that failed has in the place of a digest.
_FAILED = -1
#: How long a rank that could not trace its step waits for the others, which may trace theirs.
TRACING_SECONDS = 10.0


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


def take_turn(activity: str, groups: TensorFlowGroups) -> None:
    """Begins what all ranks of the pipeline do together and is no step, such as ``calls `smp.barrier()```.

    Raises:
        SMPMismatchError: another rank does something else, on all of them.
    """
    if groups.pipe is not None:
        wait_until_told(groups)
        compare_now([_ACTIVITY + activity], *of_pipeline(groups))


def tell_failure(what: str, error: str, groups: TensorFlowGroups, seconds: float) -> None:
    """Takes part in the next comparison of the pipeline with an error, so that the others hear of it whenever they ask; see
    :func:`wait_until_told`. Those who have failed, too, hear nothing.

    Args:
        what: This rank did, such as ``left `fit```.
        error: Why, and on which rank.
        groups: The pipeline.
        seconds: How long to wait for the others: they may be elsewhere, and wait for this rank.
    """
    group, *_ = of_pipeline(groups)

    def take_part() -> None:
        with contextlib.suppress(Exception):
            # Whoever has departed will not be told.
            if all(each == _FAILED for each in _gather(_FAILED, group)):
                return
            object_transport.gather([f"{_FAILURE}{what}: {error}"], "pp")
            if groups.data is not None:
                # The replicas wait for this partition's gradients.
                _core.report_failure(error)

    groups.telling = threading.Thread(target=take_part, name="smp-failure", daemon=True)
    groups.telling.start()
    groups.telling.join(seconds)


def wait_until_told(groups: TensorFlowGroups) -> None:
    """The pipeline is to compare something: that comes after a failure of this rank, of which the others may not have heard yet."""
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
    story = object_transport.gather(list(lines), kind.value)
    for name, theirs in zip(names, story, strict=True):
        if len(theirs) == 1 and theirs[0].startswith(_FAILURE):
            return f"{name} {theirs[0].removeprefix(_FAILURE)}"
    doing = [_doing(theirs) for theirs in story]
    for name, other in zip(names, doing, strict=True):
        if other != doing[0]:
            return (
                f"the ranks of this pipeline do different things: {names[0]} {doing[0]}, and {name} {other}; all of them make the same "
                "calls in the same order"
            )
    return f"{differ}: {_difference(story, names)}"


def _doing(lines: Sequence[str]) -> str:
    if len(lines) == 1 and lines[0].startswith(_ACTIVITY):
        return lines[0].removeprefix(_ACTIVITY)
    return "runs a step"


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
