"""Errors that a rank raises during a step: the other ranks are told, and errors of autograd name the cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import SMPError, SMPUsageError

#: What the message of autograd's version check says about a saved tensor, and ours of the zero-bubble backward.
_CHANGED = "modified by an inplace operation"


@contextlib.contextmanager
def reporting_failures() -> Iterator[None]:
    """Report an exception in the context to the other ranks."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, errors.SmdistributedError) and errors.from_report(text) is None:
            _core.report_failure(f"{type(error).__name__}: {text}")
        raise


@contextlib.contextmanager
def explaining_changed_tensors(microbatch: int) -> Iterator[None]:
    """Explain autograd's error about a tensor that has changed since the forward, in the backward of a microbatch.

    In a pipeline, forwards of later microbatches run before this backward, so a buffer that is correct in a single
    process may have changed.

    Raises:
        SMPUsageError: Autograd, or the zero-bubble backward, needs a tensor that was changed in place.
    """
    try:
        yield
    except RuntimeError as error:
        # An error of the library may cite that of another rank.
        if _CHANGED not in str(error) or isinstance(error, (errors.SmdistributedError, SMPError)):
            raise
        raise SMPUsageError(
            f"the backward of microbatch {microbatch} needs a tensor that was changed in place after it had been used. "
            "The forwards of later calls and microbatches run before this backward: a module that returns a buffer, "
            f"and changes it in its next call, must return a copy (`buffer.clone()`). PyTorch's error: {error}"
        ) from error
