"""Data-parallel training of PyTorch models."""

from smdistributed.dataparallel.torch import distributed
from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

dist = distributed

__all__ = ["dist", "distributed", "get_local_rank", "get_rank", "get_world_size"]
