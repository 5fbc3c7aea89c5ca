"""Stand-ins for the parts of NVIDIA's Apex that scripts of the original import, where Apex is not installed.

Importing this library makes ``apex.optimizers``, ``apex.normalization``, ``apex.multi_tensor_apply`` and ``amp_C``
importable, and a warning says so when the first one is used. An installed Apex takes precedence.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch import optimizers
from smdistributed.modelparallel.torch.nn.norm import FusedLayerNorm

_Lists = Sequence[Sequence[torch.Tensor]]


class _MultiTensorApply:
    """Calls an operation of ``amp_C`` on lists of tensors.

    Args:
        chunk_size: Passed to the operation.
    """

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: _Lists, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


@torch.no_grad()
def _scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, scale: float) -> None:
    """Set the tensors of the second list to those of the first, multiplied; the flag to 1 if one is not finite."""
    del chunk_size
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
        if not bool(target.isfinite().all()):
            noop_flag.fill_(1)


@torch.no_grad()
def _l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, ``[1]``, and, if requested, that of each one."""
    del chunk_size
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in tensor_lists[0]]
    each_norm = torch.stack(norms) if norms else torch.zeros(0, device=noop_flag.device)
    return each_norm.norm()[None], each_norm if per_tensor else each_norm.new_empty(0)


#: The content of each module.
_MODULES: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.multi_tensor_apply": {
        "MultiTensorApply": _MultiTensorApply,
        "multi_tensor_applier": _MultiTensorApply(2048 * 32),
    },
    "apex.normalization": {"FusedLayerNorm": FusedLayerNorm},
    "apex.optimizers": {name: getattr(optimizers, name) for name in ("FusedAdam", "FusedLAMB", "FusedNovoGrad")},
    "amp_C": {"multi_tensor_l2norm": _l2norm, "multi_tensor_scale": _scale},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the replacements, after all other finders."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "apex")

    def exec_module(self, module: types.ModuleType) -> None:
        # Not set as attributes: libraries look for other parts of Apex, and no warning should come of that.
        vars(module)["__getattr__"] = functools.partial(_attribute, module.__name__)


def _attribute(module: str, name: str) -> Any:
    if name not in _MODULES[module]:
        raise AttributeError(f"Apex is not installed, and its replacement `{module}` has no `{name}`")
    _warn()
    return _MODULES[module][name]


@functools.cache
def _warn() -> None:
    warnings.warn(
        "Apex is not installed: its functions and classes are those of PyTorch and of this library", stacklevel=3
    )


def install() -> None:
    """Make the replacements importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
