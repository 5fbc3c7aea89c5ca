"""The number of ranks with a GPU that can run on this machine, and the GPU of each rank.

Where there is one GPU only, all ranks share it. Each rank sets ``NCCL_HOSTID`` to a value of its own. NCCL then takes
the ranks for processes on different hosts and connects them by sockets. Kernels of different ranks run one after
another, so results are those of several GPUs, but times mean nothing.
"""

from __future__ import annotations

import importlib.util
import os

import pytest


def count() -> int:
    """Returns the number of CUDA devices of this machine, without initializing CUDA in this process."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


NUM_DEVICES = count()
#: Whether all ranks share the only device.
SHARED = NUM_DEVICES == 1
#: World size of the tests' jobs: the number of devices, but no more than tests need.
NUM_RANKS = 2 if SHARED else min(NUM_DEVICES, 4)
needs_one = pytest.mark.skipif(NUM_DEVICES < 1, reason="needs a CUDA device, but there is none")
#: For jobs of four ranks.
needs_four = pytest.mark.skipif(
    NUM_DEVICES < 4 and not SHARED, reason=f"needs four CUDA devices, or one for all ranks, but there are {NUM_DEVICES}"
)


def own() -> int:
    """Returns the index of this rank's device. Call it before anything in this process uses devices."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if SHARED:
        os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
    return local_rank % NUM_DEVICES
