"""Mixed precision: ``smp.amp.GradScaler``."""

from __future__ import annotations

from smdistributed.modelparallel.torch.amp.grad_scaler import GradScaler

__all__ = ["GradScaler"]
