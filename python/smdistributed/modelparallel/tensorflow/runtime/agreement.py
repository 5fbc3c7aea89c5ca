"""Compares the operations of a pipeline's ranks: the step that they run, and operations outside of steps.

A step is compared in its graph, and when it is traced, before it partitions the model.

- AGR-1: each operation in which all ranks of a pipeline wait for each other (steps, batches of ``fit``, checkpoints,
  barriers) begins with a comparison in the pipeline's group. If a rank does something else, all of them get an error
  instead of a deadlock, and may continue after it.
- AGR-2: if a rank leaves such an operation with an error, it takes part in the next comparison with that error.
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
    from smdistributed.modelparallel.tensorflow.runtime.step_scope import StepScope

#: Prefixes of the only line of a rank that failed, and of one that runs an operation outside of steps.
_FAILURE, _ACTIVITY = "failed: ", "does: "
_HOST = "/device:CPU:0"
#: The value that a failed rank sends instead of a digest.
_FAILED = -1
#: Seconds that a rank with a failed trace waits for the others, which may still be tracing.
TRACING_SECONDS = 10.0


def compare(
    lines: Sequence[str],
    group: int,
    kind: CommGroup,
    differ: str,
    names: Sequence[str],
    scope: StepScope | None = None,
) -> tf.Operation:
    """Return an operation that fails unless all ranks of a group have the same lines.

    Args:
        lines: The lines of this rank.
        group: The core's id of the group.
        kind: The kind of the group.
        differ: The beginning of the error.
        names: Names of the ranks in errors, in the group's order.
        scope: The step, which no rank runs if lines differ.
    """
    digest = _digest(lines)
    # Data is compared in host memory: on a GPU, a group's first operation loads kernels, which waits for running
    # kernels, and one of these may be a receive that waits for a message that is sent only after this comparison.
    with tf.device(_HOST):
        gathered = core_ops.smd_all_gather(tensor=tf.constant([digest], tf.int64), group=group).output
        is_other = tf.reduce_any(gathered != tf.constant(digest, tf.int64))

    def raise_mismatch(_: Any) -> NoReturn:
        raise SMPMismatchError(f"{_mismatch_text(lines, kind, differ, names)} [smd:mismatch]")

    def fail() -> tf.Tensor:
        with tf.control_dependencies([] if scope is None else [scope.cancel()]):
            return tf.numpy_function(raise_mismatch, [gathered], tf.int64)

    with tf.device(_HOST):
        return tf.cond(is_other, fail, lambda: tf.constant(0, tf.int64)).op


def compare_now(lines: Sequence[str], group: int, kind: CommGroup, differ: str, names: Sequence[str]) -> None:
    """Compare at once, as :func:`compare` does in a graph.

    Raises:
        SMPMismatchError: Another rank has other lines, or none; raised on all ranks.
    """
    digest = _digest(lines)
    if any(each != digest for each in _gather(digest, group)):
        raise SMPMismatchError(_mismatch_text(lines, kind, differ, names))


def pipeline_group(groups: TensorFlowGroups) -> tuple[int, CommGroup, str, list[str]]:
    """Return the group in which partitions compare their steps, its kind, and the text and names for errors."""
    assert groups.pp_group is not None, "one partition has nothing to compare"
    names = [f"partition {place}" for place in range(len(groups.members["pp"]))]
    return groups.pp_group, CommGroup.PP_GROUP, "the ranks of this pipeline run different steps", names


def compare_activity(activity: str, groups: TensorFlowGroups) -> None:
    """Begin an operation of all ranks of the pipeline outside of steps, such as ``calls `smp.barrier()```.

    Raises:
        SMPMismatchError: Another rank does something else; raised on all ranks.
    """
    if groups.pp_group is not None:
        wait_for_report(groups)
        compare_now([_ACTIVITY + activity], *pipeline_group(groups))


def report_failure(what: str, error: str, groups: TensorFlowGroups, seconds: float) -> None:
    """Take part in the pipeline's next comparison with an error.

    The other ranks get the error when they compare; see :func:`wait_for_report`. Ranks that have failed as well are
    not told.

    Args:
        what: Description of what this rank did, such as ``left `fit```.
        error: The reason, and the rank.
        groups: The pipeline.
        seconds: How long to wait for the others, which may be elsewhere and wait for this rank.
    """
    group, *_ = pipeline_group(groups)

    def take_part() -> None:
        with contextlib.suppress(Exception):
            # Errors are ignored: ranks that have left the job get no report.
            if all(each == _FAILED for each in _gather(_FAILED, group)):
                return
            object_transport.gather([f"{_FAILURE}{what}: {error}"], "pp")
            if groups.dp_group is not None:
                # The replicas of this partition wait for its gradients, so they are told through the core.
                _core.report_failure(error)

    groups.report_thread = threading.Thread(target=take_part, name="smp-failure", daemon=True)
    groups.report_thread.start()
    groups.report_thread.join(seconds)


def wait_for_report(groups: TensorFlowGroups) -> None:
    """Wait until the report of an earlier failure of this rank has been delivered."""
    if groups.report_thread is not None:
        groups.report_thread.join()
        groups.report_thread = None


def _digest(lines: Sequence[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())


def _gather(digest: int, group: int) -> list[int]:
    with tf.init_scope(), tf.device(_HOST):
        return (
            call(core_ops.smd_all_gather, tensor=tf.constant([digest], tf.int64), group=group).output.numpy().tolist()
        )


def _mismatch_text(lines: Sequence[str], kind: CommGroup, differ: str, names: Sequence[str]) -> str:
    """Describe the mismatch; all ranks of the group call it."""
    reports = object_transport.gather(list(lines), kind.value)
    for name, theirs in zip(names, reports, strict=True):
        if len(theirs) == 1 and theirs[0].startswith(_FAILURE):
            return f"{name} {theirs[0].removeprefix(_FAILURE)}"
    doing = [_activity(theirs) for theirs in reports]
    for name, other in zip(names, doing, strict=True):
        if other != doing[0]:
            return (
                f"the ranks of this pipeline do different things: {names[0]} {doing[0]}, and {name} {other}; all "
                "ranks must make the same calls in the same order"
            )
    return f"{differ}: {_difference(reports, names)}"


def _activity(lines: Sequence[str]) -> str:
    if len(lines) == 1 and lines[0].startswith(_ACTIVITY):
        return lines[0].removeprefix(_ACTIVITY)
    return "runs a step"


def _difference(reports: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """Describe the first line in which the ranks differ."""
    first = reports[0]
    for name, other in zip(names, reports, strict=True):
        for place in range(max(len(first), len(other))):
            ours = first[place] if place < len(first) else "nothing"
            theirs = other[place] if place < len(other) else "nothing"
            if ours != theirs:
                return f"{names[0]} has `{ours}` where {name} has `{theirs}`"
    return "the reported operations are equal"
