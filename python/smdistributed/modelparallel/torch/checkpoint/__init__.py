"""Checkpoints of a partitioned model: ``torch.save`` files and sharded safetensors."""

from smdistributed.modelparallel.torch.checkpoint.manager import CheckpointManager
from smdistributed.modelparallel.torch.checkpoint.save_load import load, resume_from_checkpoint, save, save_checkpoint

__all__ = ["CheckpointManager", "load", "resume_from_checkpoint", "save", "save_checkpoint"]
