"""Storages of replicated tensors to which tasks have written, so that this rank does not have their values.

A body may write values of a partition to a replicated tensor, as in ``total.add_(loss)``. From then on, the recording
treats the tensor as a value on that partition. Other tensors with the same storage, and in later microbatches and
steps this tensor as well, would have the values from before the write.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.copy_on_write import StorageRange, storage_of

#: The text of the error.
STALE = (
    "this tensor was changed in place with numbers of a partition, by another tensor with the same storage or in an "
    "earlier microbatch or step, so this rank does not have its numbers: inside of one microbatch use the tensor that "
    "was changed, or else change a copy"
)


class StaleStorages:
    """The written ranges of storages, as long as the storages exist."""

    def __init__(self) -> None:
        self._ranges: list[tuple[StorageWeakRef, StorageRange]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Record that a task writes to a replicated tensor."""
        with torch._C.DisableTorchFunction():
            self._ranges.append((StorageWeakRef(tensor.untyped_storage()), StorageRange.of(tensor)))

    def forget_freed(self) -> None:
        """Forget freed storages, because their addresses may be reused."""
        self._ranges = [each for each in self._ranges if not each[0].expired()]

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget a tensor whose values were copied to this rank."""
        part = StorageRange.of(tensor)
        self._ranges = [each for each in self._ranges if each[1] != part]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank lacks some values of a tensor."""
        return bool(self._ranges) and any(
            part.overlaps(tensor) for storage, part in self._ranges if not storage.expired()
        )

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Return whether a task writes to the storage of a tensor, also if it is to other parts of it."""
        written = storage_of(tensor) if self._ranges and tensor.layout == torch.strided else None
        return any(part.storage == written for storage, part in self._ranges if not storage.expired())

    def check(self, tensor: torch.Tensor) -> None:
        """Check that this rank has the values of a tensor.

        Raises:
            SMPUsageError: It lacks some.
        """
        if self.has(tensor):
            raise SMPUsageError(STALE)
