"""Communication of Python objects: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Objects are pickled; TensorFlow tensors are sent as arrays and arrive as tensors. These operations are not ordered
with the pipeline's transfers, and work before the first step. Calls of all ranks of a pipeline are compared, as steps
are (AGR-1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel import failures
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError
from smdistributed.modelparallel.objects import CommGroup, Objects
from smdistributed.modelparallel.tensorflow.runtime import agreement, object_transport
from smdistributed.modelparallel.tensorflow.state import state

_T = TypeVar("_T")
#: Kinds of groups that contain every rank of a pipeline.
_WHOLE = ("world", "mp", "pp")


def _compare_activity(name: str, activity: str) -> None:
    if name in _WHOLE:
        agreement.compare_activity(activity, state.groups)


def _gather(value: Any, name: str) -> list[Any]:
    _compare_activity(name, "calls `smp.allgather()`")
    return object_transport.gather(value, name)


def _barrier(name: str) -> None:
    _compare_activity(name, "calls `smp.barrier()`")
    group = state.groups.objects(name)
    assert group is not None, "a group of one rank has no barrier"
    _core.barrier(group)


def gather_for(activity: str, value: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Gather values over a group that contains the whole pipeline; errors name the call as ``activity``."""
    with errors.translated(CLASSES):
        _compare_activity(group.value, activity)
        return object_transport.gather(value, group.value)


objects = Objects(
    lambda: state.groups, object_transport.send_object, object_transport.receive_object, _gather, _barrier
)
send, recv_from, broadcast, allgather = objects.send, objects.recv_from, objects.broadcast, objects.allgather
barrier, mp_barrier, dp_barrier, pp_barrier = (
    objects.barrier,
    objects.mp_barrier,
    objects.dp_barrier,
    objects.pp_barrier,
)
tp_barrier, rdp_barrier = objects.tp_barrier, objects.rdp_barrier


def raise_on_all_ranks(do: Callable[[], _T], path: str, done: str = "written") -> list[_T]:
    """Run ``do`` on all ranks and return the results of all.

    All ranks call it. None returns before ``do`` has ended on all of them, and a failure on one raises on all.

    Args:
        do: The function.
        path: The path of the checkpoint, for errors.
        done: The effect of ``do`` on it, for errors: ``"written"`` or ``"read"``.

    Raises:
        SMPCheckpointError: ``do`` failed, here or on another rank.
    """
    result, own_failure, cause = None, None, None
    try:
        result = do()
    except Exception as error:
        own_failure, cause = failures.failure(state.groups.rank, error), error
    try:
        results, answers = zip(*gather_for("saves or loads", (result, own_failure)), strict=True)
    except Exception as error:
        if cause is None:
            raise
        # Another rank has died meanwhile, or does not arrive. This rank's own failure may be the reason.
        raise error from cause
    failed = [each for each in answers if each]
    if failed:
        raise SMPCheckpointError(f"the checkpoint `{path}` could not be {done}: {failures.summary(failed)}") from cause
    return list(results)


def read_on_all_ranks(read: Callable[[], Any], path: str) -> None:
    """Read a checkpoint; all ranks call it.

    Raises:
        SMPCheckpointError: Some ranks could not read it; raised on all ranks. If no rank could, each raises
        TensorFlow's own error.
    """
    failed: list[Exception] = []

    def tried() -> failures.Failure | None:
        try:
            read()
        except Exception as error:
            failed.append(error)
            return failures.failure(state.groups.rank, error)
        return None

    answers = raise_on_all_ranks(tried, path, "read")
    if all(answers):
        raise failed[0]
    if any(answers):
        text = failures.summary([each for each in answers if each])
        raise SMPCheckpointError(f"the checkpoint `{path}` could not be read: {text}") from next(iter(failed), None)
