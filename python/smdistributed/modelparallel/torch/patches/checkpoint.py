"""Activation checkpointing, under the names of ``torch.utils.checkpoint``."""

from __future__ import annotations

from smdistributed.modelparallel.torch.activation_checkpointing import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
