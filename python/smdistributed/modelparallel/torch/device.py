"""Where this rank's partition is."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """The device that the script has chosen, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
