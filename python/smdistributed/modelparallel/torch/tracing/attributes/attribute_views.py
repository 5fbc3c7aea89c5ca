"""Attributes that are parameters or buffers of the model, or views of them.

Partitions other than the tensor's keep the memory that the attribute had when the model was divided.

- VIEW-1: an attribute that is the parameter or buffer itself counts as such on all ranks.
- VIEW-2: a view of a parameter must not be used by the body, because optimizers change parameters between steps.
- VIEW-3: a view of a buffer may be used until a step changes the buffer. Then, a call or a use of the view on another
  partition raises. A loaded state reaches the views on all partitions.
- VIEW-4: the body must not write through a view, and calls must not write through any such attribute.
- VIEW-5: calls that read a view are ordered as calls that read the parameter or buffer (ORD-3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import communication
from smdistributed.modelparallel.torch.partitioning.shared_memory import SharedMemory, entry, is_light
from smdistributed.modelparallel.torch.tracing.copy_on_write import overlap, storage_of, version_of
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.partitioning.placement import Placement
    from smdistributed.modelparallel.torch.tracing.recording import Recording
    from smdistributed.modelparallel.torch.tracing.tasks import Task, Value


class AttributeViews:
    """The attributes of one model that share memory with parameters or buffers.

    Args:
        placement: The partitions of the modules, and what they share.
        rank: This rank's partition.
        stale: The storages whose values this rank lacks.
    """

    def __init__(self, placement: Placement, rank: int, stale: StaleStorages) -> None:
        self._placement, self._rank, self._stale = placement, rank, stale
        self._attributes = [each for each in placement.shared if not each.is_registered]
        self._overlapping = [each for each in placement.shared if each.is_registered and not each.is_alias]
        #: The parameters and buffers of the attributes as they are since the model was divided, by path.
        self._entries = {each.path: entry(each.owner, each.path) for each in self._attributes}
        self._by_storage: dict[int, list[SharedMemory]] = {}
        self._by_path: dict[str, list[SharedMemory]] = {}
        for each in self._attributes:
            self._by_storage.setdefault(storage_of(each.other_tensor), []).append(each)
            self._by_path.setdefault(each.path, []).append(each)
            if isinstance(each.tensor, nn.Parameter):
                self._invalidate(each)
        #: Attributes of modules that do not run on the tensor's partition, by the tensor's path.
        self._elsewhere = {path: list(self._not_at_home(found)) for path, found in self._by_path.items()}
        #: The other tensors of this rank that represent the same parameter or buffer, by the id of one (VIEW-1).
        self._same: dict[int, list[torch.Tensor]] = {}
        #: Buffers of this rank that other partitions have in attributes: their versions, and copies.
        self._sent: dict[str, tuple[int, torch.Tensor]] = {}

    @property
    def has_some(self) -> bool:
        """Return whether some attribute shares memory with a parameter or buffer."""
        return bool(self._attributes)

    def _invalidate(self, each: SharedMemory) -> None:
        self._stale.add(
            each.other_tensor,
            own_rank=self._placement.of(each.owner),
            reason=f"`{each.other_path}` shares memory with `{each.path}`, which is on partition "
            f"{self._placement.of(each.owner)} and changes: use `{each.path}` itself, or a copy",
        )

    def _is_current(self, each: SharedMemory) -> bool:
        """Return whether the script has not replaced the parameter or buffer since the model was divided."""
        return entry(each.owner, each.path) is self._entries[each.path]

    def _not_at_home(self, attributes: Iterable[SharedMemory]) -> Iterator[SharedMemory]:
        """Yield the attributes of modules that run in tasks of another partition, or of any."""
        for each in attributes:
            if id(each.other) in self._placement.in_tasks:
                if self._placement.of(each.other) != self._placement.of(each.owner):
                    yield each
            elif is_light(each.other):
                yield each

    # Values.

    def locate(self, located: dict[int, Value], owners: dict[int, set[int]]) -> None:
        """Add the attributes that are parameters or buffers (VIEW-1), and the modules that reach these (VIEW-5).

        Args:
            located: The values of parameters and buffers, by the tensors' ids.
            owners: The ids of the modules that have a tensor, by its id.
        """
        self._same.clear()
        for each in self._attributes:
            now = entry(each.owner, each.path)
            if now is None or not self._is_current(each):
                continue
            if each.is_alias and each.other_tensor is not now:
                # All attributes have one tensor, the parameter or buffer from before the model was divided.
                located[id(each.other_tensor)] = located[id(now)]
                self._same[id(now)], self._same[id(each.other_tensor)] = [each.other_tensor], [now]
            owners[id(now)].add(id(each.other))
        for each in self._overlapping:
            one, other = entry(each.owner, each.path), entry(each.other, each.other_path)
            if one is not None and other is not None:
                owners[id(one)].add(id(each.other))
                owners[id(other)].add(id(each.owner))

    def same_as(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the other tensors that represent the same parameter or buffer."""
        return self._same.get(id(tensor), ())

    def ids_sharing_memory(self, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
        """Yield the ids of parameters and buffers whose memory these tensors in attributes may share (VIEW-5)."""
        for tensor in tensors if self._by_storage else ():
            for each in self._by_storage.get(storage_of(tensor), ()):
                now = entry(each.owner, each.path)
                if now is not None and self._is_current(each):
                    yield id(now)

    def send_values(self) -> None:
        """Give attributes on all partitions the values of buffers (VIEW-3). Collective in a pipeline."""
        buffers = {each.path: each for each in self._attributes if not isinstance(each.tensor, nn.Parameter)}
        if not buffers:
            return
        mine = {
            path: now.detach()
            for path, each in buffers.items()
            if self._placement.of(each.owner) == self._rank and (now := self._entries[path]) is not None
        }
        for found in communication.allgather(mine, CommGroup.PP_GROUP):
            for path, values in found.items():
                if path not in mine and not buffers[path].tensor.is_meta:
                    with torch.no_grad():
                        buffers[path].tensor.copy_(values)
        self._sent = {
            path: (version_of(tensor), tensor.clone()) for path, tensor in mine.items() if self._elsewhere[path]
        }

    def check_sent(self) -> None:
        """Check that the script has not written to a buffer that another partition has in an attribute.

        Raises:
            SMPUsageError: It has written to one.
        """
        for path, (version, values) in self._sent.items():
            buffer = self._entries[path]
            if buffer is None or version_of(buffer) == version:
                continue
            if not torch.equal(buffer, values):
                raise SMPUsageError(
                    f"the script has changed `{path}` in place; `{self._elsewhere[path][0].other_path}` on another "
                    "partition refers to the same tensor and keeps the old values: put both modules on one partition"
                )
            # For example, the first replica has sent its buffers.
            self._sent[path] = version_of(buffer), values

    # Writes.

    def overlapping_tensors(self, tensor: torch.Tensor | None) -> list[tuple[torch.Tensor, nn.Module]]:
        """Return the other parameters and buffers that share memory with one, with their modules."""
        found = []
        for each in self._overlapping if tensor is not None else ():
            one, other = entry(each.owner, each.path), entry(each.other, each.other_path)
            if tensor is one and other is not None:
                found.append((other, each.other))
            elif tensor is other and one is not None:
                found.append((one, each.owner))
        return found

    def note_written(self, recording: Recording, task: Task, paths: Iterable[str]) -> None:
        """Record that a task writes to parameters or buffers.

        Raises:
            SMPUsageError: Other partitions have one in an attribute (VIEW-3), or the body has used a view of it.
        """
        recording.pipeline.written_state.update(paths)
        for path in paths if self._by_path else ():
            for each in self._by_path.get(path, ()):
                if not self._is_current(each):
                    continue
                if any(other is each for other in self._elsewhere[path]):
                    raise SMPUsageError(
                        f"`{task.name}` on partition {task.rank} changes `{path}`; `{each.other_path}` of a module on "
                        "another partition refers to the same tensor and would keep the old values: put both modules "
                        "on one partition, or pass the tensor to the module"
                    )
                if not each.is_alias and recording.copy_on_write.is_used(each.other_tensor):
                    raise SMPUsageError(
                        f"`{task.name}` on partition {task.rank} changes `{path}`, and the `smp.step` function has "
                        f"used `{each.other_path}`, a view of it: use `{path}` itself"
                    )
                # Also an alias, because the script may put a view of it into an attribute later.
                self._invalidate(each)

    def check_write(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Check that tensors to which ``name`` writes are no views of parameters or buffers (VIEW-4).

        Raises:
            SMPUsageError: One is a view.
        """
        for tensor in tensors if self._by_storage else ():
            for each in self._by_storage.get(storage_of(tensor), ()) if tensor.layout == torch.strided else ():
                if overlap(each.other_tensor, tensor):
                    raise SMPUsageError(
                        f"`{name}` writes to `{each.other_path}`, which shares memory with `{each.path}`, inside of a "
                        f"`smp.step` function: write to `{each.path}` itself, in its module or in the function"
                    )
