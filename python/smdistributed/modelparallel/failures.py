"""Failures that raise the same error on all ranks, whichever rank they happened on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from smdistributed.modelparallel.exceptions import SMPCheckpointError

_T = TypeVar("_T")
#: The rank, the class of its error, and its text.
Failure = tuple[int, str, str]
#: Largest number of failures that an error lists.
_LISTED = 5


def failure(rank: int, error: Exception) -> Failure:
    """Return the description of an error that a rank sends to the others."""
    return rank, type(error).__name__, str(error)


def summary(failures: Sequence[Failure]) -> str:
    """Describe the causes, each once; a rank that failed because of another one repeats its text."""
    own = [
        (rank, kind, text)
        for at, (rank, kind, text) in enumerate(failures)
        if not any(
            other and other in text and (other != text or before < at) for before, (_, _, other) in enumerate(failures)
        )
    ]
    listed = "; ".join(f"rank {rank}: {kind}: {text}" for rank, kind, text in own[:_LISTED])
    return listed + (f"; and {len(own) - _LISTED} more ranks" if len(own) > _LISTED else "")


def raise_on_all_ranks(
    do: Callable[[], _T],
    rank: int,
    gather: Callable[[Any], list[Any]],
    what: str,
    same: Callable[[_T], Any] | None = None,
) -> _T:
    """Run ``do`` on each rank; if it fails on any rank, raise on all of them.

    Args:
        do: The function that this rank runs.
        rank: This rank.
        gather: Returns what all ranks pass to it, in rank order.
        what: The beginning of the error, such as "the state could not be gathered".
        same: Returns the part of the result that must be equal on all ranks.

    Returns:
        The result of ``do`` on this rank.

    Raises:
        SMPCheckpointError: ``do`` failed, here or on another rank, or ranks disagree.
    """
    result, own_failure, cause = None, None, None
    try:
        result = do()
    except Exception as error:
        own_failure, cause = failure(rank, error), error
    shown = repr(same(result)) if cause is None and same is not None else None  # type: ignore[arg-type]
    try:
        answers = gather((own_failure, shown, what))
    except Exception as error:
        if cause is None:
            raise
        # Another rank has died meanwhile, or does not arrive. This rank's own failure may be the reason.
        raise error from cause
    # If ranks disagree on the error's class, the first one's is raised on all of them.
    what = answers[0][2]
    failures = [tuple(each) for each, _, _ in answers if each is not None]
    if failures:
        raise SMPCheckpointError(f"{what}: {summary(failures)}") from cause
    for other, (_, theirs, _) in enumerate(answers):
        if theirs != answers[0][1]:
            raise SMPCheckpointError(
                f"{what}: ranks disagree: rank 0 has {answers[0][1]} and rank {other} has {theirs}"
            )
    return result  # type: ignore[return-value]
