"""Plain tensors in attributes of modules: neither parameters nor buffers. Every rank has all of them.

- ATN-1: if the body writes in place to a tensor in an attribute, earlier calls of the module run with a copy from
  before the write, as after an assignment (MST-1). A tensor in a list or an object in an attribute raises instead.
- ATN-2: if the body writes values of a partition to such a tensor, the module's partition does not have them, so the
  next call of the module raises. After the step, the tensor has them on all ranks (OUT-1).
- ATN-3: if a call writes to such a tensor, only the module's partition has the new numbers. A use of the tensor by the
  body raises, and so does the call if a module on another partition has the tensor, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.tracing.copy_on_write import overlap, storage_of


class AttributeTensor(NamedTuple):
    """A tensor in an attribute.

    Attributes:
        tensor: The tensor.
        owner, name: The module and the attribute's name.
        path: The path of the attribute.
        rank: The partition of the module; ``None`` for one that runs where its arguments are.
        is_direct: Whether the tensor is the attribute's value, and not in a list or an object there.
    """

    tensor: torch.Tensor
    owner: Any
    name: str
    path: str
    rank: int | None
    is_direct: bool


class AttributeTensors:
    """The plain tensors in attributes of a model, from the first call of a step on."""

    def __init__(self) -> None:
        #: By storage.
        self._found: dict[int, list[AttributeTensor]] = {}

    def clear(self) -> None:
        """Forget all tensors."""
        self._found.clear()

    def add(self, new: AttributeTensor) -> None:
        """Add a tensor, once for each attribute."""
        known = self._found.setdefault(storage_of(new.tensor), [])
        if not any(each.tensor is new.tensor and each.owner is new.owner and each.name == new.name for each in known):
            known.append(new)

    def has_storage(self, storage: int) -> bool:
        """Return whether an attribute contains a tensor of a storage."""
        return storage in self._found

    def sharing(self, tensor: torch.Tensor) -> Iterator[AttributeTensor]:
        """Yield the tensors in attributes that share memory with a tensor."""
        for each in self._found.get(storage_of(tensor), ()):
            if overlap(each.tensor, tensor):
                yield each

    def partitions(self, tensor: torch.Tensor) -> set[int]:
        """Return the partitions whose modules have a tensor that shares memory with this one."""
        return {each.rank for each in self.sharing(tensor) if each.rank is not None}


class Copies:
    """Copies of tensors in attributes from before a write by the body (ATN-1)."""

    def __init__(self, tensors: AttributeTensors, operands: Sequence[torch.Tensor], called: set[int]) -> None:
        self._copies: list[tuple[AttributeTensor, torch.Tensor]] = []
        for operand in operands:
            for each in tensors.sharing(operand):
                if id(each.owner) in called:
                    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
                        self._copies.append((each, each.tensor.detach().clone()))

    def of_written(self, written: Sequence[torch.Tensor]) -> Iterator[tuple[AttributeTensor, torch.Tensor]]:
        """Yield the tensors that a write has changed, with their copies."""
        for each, copy in self._copies:
            if any(overlap(each.tensor, tensor) for tensor in written):
                yield each, copy
