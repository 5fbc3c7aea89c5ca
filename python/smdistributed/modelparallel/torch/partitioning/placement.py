"""The partitions of modules: those that the script chose, and those of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import SMPPartitionError
from smdistributed.modelparallel.torch.module_creation import created_modules
from smdistributed.modelparallel.torch.nn.module import units
from smdistributed.modelparallel.torch.partitioning import shared_memory
from smdistributed.modelparallel.torch.partitioning.shared_memory import is_light
from smdistributed.modelparallel.torch.state import state

#: Keys of a module's `__dict__` for the partition that the script chose: by a context at creation, or by a call.
_CREATED_IN, _SET_TO = "_smp_created_in", "_smp_set_to"


def _checked(index: int) -> int:
    partitions = state.cfg.pipeline_parallel_degree
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < partitions:
        raise SMPPartitionError(f"partition {index!r} does not exist: there are {partitions}")
    return index


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Return a context that assigns new modules to a partition.

    The innermost context takes precedence. It has no effect under ``auto_partition``, unlike :func:`set_partition`.

    Args:
        index: The partition, from 0.

    Yields:
        Nothing.

    Raises:
        SMPPartitionError: There is no such partition.
    """
    index = _checked(index)
    if state.cfg.auto_partition and state.cfg.pipeline_parallel_degree > 1:
        warn_once("`smp.partition` is ignored with `auto_partition: true`: set it to false, or use `smp.set_partition`")

    def place(module: nn.Module) -> None:
        module.__dict__[_CREATED_IN] = index

    with created_modules(place):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Assign a module to a partition, with all its submodules that have no partition of their own.

    Args:
        module: The module.
        index: The partition, from 0.

    Raises:
        SMPPartitionError: There is no such partition, or the model has been partitioned already.
    """
    if state.model is not None and state.model.is_partitioned and state.cfg.pipeline_parallel_degree > 1:
        raise SMPPartitionError("the model is already partitioned: set partitions before the first step")
    module.__dict__[_SET_TO] = _checked(index)


def manual_assignment(root: nn.Module) -> dict[str, int]:
    """Return the script's partitions by module path; the root's path is ``""``."""
    manual = {}
    for path, module in root.named_modules():
        chosen = module.__dict__.get(_SET_TO)
        if chosen is None and not state.cfg.auto_partition:
            chosen = module.__dict__.get(_CREATED_IN)
        if chosen is not None:
            manual[path] = chosen
    return manual


class Placement:
    """The partition of every module of a model.

    Attributes:
        assignment: Partitions by module path, as they were decided; those of other modules follow from them.
        shared: The memory of parameters and buffers that other places of the model refer to.
        in_tasks: The ids of the modules that are on one partition with all of a module around them.
    """

    def __init__(self, root: nn.Module, assignment: Mapping[str, int]) -> None:
        self.assignment = dict(assignment)
        for path, index in self.assignment.items():
            if not 0 <= index < state.cfg.pipeline_parallel_degree:
                degree = state.cfg.pipeline_parallel_degree
                raise SMPPartitionError(f"`{path}` is assigned to partition {index}, but there are only {degree}")
        self._by_path: dict[str, int] = {}
        #: Partitions by the modules' ids. `whole` contains the modules that are on one partition with all their
        #: submodules.
        self._by_module: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self.shared = shared_memory.find(root)
        self._place(root)
        if self._let_light_modules_follow(root):
            self._place(root)
        for path, module in root.named_modules():
            # A module without parameters, buffers or a partition of its own runs where its input is.
            if is_light(module) and not self._is_assigned(path):
                continue
            inside = {self._by_module[id(each)] for each in module.modules()}
            if len(inside) == 1:
                self.whole[id(module)] = inside.pop()
        self.in_tasks = {id(part) for each in root.modules() if id(each) in self.whole for part in each.modules()}
        self._check_shared()
        self._check_units(root)

    def _place(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            parent = self._by_path.get(path.rpartition(".")[0], self.assignment.get("", 0)) if path else 0
            self._by_path[path] = self._by_module[id(module)] = self.assignment.get(path, parent)

    def _is_assigned(self, path: str) -> bool:
        """Return whether a module or one of its submodules has a partition of its own."""
        return any(place == path or place.startswith(f"{path}.") for place in self.assignment)

    def _let_light_modules_follow(self, root: nn.Module) -> bool:
        """Assign modules without parameters and buffers to the partition of a tensor in their attributes (SHARE-1)."""
        paths = {id(module): path for path, module in root.named_modules()}
        found: dict[str, int] = {}
        for each in self.shared:
            path = paths[id(each.other)]
            if path and each.is_strict and is_light(each.other) and not self._is_assigned(path):
                found.setdefault(path, self.of(each.owner))
        self.assignment |= found
        return bool(found)

    def of_path(self, path: str) -> int:
        """Return the partition of the module with this path."""
        try:
            return self._by_path[path]
        except KeyError:
            raise SMPPartitionError(f"the model has no module `{path}`") from None

    def of(self, module: nn.Module) -> int:
        """Return the partition of a module of the model."""
        return self._by_module[id(module)]

    def _check_units(self, root: nn.Module) -> None:
        for unit in units(root):
            homes = sorted({self.of(module) for module in unit})
            if len(homes) > 1:
                path = next(path for path, module in root.named_modules() if module is unit[0])
                raise SMPPartitionError(
                    f"`{path}`, a {type(unit[0]).__name__}, is spread over partitions {homes}: a distributed module is "
                    "on one partition with all that is in it"
                )

    def _check_shared(self) -> None:
        """Check that shared memory is on one partition, unless the forward that uses it runs on all ranks (SHARE-1)."""
        for each in self.shared:
            home, other = self.of(each.owner), self.of(each.other)
            if home == other or not (each.is_registered or (each.is_strict and id(each.other) in self.in_tasks)):
                continue
            what = "are one tensor" if each.is_alias else "share memory"
            raise SMPPartitionError(
                f"`{each.path}` on partition {home} and `{each.other_path}` on partition {other} {what}: modules that "
                "share parameters or buffers, or views of them, go to one partition"
            )


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the parameters and buffers of ``module`` itself: the dict that contains them, their names and values."""
    for table in (module._parameters, module._buffers):
        for name, tensor in list(table.items()):
            if tensor is not None:
                yield table, name, tensor
