"""Full checkpoints in the file format of Hugging Face's Trainer.

The Trainer saves ``model.safetensors``, or several files with an index, and resumes a pipeline by the name of the
older file, ``pytorch_model.bin``. Files are mapped into memory, and each rank reads only the elements that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.torch.checkpoint import deferred, state_dicts

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel

_OLD, _NEW = "pytorch_model.bin", "model.safetensors"
_ENDING, _INDEX = ".safetensors", ".safetensors.index.json"
#: Pages of a mapping count as resident memory of the process, so a mapping ends after reads of this many bytes.
_MAPPED_BYTES = 64 << 20


def safetensors_instead(file: Path) -> Path | None:
    """Return the safetensors file to read for ``file``, or the index of several; ``None`` for a file of ``torch.save``.

    Args:
        file: The file that is to be loaded.
    """
    if file.is_file():
        return file if file.name.endswith((_ENDING, _INDEX)) else None
    others = [file.with_name(_NEW), file.with_name(_NEW + ".index.json")] if file.name == _OLD else []
    return next((other for other in others if other.is_file()), None)


class _MappedFile:
    """A safetensors file whose tensors are views of a mapping."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._open()

    def _open(self) -> None:
        try:
            import safetensors
        except ImportError as error:
            raise SMPCheckpointError(f"`{self.file}` cannot be read: `pip install safetensors`") from error
        try:
            self._handle: Any = safetensors.safe_open(self.file, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise SMPCheckpointError(f"`{self.file}` is damaged: {error}") from error
        self._read_bytes = 0

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._handle.keys())

    def view(self, name: str) -> torch.Tensor:
        """Return a tensor; its elements are read when they are accessed."""
        found: torch.Tensor = self._handle.get_tensor(name)
        return found

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor for immediate use; earlier ones are no longer resident."""
        if self._read_bytes > _MAPPED_BYTES:
            self._open()
        found = self.view(name)
        self._read_bytes += found.nbytes
        return found

    def deferred(self, name: str) -> deferred.DeferredTensor:
        """Return a tensor that is read when its elements are needed."""
        return deferred.defer(self.view(name), lambda: self.read(name))


def read_safetensors(file: Path, is_deferred: bool = True) -> dict[str, torch.Tensor]:
    """Map a whole model's state into memory.

    Args:
        file: A safetensors file, or the index of several.
        is_deferred: Whether tensors are deferred ones; otherwise they are views of the mapped file.

    Returns:
        The tensors by their names in the file.

    Raises:
        SMPCheckpointError: A file is missing or damaged, or the package ``safetensors`` is missing.
    """
    files = [file]
    if file.name.endswith(_INDEX):
        try:
            names = set(json.loads(file.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise SMPCheckpointError(f"`{file}` is no index of safetensors files: {error!r}") from error
        files = [file.with_name(name) for name in sorted(names)]
    found: dict[str, torch.Tensor] = {}
    for each in files:
        mapped = _MappedFile(each)
        found |= {name: mapped.deferred(name) if is_deferred else mapped.view(name) for name in mapped.names()}
    return found


def with_all_names(found: Mapping[str, Any], model: DistributedModel) -> dict[str, Any]:
    """Complete a state read from a file, in which shared tensors have one of their names.

    Args:
        found: Tensors with names of the model, or of the modules that tensor parallelism has replaced.
        model: The model that knows which tensors are shared.

    Returns:
        The tensors by each name in the model.
    """
    entries = state_dicts.model_entries(model)
    result = state_dicts.from_own_names(found) if found.keys() - entries.keys() else dict(found)
    by_tensor = {id(tensor): result[name] for name, tensor in entries.items() if name in result}
    for name, tensor in entries.items():
        if name not in result and id(tensor) in by_tensor:
            result[name] = by_tensor[id(tensor)]
    return result
