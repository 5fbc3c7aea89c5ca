"""Batches of ``fit``, ``evaluate`` and ``predict``: all ranks of a pipeline compute with those of its first rank.

Random parts of a batch differ between ranks: Keras shuffles in another order on each, generators draw. So all ranks
take the first rank's batch. Their own batches only show that they do the same and that there is a batch.
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
#: What the others know of, each in its way.
_KNOWN = (errors.MismatchError, errors.PeerFailedError, errors.ClosedError, errors.WaitTimeoutError, tf.errors.OpError)
#: How long a rank that has left waits for the others to hear of it; they may have left, too.
_SECONDS = 1.0


@contextlib.contextmanager
def batch_loop(activity: str) -> Iterator[None]:
    """A context for all batches of ``activity``, which the ranks of a pipeline end together.

    If this rank fails by itself, for example in a callback, the others learn of it with their next batch (AGR-2).

    Raises:
        SMPMismatchError: others have more batches.
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
        stories = communication.gather_for(_DOES, (f"`{activity}`", "has ended", None), CommGroup.PP_GROUP)
        _compare([f"{activity} {each}" for activity, each, _ in stories])


def next_batch(activity: str, take: Callable[[], Any]) -> Any:
    """The next batch of the pipeline's first rank. All ranks of the pipeline call it.

    Args:
        activity: Which batch, of what.
        take: Makes this rank's; raises ``StopIteration`` or ``OutOfRangeError`` where there is none.

    Raises:
        SMPMismatchError: ranks do something else, one has no more batches, or could not make one, or they are built
            otherwise; the same on all ranks. Where all have none, and on the rank that could not make one, what
            ``take`` raises.
    """
    groups = state.groups
    if groups.pp_group is None:
        return _as_tensors(take())
    batch, failure = None, None
    try:
        batch = _as_tensors(take())
        story = _described(batch)
    except (StopIteration, tf.errors.OutOfRangeError) as error:
        failure, story = error, _END
    except Exception as error:
        failure, story = error, f"could not be made: {type(error).__name__}: {error}"
    leaves, is_first = tf.nest.flatten(batch), groups.rank_in("pp") == 0
    # What the core does not carry goes with the story.
    told = [_shape_or_value(leaf) if is_first else None for leaf in leaves]
    stories = communication.gather_for(_DOES, (activity, story, told), CommGroup.PP_GROUP)
    if failure is not None and story != _END:
        vars(failure)["_smp_is_known"] = True
        raise failure
    _compare([f"{activity} {each}" for activity, each, _ in stories])
    if failure is not None:
        raise failure
    _, _, first = stories[0]
    found = [_of_first(leaf, known, is_first) for leaf, known in zip(leaves, first, strict=True)]
    return tf.nest.pack_sequence_as(batch, found)


def _as_tensors(batch: Any) -> Any:
    """``batch`` as a ``tf.function`` would take it; absent optional tensors are ``None``."""

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, tf.experimental.Optional):
            return None
        return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return tf.nest.map_structure(converted, batch)


def _described(batch: Any) -> str:
    """The structure of a batch, without sizes."""

    def kind(leaf: Any) -> str:
        return f"{leaf.dtype.name} of {leaf.shape.rank} axes" if isinstance(leaf, tf.Tensor) else type(leaf).__name__

    return f"is {tf.nest.map_structure(kind, batch)}"


def _shape_or_value(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return None
    return leaf.numpy() if leaf.dtype == tf.string else tuple(leaf.shape)


def _of_first(leaf: Any, known: Any, is_first: bool) -> Any:
    """The first rank's tensor in the place of this rank's; what is no tensor stays."""
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


def _compare(stories: Sequence[str]) -> None:
    for place, other in enumerate(stories):
        if other != stories[0]:
            raise SMPMismatchError(
                f"the ranks of this pipeline are at different places: on partition 0 {stories[0]}, and on partition "
                f"{place} {other}; all of them make the same calls with data of the same length"
            )
