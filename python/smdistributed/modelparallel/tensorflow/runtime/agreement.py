"""Compares the operations of a pipeline's ranks: the step that they run, and operations outside of steps.

A step is compared in its graph, and when it is traced, before it partitions the model. Replicas of a partition compare
the gradients that they reduce.

- AGR-1: each operation in which all ranks of a pipeline wait for each other (steps, batches of ``fit``, checkpoints,
  barriers) begins with a comparison in the pipeline's group. If a rank does something else, all of them get an error
  instead of a deadlock, and may continue after it.
- AGR-2: if a rank leaves such an operation with an error, it takes part in the next comparison with that error.
- AGR-3: a step compares in the pipeline first, and then between replicas. The gradients are among the lines of both, so
  if all pipelines pass the first comparison, either all ranks pass the second one or none does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Lines that must be equal on all ranks of a group.

    Attributes:
        lines: The lines of this rank.
        group: The core's id of the group.
        kind: The kind of the group.
        differ: The beginning of the error.
        names: Names of the ranks in errors, in the group's order.
    """

    lines: Sequence[str]
    group: int
    kind: CommGroup
    differ: str
    names: Sequence[str]

    @property
    def digest(self) -> int:
        """A checksum of the lines."""
        return zlib.crc32("\n".join(self.lines).encode())


def compare(comparisons: Sequence[Comparison], scope: StepScope | None = None) -> tf.Operation:
    """Return an operation that compares in order, and fails at the first comparison that finds a difference.

    Args:
        comparisons: What to compare. All ranks of a group compare the same kinds of groups in the same order.
        scope: The step, which no rank runs if lines differ.
    """
    compared: list[tf.Operation] = []
    for index, each in enumerate(comparisons):
        with tf.control_dependencies(compared):
            compared = [_compare(each, comparisons[index + 1 :], scope)]
    return compared[0]


def _compare(comparison: Comparison, later: Sequence[Comparison], scope: StepScope | None) -> tf.Operation:
    digest = comparison.digest
    # Data is compared in host memory: on a GPU, a group's first operation loads kernels, which waits for running
    # kernels, and one of these may be a receive that waits for a message that is sent only after this comparison.
    with tf.device(_HOST):
        gathered = core_ops.smd_all_gather(tensor=tf.constant([digest], tf.int64), group=comparison.group).output
        is_other = tf.reduce_any(gathered != tf.constant(digest, tf.int64))

    def raise_mismatch(_: Any) -> NoReturn:
        text, all_run_steps = _describe(comparison, comparison.lines)
        # If a rank of this group does something else, its counterparts in other groups do not compare a step, either.
        for other in later if all_run_steps else ():
            _take_part(other, f"{_FAILURE}failed in its pipeline: {text}")
        raise SMPMismatchError(f"{text} [smd:mismatch]")

    def fail() -> tf.Tensor:
        with tf.control_dependencies([] if scope is None else [scope.cancel()]):
            return tf.numpy_function(raise_mismatch, [gathered], tf.int64)

    with tf.device(_HOST):
        return tf.cond(is_other, fail, lambda: tf.constant(0, tf.int64)).op


def _take_part(comparison: Comparison, failure: str) -> None:
    """Take part in a comparison with an error, which the other ranks of its group raise (AGR-2)."""
    # Ranks that have left or died get no report, and the error of this rank stands.
    with contextlib.suppress(errors.SmdistributedError):
        if any(each != _FAILED for each in _gather(_FAILED, comparison.group)):
            _describe(comparison, [failure])


def compare_now(comparison: Comparison) -> None:
    """Compare at once, as :func:`compare` does in a graph.

    Raises:
        SMPMismatchError: Another rank has other lines, or none; raised on all ranks.
    """
    if any(each != comparison.digest for each in _gather(comparison.digest, comparison.group)):
        raise SMPMismatchError(_describe(comparison, comparison.lines)[0])


def in_pipeline(lines: Sequence[str], groups: TensorFlowGroups) -> Comparison:
    """Return the comparison of partitions that run a step or an operation outside of steps."""
    assert groups.pp_group is not None, "one partition has nothing to compare"
    names = [f"partition {place}" for place in range(len(groups.members["pp"]))]
    differ = "the ranks of this pipeline run different steps"
    return Comparison(lines, groups.pp_group, CommGroup.PP_GROUP, differ, names)


def compare_activity(activity: str, groups: TensorFlowGroups) -> None:
    """Begin an operation of all ranks of the pipeline outside of steps, such as ``calls `smp.barrier()```.

    Raises:
        SMPMismatchError: Another rank does something else; raised on all ranks.
    """
    if groups.pp_group is not None:
        wait_for_report(groups)
        compare_now(in_pipeline([_ACTIVITY + activity], groups))


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
    group = in_pipeline([], groups).group

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


def _gather(digest: int, group: int) -> list[int]:
    with tf.init_scope(), tf.device(_HOST):
        return (
            call(core_ops.smd_all_gather, tensor=tf.constant([digest], tf.int64), group=group).output.numpy().tolist()
        )


def _describe(comparison: Comparison, lines: Sequence[str]) -> tuple[str, bool]:
    """Describe the difference; all ranks of the group call it, each with its lines or its error.

    Returns:
        The text, and whether all ranks of the group run a step.
    """
    names = comparison.names
    reports = object_transport.gather(list(lines), comparison.kind.value)
    for name, theirs in zip(names, reports, strict=True):
        if len(theirs) == 1 and theirs[0].startswith(_FAILURE):
            return f"{name} {theirs[0].removeprefix(_FAILURE)}", False
    doing = [_activity(theirs) for theirs in reports]
    for name, other in zip(names, doing, strict=True):
        if other != doing[0]:
            text = (
                f"the ranks of this pipeline do different things: {names[0]} {doing[0]}, and {name} {other}; all "
                "ranks must make the same calls in the same order"
            )
            return text, False
    return f"{comparison.differ}: {_difference(reports, names)}", True


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
