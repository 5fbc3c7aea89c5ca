"""How many ranks with a GPU each can run here."""

from __future__ import annotations

import importlib.util

import pytest


def count() -> int:
    """CUDA devices of this machine; starts no CUDA in this process."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


NUM_DEVICES = count()
#: Ranks of a job: as many as there are devices, but no more than tests need.
NUM_RANKS = min(NUM_DEVICES, 4)
needs_two = pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs two CUDA devices, here are {NUM_DEVICES}")
