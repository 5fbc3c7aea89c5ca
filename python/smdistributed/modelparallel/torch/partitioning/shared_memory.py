"""Parameters and buffers whose memory another place of the model refers to: the same tensor, or a view of it.

The place is an entry of a module's parameters or buffers, or a plain attribute, also in a list or an object there.

- SHARE-1: modules that run in tasks go to one partition if they have parameters or buffers with common memory, or if
  one has a view of another one's parameter in an attribute. A module without parameters and buffers then follows the
  parameter's module.
- SHARE-2: attributes on other partitions may be views of a buffer, which often does not change: see
  ``tracing/attributes/attribute_views.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from smdistributed.modelparallel.exceptions import SMPPartitionError
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.tracked_container import ATOMS
from smdistributed.modelparallel.torch.tracing.copy_on_write import StorageRange, storage_of
from smdistributed.modelparallel.torch.tracing.remote_tensor import offset_of

#: Attributes that every module has.
_INTERNALS = frozenset(nn.Module().__dict__)


class SharedMemory(NamedTuple):
    """Memory that two places of a model refer to.

    Attributes:
        owner, path, tensor: The module that has the parameter or buffer first, its name in the model, and the tensor.
        other, other_path, other_tensor: The module, the name and the tensor of the other place.
        is_registered: Whether the other place is a parameter or buffer, and not an attribute.
        begin, stride: Where the other tensor begins in the first one, in bytes; and the first one's strides.
    """

    owner: nn.Module
    path: str
    tensor: torch.Tensor
    other: nn.Module
    other_path: str
    other_tensor: torch.Tensor
    is_registered: bool
    begin: int
    stride: tuple[int, ...]

    @property
    def is_inside(self) -> bool:
        """Return whether the other module contains the first one, or is the same."""
        return any(part is self.owner for part in self.other.modules())

    @property
    def is_strict(self) -> bool:
        """Return whether both modules must be on one partition, even if no step changes the tensor (SHARE-1)."""
        return self.is_registered or isinstance(self.tensor, nn.Parameter)

    @property
    def is_alias(self) -> bool:
        """Return whether both places have one tensor, and not views of one memory."""
        return self.other_tensor is self.tensor


def find(root: nn.Module) -> list[SharedMemory]:
    """Return all shared memory of a model's parameters and buffers, in the order of the modules."""
    found: list[SharedMemory] = []
    by_storage: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or not _has_storage(tensor):
                    continue
                full = f"{path}.{name}" if path else name
                known = by_storage.setdefault(storage_of(tensor), [])
                found += _sharing(known, module, full, tensor, True)
                known.append((module, full, tensor))
    contents: dict[int, list[torch.Tensor]] = {}
    for path, module in root.named_modules():
        for name, value in _attributes(module):
            if id(value) not in contents:
                contents[id(value)] = object_state.parts_of(value)[1]
            for tensor in contents[id(value)]:
                if _has_storage(tensor) and storage_of(tensor) in by_storage:
                    full = f"{path}.{name}" if path else name
                    found += _sharing(by_storage[storage_of(tensor)], module, full, tensor, False)
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        # Recurrent modules make their list of parameters anew when these are replaced.
        is_own = isinstance(module, nn.RNNBase) and name == "_flat_weights"
        if type(value) not in ATOMS and name not in _INTERNALS and not is_own:
            yield name, value


def _has_storage(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout == torch.strided


def _sharing(
    known: list[tuple[nn.Module, str, torch.Tensor]],
    module: nn.Module,
    path: str,
    tensor: torch.Tensor,
    is_registered: bool,
) -> Iterator[SharedMemory]:
    """Yield the first parameter or buffer that is the tensor, or else all that share memory with it."""
    same = [each for each in known if each[2] is tensor]
    for owner, first, registered in same[:1] or known:
        if registered is tensor or shares_elements(registered, tensor):
            begin = StorageRange.of(tensor).begin - StorageRange.of(registered).begin
            stride = tuple(registered.stride())
            yield SharedMemory(owner, first, registered, module, path, tensor, is_registered, begin, stride)


def shares_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage share an element. Columns of a matrix alternate, but share none."""
    first, second = StorageRange.of(one), StorageRange.of(other)
    begin, end = min(first.begin, second.begin), max(first.end, second.end)
    if not (first.begin < second.end and second.begin < first.end and one.numel() and other.numel()):
        return False
    if (one.is_contiguous() and other.is_contiguous()) or one.itemsize != other.itemsize:
        return True
    used = torch.zeros((end - begin) // one.itemsize, dtype=torch.bool, device="cpu")
    places = [
        used.as_strided(each.shape, each.stride(), (part.begin - begin) // one.itemsize)
        for each, part in ((one, first), (other, second))
    ]
    places[0].fill_(True)
    return bool(places[1].any())


def follow_moves(shared: Sequence[SharedMemory]) -> None:
    """Give views the memory of parameters and buffers that this rank has moved to its device or has allocated.

    Attributes that refer to delayed parameters stay without memory, so a call that reads one raises.

    Raises:
        SMPPartitionError: The parameter or buffer has another layout on the device than the view needs.
    """
    for each in shared:
        now = entry(each.owner, each.path)
        view = entry(each.other, each.other_path) if each.is_registered else each.other_tensor
        if now is None or view is None or now is view or view.is_meta or storage_of(now) == storage_of(view):
            continue
        inside = each.begin >= 0 and each.begin + StorageRange.of(view).size <= StorageRange.of(now).size
        if not inside or now.stride() != each.stride or now.itemsize != view.itemsize:
            raise SMPPartitionError(
                f"`{each.path}` and `{each.other_path}` share memory in a way that is lost on {now.device}: create the "
                "model on this device, or give each its own memory"
            )
        at = offset_of(now) + each.begin // now.itemsize
        view.data = now.detach().as_strided(view.shape, view.stride(), at)


def entry(module: nn.Module, path: str) -> torch.Tensor | None:
    """Return the parameter or buffer of a module that has this path in the model."""
    name = path.rpartition(".")[2]
    return module._parameters[name] if name in module._parameters else module._buffers.get(name)


def is_light(module: nn.Module) -> bool:
    """Return whether a module has neither parameters nor buffers."""
    return not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
