"""``smp.core.initialized``, which users of Amazon's library read."""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.torch.state import state


def __getattr__(name: str) -> Any:
    if name == "initialized":
        return state.initialized
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
