"""The device of this rank's partition."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """Return the CUDA device that the script has chosen, or else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
