"""The name under which Amazon's scripts import the state of the library: ``state_mod.state``."""

from __future__ import annotations

from smdistributed.modelparallel.torch.state import State, state

__all__ = ["State", "state"]
