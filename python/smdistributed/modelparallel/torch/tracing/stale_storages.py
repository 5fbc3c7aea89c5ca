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
    "this tensor was changed in place with values of a partition, by another tensor with the same storage or in an "
    "earlier microbatch or step, so this rank does not have its values: inside of one microbatch use the tensor that "
    "was changed, or else change a copy"
)


class StaleStorages:
    """The written ranges of storages, as long as the storages exist."""

    def __init__(self) -> None:
        self._ranges: list[tuple[StorageWeakRef, StorageRange]] = []
        #: Ranges that the body writes to, and no call that has the tensor in an attribute (ATN-2).
        self._of_body: list[tuple[StorageWeakRef, StorageRange]] = []
        #: Ranges that calls write to that have the tensor in an attribute, with the partition.
        self._of_calls: list[tuple[StorageWeakRef, StorageRange, int]] = []
        #: Ranges that get an autograd graph by the write.
        self._with_graph: list[tuple[StorageWeakRef, StorageRange]] = []
        #: Texts for some of the ranges.
        self._reasons: dict[StorageRange, str] = {}

    def add(
        self, tensor: torch.Tensor, own_rank: int | None = None, has_graph: bool = False, reason: str | None = None
    ) -> None:
        """Record that a task writes to a replicated tensor.

        Args:
            tensor: The tensor.
            own_rank: The partition of the task, if its module has the tensor in an attribute.
            has_graph: Whether the tensor gets a graph.
            reason: The text of the error when the tensor is used.
        """
        with torch._C.DisableTorchFunction():
            written = StorageWeakRef(tensor.untyped_storage()), StorageRange.of(tensor)
        if reason is not None:
            self._reasons[written[1]] = reason
        if own_rank is not None:
            if any(part == written[1] and not storage.expired() for storage, part, _ in self._of_calls):
                return
            self._of_calls.append((*written, own_rank))
        else:
            self._of_body.append(written)
        self._ranges.append(written)
        if has_graph:
            self._with_graph.append(written)

    def forget_freed(self) -> None:
        """Forget freed storages, because their addresses may be reused."""
        self._ranges = [each for each in self._ranges if not each[0].expired()]
        self._of_body = [each for each in self._of_body if not each[0].expired()]
        self._of_calls = [each for each in self._of_calls if not each[0].expired()]
        self._with_graph = [each for each in self._with_graph if not each[0].expired()]
        if self._reasons:
            kept = {part for _, part in self._ranges}
            self._reasons = {part: reason for part, reason in self._reasons.items() if part in kept}

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget a tensor whose values were copied to this rank."""
        part = StorageRange.of(tensor)
        self._ranges = [each for each in self._ranges if each[1] != part]
        self._of_body = [each for each in self._of_body if each[1] != part]
        self._of_calls = [each for each in self._of_calls if each[1] != part]
        self._with_graph = [each for each in self._with_graph if each[1] != part]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank lacks some values of a tensor."""
        return bool(self._ranges) and any(
            part.overlaps(tensor) for storage, part in self._ranges if not storage.expired()
        )

    def has_of_body(self, tensor: torch.Tensor) -> bool:
        """Return whether the body has written numbers of a partition to a tensor."""
        return any(part.overlaps(tensor) for storage, part in self._of_body if not storage.expired())

    @property
    def has_written_by_calls(self) -> bool:
        """Return whether calls have written to a tensor in an attribute of their module."""
        return bool(self._of_calls)

    def partition_of_calls(self, tensor: torch.Tensor) -> int | None:
        """Return the partition on which calls have written to a tensor in an attribute of their module."""
        for storage, part, rank in self._of_calls:
            if part.overlaps(tensor) and not storage.expired():
                return rank
        return None

    def check_graph(self, tensor: torch.Tensor) -> None:
        """Check that a tensor got no graph by a write to another tensor with the same storage.

        Raises:
            SMPUsageError: It got one.
        """
        if any(part.overlaps(tensor) for storage, part in self._with_graph if not storage.expired()):
            raise SMPUsageError(STALE)

    @property
    def is_empty(self) -> bool:
        """Return whether the body has written numbers of a partition to no tensor that exists."""
        return not self._of_body

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
            raise self.error(tensor)

    def error(self, tensor: torch.Tensor) -> SMPUsageError:
        """Return the error of the use of a tensor whose values this rank lacks."""
        return SMPUsageError(next((text for part, text in self._reasons.items() if part.overlaps(tensor)), STALE))
