"""Checkpoints of a partitioned model: TensorFlow's format and sharded safetensors."""

from smdistributed.modelparallel.tensorflow.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
