"""Files of ``torch.save``, written atomically and read without executing their content."""

from __future__ import annotations

import os
import pickle
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError


def put(obj: Any, path: Path, **options: Any) -> None:
    """Write a file that appears complete or not at all."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            torch.save(obj, file, **options)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def get(path: Path, map_location: Any = "cpu", **options: Any) -> Any:
    """Load a file with ``torch.load``; no code from it is executed unless ``weights_only=False`` is given."""
    if not path.exists():
        raise SMPCheckpointError(f"`{path}` is missing")
    options.setdefault("weights_only", True)
    try:
        return torch.load(path, map_location=map_location, **options)
    except pickle.UnpicklingError as error:
        raise SMPCheckpointError(
            f"`{path}` holds {_classes(path)}, which would have to be executed to be read; if you trust it, allow its "
            "classes with `torch.serialization.add_safe_globals` (`smp.resume_from_checkpoint(..., "
            "safe_globals=[...])`), or pass `weights_only=False`"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise SMPCheckpointError(f"`{path}` is damaged: {error}") from error


def _classes(path: Path) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        # A file of torch's older format, which is not a zip archive.
        names = []
    return ", ".join(sorted(names)) or "code"


def warn_of_classes(path: Path) -> None:
    """Warn of classes in user content that can be read back only with explicit permission."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if names:
        warnings.warn(
            f"the user content holds {', '.join(sorted(names))}: `smp.resume_from_checkpoint` reads it only with "
            "these in `safe_globals`, or with `weights_only=False`; numbers, texts, tensors, and lists, tuples, sets "
            "and dicts of them need neither",
            stacklevel=2,
        )
