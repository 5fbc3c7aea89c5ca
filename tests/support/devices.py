"""How many ranks with a GPU can run here, and which GPU each one takes.

Where there is one GPU, ranks share it: each says by ``NCCL_HOSTID`` that it is a host of its own, so that NCCL goes over sockets, and
kernels of different ranks take turns. Results are those of several GPUs, and times say nothing.
"""

from __future__ import annotations

import importlib.util
import os

import pytest


def count() -> int:
    """CUDA devices of this machine; starts no CUDA in this process."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


NUM_DEVICES = count()
#: Whether ranks share the only device.
SHARED = NUM_DEVICES == 1
#: Ranks of a job: as many as there are devices, but no more than tests need.
NUM_RANKS = 2 if SHARED else min(NUM_DEVICES, 4)
needs_one = pytest.mark.skipif(NUM_DEVICES < 1, reason="needs a CUDA device, here is none")
#: For jobs of four ranks.
needs_four = pytest.mark.skipif(
    NUM_DEVICES < 4 and not SHARED, reason=f"needs four CUDA devices, or one for all ranks, here are {NUM_DEVICES}"
)


def own() -> int:
    """In a rank, before anything of its job uses devices: the index of the one that it takes."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if SHARED:
        os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
    return local_rank % NUM_DEVICES
