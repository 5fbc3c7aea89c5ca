"""Replacements for functions of PyTorch."""

from __future__ import annotations

from smdistributed.modelparallel.torch.patches import checkpoint as checkpoint
