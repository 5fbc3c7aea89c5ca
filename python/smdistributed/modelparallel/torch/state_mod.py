"""The module from which published scripts import the library's state, as ``state_mod.state``."""

from __future__ import annotations

from smdistributed.modelparallel.torch.state import State, state

__all__ = ["State", "state"]
