"""Full checkpoints in the file format of Hugging Face's Trainer.

The Trainer saves ``model.safetensors``, or several files with an index, and resumes a pipeline by the name of the
older file, ``pytorch_model.bin``. Files are mapped into memory, and each rank reads only the elements that it holds.

For some models, transformers 5 writes files with the names, and the division into tensors, of transformers 4. It
publishes how they are converted, and files are read by its functions.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.torch.checkpoint import deferred, slices, state_dicts
from smdistributed.modelparallel.torch.state import state

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
            raise SMPCheckpointError(f"`{file}` is not an index of safetensors files: {error!r}") from error
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
    result = dict(found)
    if result.keys() - entries.keys():
        result = state_dicts.from_own_names(_converted(result, model, entries))
    by_tensor = {id(tensor): result[name] for name, tensor in entries.items() if name in result}
    for name, tensor in entries.items():
        if name not in result and id(tensor) in by_tensor:
            result[name] = by_tensor[id(tensor)]
    return result


def _converted(found: dict[str, Any], model: DistributedModel, entries: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state from a file by the names in Hugging Face's model, as ``from_pretrained`` of transformers reads it.

    Names that remain unknown are kept; the load reports them.

    Raises:
        SMPCheckpointError: The file lacks some of the tensors that transformers joins, or they do not fit together.
    """
    root: Any = model.module
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(root, modeling.PreTrainedModel):
        # Modules that replace a whole model of transformers translate names themselves.
        return found
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        # Versions before 5 save the names of the model.
        return found
    known = _own_shapes(model, entries)
    conversions = get_model_conversion_mapping(root)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    result: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    # In the order of numbers in names, in which parts such as experts are joined.
    for key in sorted(found, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, root.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if pattern is None:
            result[name] = found[key]
        else:
            parts.setdefault(name, copy.deepcopy(by_pattern[pattern])).add_tensor(name, key, pattern, found[key])
    for name, converter in parts.items():
        try:
            joined = converter.convert(name, model=root, config=root.config)
        except (RuntimeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise SMPCheckpointError(
                f"the parts of `{name}` cannot be joined as transformers {_version()} does: {error}"
            ) from error
        result |= {each: value[0] if isinstance(value, list) else value for each, value in joined.items()}
    return result


def _version() -> str:
    return str(sys.modules["transformers"].__version__)


def _own_shapes(model: DistributedModel, entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors without elements by the names in Hugging Face's model, of the whole shapes."""
    divided = slices.named_shards(model.module)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in entries.items()}
    whole = {name: divided[name].whole_shape(shape) if name in divided else shape for name, shape in shapes.items()}
    return state.module_manager.to_own_names({name: torch.empty(shape, device="meta") for name, shape in whole.items()})
