"""Tensors from outside of the body to which it writes values of a partition, as in ``total.add_(loss.detach())``.

- OUT-1: after the step, they have the same values on all ranks, as in one process. The written value is sent to all
  ranks, like the body's results, and copied into the tensor.
- OUT-2: storages that the body itself creates are temporary, and are not sent. If the script keeps such a tensor,
  using it raises an error (``tracing/stale_storages.py``).
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
    """The outside tensors of one microbatch."""

    def __init__(self) -> None:
        #: Storages that the body has created.
        self._made: set[int] = set()
        self._written: dict[int, torch.Tensor] = {}

    def note_result(self, result: Any, operands: Sequence[Any]) -> None:
        """Record that an operation on replicated tensors only has returned ``result``."""
        tensors = [result] if isinstance(result, torch.Tensor) else pytree.tensors_of(result)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = storage_of(tensor)
                if storage in self._made:
                    continue
                if all(each.layout != torch.strided or storage_of(each) != storage for each in operands):
                    self._made.add(storage)

    def note_write(self, tensor: torch.Tensor) -> None:
        """Record that a task writes to a replicated tensor."""
        if storage_of(tensor) not in self._made:
            self._written[id(tensor)] = tensor

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the body has written to this tensor object."""
        return self._written.get(id(tensor)) is tensor

    def written(self, located: Mapping[int, Any]) -> list[tuple[torch.Tensor, Value]]:
        """Return the outside tensors that the body has written to, and their values."""
        found = [(tensor, located[identity]) for identity, tensor in self._written.items()]
        return [(tensor, value) for tensor, value in found if type(value) is Value and value.parameter is None]


def write_back(
    written: Sequence[tuple[torch.Tensor, Value]], numbers: Mapping[int, torch.Tensor], stale: StaleStorages
) -> None:
    """Copy values into the tensors to which the body has written (OUT-1)."""
    with torch.no_grad():
        for tensor, value in written:
            tensor.copy_(numbers[value.index])
            stale.forget(tensor)
