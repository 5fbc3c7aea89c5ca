"""Objects between processes: ``send``, ``recv_from``, ``broadcast``, ``allgather`` and barriers.

Anything that can be pickled; tensors of TensorFlow travel as arrays and come as tensors. None of this shares an order
with the pipeline's transfers, and it works before the first step. What all ranks of a pipeline call has its turn among their
steps (AGR-1).
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
#: Kinds of groups in which every rank of a pipeline is.
_WHOLE = ("world", "mp", "pp")


def _take_turn(name: str, activity: str) -> None:
    if name in _WHOLE:
        agreement.take_turn(activity, state.groups)


def _gather(value: Any, name: str) -> list[Any]:
    _take_turn(name, "calls `smp.allgather()`")
    return object_transport.gather(value, name)


def _meet(name: str) -> None:
    _take_turn(name, "calls `smp.barrier()`")
    _core.barrier(state.groups.objects(name))


def gather_for(activity: str, value: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """As :func:`allgather`, of all ranks of a pipeline at least, for what ``activity`` says that they do."""
    with errors.translated(CLASSES):
        _take_turn(group.value, activity)
        return object_transport.gather(value, group.value)


objects = Objects(lambda: state.groups, object_transport.post, object_transport.take, _gather, _meet)
send, recv_from, broadcast, allgather = objects.send, objects.recv_from, objects.broadcast, objects.allgather
barrier, mp_barrier, dp_barrier, pp_barrier = (
    objects.barrier,
    objects.mp_barrier,
    objects.dp_barrier,
    objects.pp_barrier,
)
tp_barrier, rdp_barrier = objects.tp_barrier, objects.rdp_barrier


def together(do: Callable[[], _T], path: str, done: str = "written") -> list[_T]:
    """What ``do`` returns on each rank. All ranks call it, and none returns before all have ended; what
    goes wrong on any is raised on all.

    Args:
        path: The checkpoint's.
        done: What ``do`` does with it: ``"written"`` or ``"read"``.

    Raises:
        SMPCheckpointError: ``do`` failed, here or on another rank.
    """
    result, told, cause = None, None, None
    try:
        result = do()
    except Exception as error:
        told, cause = failures.failure(state.groups.rank, error), error
    results, answers = zip(*gather_for("saves or loads", (result, told)), strict=True)
    failed = [each for each in answers if each]
    if failed:
        raise SMPCheckpointError(f"the checkpoint `{path}` could not be {done}: {failures.summary(failed)}") from cause
    return list(results)


def read_together(read: Callable[[], Any], path: str) -> None:
    """Reads a checkpoint; all ranks call it.

    Raises:
        SMPCheckpointError: Some rank could not read it; the same on all ranks. Where none could, each raises what TensorFlow raises.
    """
    failed: list[Exception] = []

    def tried() -> failures.Failure | None:
        try:
            read()
        except Exception as error:
            failed.append(error)
            return failures.failure(state.groups.rank, error)
        return None

    answers = together(tried, path, "read")
    if all(answers):
        raise failed[0]
    if any(answers):
        told = failures.summary([each for each in answers if each])
        raise SMPCheckpointError(f"the checkpoint `{path}` could not be read: {told}") from (failed or [None])[0]
