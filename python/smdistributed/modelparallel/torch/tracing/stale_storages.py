"""Storages of replicated tensors that tasks have written to, so that this rank does not have their numbers.

A body may write numbers of a partition to a tensor that all ranks have, as in ``total.add_(loss)``. The recording knows
the tensor from then on as a value on that partition. Other tensors with the same storage, and in later microbatches and
steps this one as well, would show what was there before the write.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.copy_on_write import StorageRange

#: The error.
STALE = (
    "this tensor was changed in place with numbers of a partition, by another tensor with the same storage or in an "
    "earlier microbatch or step, so this rank does not have its numbers: inside of one microbatch use the tensor that "
    "was changed, or else change a copy"
)


class StaleStorages:
    """The written parts of storages, for as long as these exist."""

    def __init__(self) -> None:
        self._ranges: list[tuple[StorageWeakRef, StorageRange]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """A task writes to a replicated tensor."""
        with torch._C.DisableTorchFunction():
            self._ranges.append((StorageWeakRef(tensor.untyped_storage()), StorageRange.of(tensor)))

    def forget_freed(self) -> None:
        """Forgets storages that are gone, whose addresses others may get."""
        self._ranges = [each for each in self._ranges if not each[0].expired()]

    def forget(self, tensor: torch.Tensor) -> None:
        """The numbers of a tensor have been brought here."""
        part = StorageRange.of(tensor)
        self._ranges = [each for each in self._ranges if each[1] != part]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether some numbers of a tensor are not here."""
        return bool(self._ranges) and any(
            part.overlaps(tensor) for storage, part in self._ranges if not storage.expired()
        )

    def check(self, tensor: torch.Tensor) -> None:
        """Checks that the numbers of a tensor are here.

        Raises:
            SMPUsageError: They are not.
        """
        if self.has(tensor):
            raise SMPUsageError(STALE)
