"""Reports a rank's failure during a step to the other ranks, which wait for its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smdistributed import _core
from smdistributed._common import errors


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
