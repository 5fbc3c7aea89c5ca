"""Full checkpoints in the file format of Hugging Face's Trainer.

The Trainer saves ``model.safetensors`` and resumes a pipeline by the name of the older file, ``pytorch_model.bin``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.torch.checkpoint import state_dicts
from smdistributed.modelparallel.torch.state import state

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel

_OLD, _NEW = "pytorch_model.bin", "model.safetensors"


def safetensors_instead(file: Path) -> Path | None:
    """Return the safetensors file that exists instead of ``file``, if any."""
    other = file.with_name(_NEW)
    return other if file.name == _OLD and not file.is_file() and other.is_file() else None


def read_safetensors(file: Path, model: DistributedModel) -> dict[str, Any]:
    """Read a whole model's state. Shared tensors, which the file has under one name, are added under their other names.

    Args:
        file: The file, with names of the model or of the modules that tensor parallelism has replaced.
        model: The model that knows which tensors are shared.

    Raises:
        SMPCheckpointError: The file is damaged, or the package ``safetensors`` is missing.
    """
    try:
        import safetensors
        from safetensors.torch import load_file
    except ImportError as error:
        raise SMPCheckpointError(f"`{file}` cannot be read: `pip install safetensors`") from error
    try:
        found: dict[str, Any] = load_file(file)
    except (safetensors.SafetensorError, OSError) as error:
        raise SMPCheckpointError(f"`{file}` is damaged: {error}") from error
    entries = state_dicts.model_entries(model)
    if found.keys() - entries.keys():
        found = state.module_manager.from_own_names(found)
    by_tensor = {id(tensor): found[name] for name, tensor in entries.items() if name in found}
    for name, tensor in entries.items():
        if name not in found and id(tensor) in by_tensor:
            found[name] = by_tensor[id(tensor)]
    return found
