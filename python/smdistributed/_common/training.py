"""What callbacks of training need, whatever the framework."""

from __future__ import annotations

from typing import Any

import numpy as np


def warming_up(epoch: float, warmup_epochs: int, steps_per_epoch: int, ranks: int) -> float:
    """What the learning rate after the warm-up is multiplied with, at the beginning of a batch."""
    # The last batch of the warm-up has the whole rate.
    epoch += 1 / steps_per_epoch
    return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks


def is_number(value: Any) -> bool:
    """Whether an entry of the logs can be averaged."""
    try:
        return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)
    except (TypeError, ValueError):
        return False
