"""Helpers of training callbacks, for all frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np


def warming_up(epoch: float, warmup_epochs: int, steps_per_epoch: int, ranks: int) -> float:
    """Return the factor of the learning rate during warm-up, at the beginning of a batch.

    Args:
        epoch: The epoch, with the batch as the fraction of it.
        warmup_epochs: Length of the warm-up in epochs.
        steps_per_epoch: Batches of an epoch.
        ranks: Number of ranks.

    Returns:
        The factor of the final learning rate: ``1 / ranks`` at the start, 1 at the end.
    """
    # So that the last batch of the warm-up has the factor 1.
    epoch += 1 / steps_per_epoch
    return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks


def is_number(value: Any) -> bool:
    """Return whether an entry of the logs can be averaged.

    Args:
        value: The entry.

    Returns:
        ``True`` for numbers and for arrays of one number without dimensions.
    """
    try:
        return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)
    except (TypeError, ValueError):
        return False
