"""Containers, tensors, parameters and buffers that several modules have, and that calls change.

- MST-8: if a call changes a list, a dictionary, a set or an object that modules on other partitions also have in an
  attribute, it raises, because these would not get the change. So does a later call of a module that has got the
  container, or a changed tensor, in the meantime. Entries of a cache, which depend on shapes only, may be added.
- MST-9: the body must not read a container that a call changes (MST-4) through the attribute of any module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.attribute_tensors import AttributeTensor
from smdistributed.modelparallel.torch.tracing.attributes.tracked_container import ATOMS, TrackedContainer
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState

#: Attributes that every module has.
_INTERNALS = frozenset(nn.Module().__dict__)


class SharedParts:
    """What modules of a model share.

    Args:
        state: The attributes of the modules.
        modules: The modules that run in tasks.
        others: The modules that are divided among partitions.

    Attributes:
        matter: Whether some call has changed what other modules may have.
    """

    def __init__(self, state: ModuleState, modules: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
        self._state, self._modules, self._others = state, modules, others
        self.matter = False
        #: The ids of parameters and buffers that several modules have, by the ids of the modules.
        self._tied: dict[int, list[int]] = {}
        #: The ids of all parameters and buffers.
        self._registered: frozenset[int] = frozenset()
        #: The containers that calls have changed, by id, with the partition.
        self._changed: dict[int, tuple[Any, int]] = {}
        #: By the id of a container: the attributes that have it, as (id of the module, name); found when needed.
        self._holders: dict[int, set[tuple[int, str]]] | None = None

    def set_owners(self, owners: Mapping[int, Collection[int]]) -> None:
        """Set the ids of the modules that have a parameter or a buffer, by its id."""
        self._tied.clear()
        self._registered = frozenset(owners)
        for tensor, modules in owners.items():
            for module in modules if len(modules) > 1 else ():
                self._tied.setdefault(module, []).append(tensor)

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer of the model."""
        return id(tensor) in self._registered

    def tied_in(self, modules: Iterable[nn.Module]) -> Iterable[int]:
        """Return the ids of parameters and buffers of these modules that several modules of the model have."""
        if not self._tied:
            return ()
        return dict.fromkeys(tensor for module in modules for tensor in self._tied.get(id(module), ()))

    def keep(self, tracked: Collection[int]) -> None:
        """Forget changed containers, except those with these ids: what no module has is not kept alive."""
        self._changed = {each: value for each, value in self._changed.items() if each in tracked}

    def forget_holders(self) -> None:
        """Forget which attributes have a container, because the body has changed some."""
        self._holders = None

    def note(self, name: str, rank: int, parts: Sequence[Any]) -> None:
        """Note that a call on a partition changes containers and tensors.

        Raises:
            SMPUsageError: Modules on other partitions have one, too (MST-8, ATN-3).
        """
        self._check(name, rank, parts)
        containers = [part for part in parts if part is not None and not isinstance(part, torch.Tensor)]
        if not containers:
            return
        self._changed.update((id(each), (each, rank)) for each in containers)
        if self._holders is None:
            self._holders = {}
            for module in self._modules:
                for attribute, value in self._state.attributes_of(module):
                    for part in self._state.parts_of_value(value, attribute)[0]:
                        self._holders.setdefault(id(part.value), set()).add((id(module), attribute))
        holders = self._holders
        self._state.note_changed_attributes({key for each in containers for key in holders.get(id(each), ())})

    def _check(self, name: str, rank: int, parts: Iterable[Any]) -> None:
        for part in parts:
            if isinstance(part, torch.Tensor):
                path = next((each.path for each in self._state.tensors.sharing(part)), "")
                ranks = self._state.tensors.partitions(part)
            else:
                container = self._state.tracked(part)
                path, ranks = ("", set()) if container is None else (container.path, container.ranks)
            is_divided = self._is_in_divided_module(part)
            if ranks - {rank} or is_divided:
                others = "modules that are divided among partitions" if is_divided else "modules on other partitions"
                raise SMPUsageError(
                    f"a call of `{name}` on partition {rank} changes the content of `{path}`; {others} have "
                    "their own copy of it, which keeps the old content: return the content from the module and pass "
                    "it on, or give the modules of each partition their own"
                )

    def _is_in_divided_module(self, part: Any) -> bool:
        """Return whether a module that is divided among partitions has a container or a tensor in an attribute."""
        for module in self._others:
            for name, value in vars(module).items():
                if type(value) in ATOMS or name in _INTERNALS:
                    continue
                parts, tensors = object_state.parts_of(value)
                if any(each is part for each in (*parts, *tensors)):
                    return True
        return False

    def check_reached(
        self,
        rank: int | None,
        containers: Iterable[TrackedContainer],
        tensors: Iterable[AttributeTensor],
        stale: StaleStorages,
    ) -> None:
        """Check that calls on other partitions have not changed what a module on ``rank`` has.

        Raises:
            SMPUsageError: They have changed something (MST-8).
        """
        if not (self._changed or stale.has_written_by_calls):
            return
        changed: list[tuple[str, int | None]] = []
        if self._changed:
            changed += [(each.path, self._changed.get(id(each.value), (None, None))[1]) for each in containers]
        changed += [(each.path, stale.partition_of_calls(each.tensor)) for each in tensors]
        for path, other in changed:
            if rank is not None and other is not None and other != rank:
                raise SMPUsageError(
                    f"a call on partition {other} has changed the content of `{path}`; a module on partition "
                    f"{rank} has it now, with the old content: return the content from the module that changes it and "
                    "pass it on, or give the modules of each partition their own"
                )
