"""Tensors from outside of the body to which it writes numbers of a partition, as in ``total.add_(loss.detach())``.

- OUT-1: After the step they have the same numbers on all ranks, as in one process. The value that the writes made is
  sent to all ranks, like those that the body returns, and copied into the tensor.
- OUT-2: Storages that the body itself makes end with it, and are not sent. If such a tensor is kept all the same, its
  use raises (``tracing/stale_storages.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.copy_on_write import storage_of
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages
from smdistributed.modelparallel.torch.tracing.tasks import Value


class OutsideTensors:
    """Those of one microbatch."""

    def __init__(self) -> None:
        #: Storages that the body has made.
        self._made: set[int] = set()
        self._written: dict[int, torch.Tensor] = {}

    def note_result(self, result: Any, operands: Sequence[Any]) -> None:
        """An operation on replicated tensors only has returned ``result``."""
        tensors = [result] if isinstance(result, torch.Tensor) else pytree.tensors_of(result)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = storage_of(tensor)
                if all(each.layout != torch.strided or storage_of(each) != storage for each in operands):
                    self._made.add(storage)

    def note_write(self, tensor: torch.Tensor) -> None:
        """A task writes to a replicated tensor."""
        if storage_of(tensor) not in self._made:
            self._written[id(tensor)] = tensor

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Whether the body has written to this very tensor."""
        return self._written.get(id(tensor)) is tensor

    def written(self, located: Mapping[int, Any]) -> list[tuple[torch.Tensor, Value]]:
        """The body has ended: tensors from outside, and the values that they get."""
        found = [(tensor, located[identity]) for identity, tensor in self._written.items()]
        return [(tensor, value) for tensor, value in found if type(value) is Value and value.parameter is None]


def write_back(
    written: Sequence[tuple[torch.Tensor, Value]], numbers: Mapping[int, torch.Tensor], stale: StaleStorages
) -> None:
    """Copies the numbers of values into the tensors that the body has changed (OUT-1)."""
    with torch.no_grad():
        for tensor, value in written:
            tensor.copy_(numbers[value.index])
            stale.forget(tensor)
