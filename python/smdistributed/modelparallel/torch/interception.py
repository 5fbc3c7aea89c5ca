"""Calls of modules on their way to the recording.

``nn.Module.__call__``, and that of every class in the model that has one of its own, is replaced while a step is recorded,
and only then. ``super().forward()`` and everything else that Python does inside of a forward stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.pipeline import Pipeline
from smdistributed.modelparallel.torch.recording import active


def _recorded(original: Callable[..., Any], pipeline: Pipeline) -> Callable[..., Any]:
    whole, paths = pipeline.placement.whole, pipeline.paths

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recording = active.recording
        rank = whole.get(id(self)) if recording is not None else None
        if rank is None:
            return original(self, *args, **kwargs)
        assert recording is not None
        return recording.call_module(self, paths[id(self)], rank, args, kwargs)

    return call


@contextmanager
def intercepted(pipeline: Pipeline) -> Iterator[None]:
    """Modules that are wholly on one partition are recorded inside."""
    originals = {owner: vars(owner)["__call__"] for owner in pipeline.callers}
    try:
        for owner, original in originals.items():
            owner.__call__ = _recorded(original, pipeline)
        yield
    finally:
        for owner, original in originals.items():
            owner.__call__ = original
