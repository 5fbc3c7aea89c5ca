"""Batches of ``fit``, ``evaluate`` and ``predict``: all ranks of a pipeline use those of its first rank.

The ranks' own batches may differ, because Keras shuffles with a different seed on each rank and generators draw
random numbers. They serve only to check that all ranks have a batch of the same structure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed._common import errors
from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import SMPMismatchError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication
from smdistributed.modelparallel.tensorflow.runtime import agreement
from smdistributed.modelparallel.tensorflow.state import state

_END = "has not come: there are no more"
_DOES = "runs `fit`, `evaluate` or `predict`"
#: Errors that the other ranks learn of in another way.
_KNOWN = (errors.MismatchError, errors.PeerFailedError, errors.ClosedError, errors.WaitTimeoutError, tf.errors.OpError)
#: How long a rank that has left the loop waits to tell the others, which may have left, too.
_SECONDS = 1.0


@contextlib.contextmanager
def batch_loop(activity: str) -> Iterator[None]:
    """Return a context for all batches of ``activity``, which the ranks of a pipeline end together.

    If this rank fails alone, for example in a callback, the others get the error with their next batch (AGR-2).

    Raises:
        SMPMismatchError: Other ranks have more batches.
    """
    groups = state.groups
    try:
        yield
    except Exception as error:
        is_known = (
            isinstance(error, _KNOWN) or groups.report_thread is not None or getattr(error, "_smp_is_known", False)
        )
        if groups.pp_group is not None and not is_known:
            text = f"rank {groups.rank}: {type(error).__name__}: {error}"
            agreement.report_failure(f"left `{activity}`", text, groups, _SECONDS)
        raise
    if groups.pp_group is not None:
        all_reports = communication.gather_for(_DOES, (f"`{activity}`", "has ended", None), CommGroup.PP_GROUP)
        _compare([f"{activity} {each}" for activity, each, _ in all_reports])


def next_batch(activity: str, take: Callable[[], Any]) -> Any:
    """Return the next batch of the pipeline's first rank. All ranks of the pipeline call it.

    Args:
        activity: Describes the batch, for comparison and errors.
        take: Returns this rank's batch; raises ``StopIteration`` or ``OutOfRangeError`` at the end.

    Raises:
        SMPMismatchError: Ranks do different things, one has no more batches or failed, or their batches have
        different structures; raised on all ranks. If all batches are used up, and on a rank whose ``take`` failed,
        the exception of ``take`` is raised instead.
    """
    groups = state.groups
    if groups.pp_group is None:
        return _as_tensors(take())
    batch, failure = None, None
    try:
        batch = _as_tensors(take())
        report = _described(batch)
    except (StopIteration, tf.errors.OutOfRangeError) as error:
        failure, report = error, _END
    except Exception as error:
        failure, report = error, f"could not be made: {type(error).__name__}: {error}"
    leaves, is_first = tf.nest.flatten(batch), groups.rank_in("pp") == 0
    # Values that the core cannot send are compared as part of the text.
    leaf_texts = [_shape_or_value(leaf) if is_first else None for leaf in leaves]
    all_reports = communication.gather_for(_DOES, (activity, report, leaf_texts), CommGroup.PP_GROUP)
    if failure is not None and report != _END:
        vars(failure)["_smp_is_known"] = True
        raise failure
    _compare([f"{activity} {each}" for activity, each, _ in all_reports])
    if failure is not None:
        raise failure
    _, _, first = all_reports[0]
    found = [_of_first(leaf, known, is_first) for leaf, known in zip(leaves, first, strict=True)]
    return tf.nest.pack_sequence_as(batch, found)


def _as_tensors(batch: Any) -> Any:
    """Convert a batch as ``tf.function`` would; optional tensors that are absent become ``None``."""

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, tf.experimental.Optional):
            return None
        return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return tf.nest.map_structure(converted, batch)


def _described(batch: Any) -> str:
    """Describe the structure of a batch, without sizes."""

    def kind(leaf: Any) -> str:
        return f"{leaf.dtype.name} of {leaf.shape.rank} axes" if isinstance(leaf, tf.Tensor) else type(leaf).__name__

    return f"is {tf.nest.map_structure(kind, batch)}"


def _shape_or_value(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return None
    return leaf.numpy() if leaf.dtype == tf.string else tuple(leaf.shape)


def _of_first(leaf: Any, known: Any, is_first: bool) -> Any:
    """Replace this rank's tensor by the first rank's; other values are kept."""
    if is_first or not isinstance(leaf, tf.Tensor):
        sent = leaf
    elif leaf.dtype == tf.string:
        return tf.convert_to_tensor(known)
    else:
        sent = leaf if tuple(leaf.shape) == known else tf.zeros(known, leaf.dtype)
    if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.string:
        return leaf
    with tf.device("/device:CPU:0"):
        return call(core_ops.smd_broadcast, tensor=sent, root=0, group=state.groups.objects("pp"))


def _compare(all_reports: Sequence[str]) -> None:
    for place, other in enumerate(all_reports):
        if other != all_reports[0]:
            raise SMPMismatchError(
                f"the ranks of this pipeline are at different places: on partition 0 {all_reports[0]}, and on "
                f"partition {place} {other}; all ranks must make the same calls with data of the same length"
            )
