"""What calls change on their partition only: containers and tensors in attributes, and tensors from outside.

It is noted once in a step, because the script may put other containers and tensors into attributes between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.tracing.copy_on_write import storage_of
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec
from smdistributed.modelparallel.torch.tracing.state_order import state_of
from smdistributed.modelparallel.torch.tracing.tasks import Task

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline


def is_alike(module: nn.Module | None, spec: OutputSpec) -> bool:
    """Return whether a module's attributes have all that its calls changed when the spec was found."""
    if module is None or not spec.changed_state:
        return True
    module = getattr(module, "_orig_mod", module)
    return all(part.find(module) is not None for part in spec.changed_state)


def note(pipeline: Pipeline, task: Task, spec: OutputSpec) -> None:
    """Record what a call changes in attributes."""
    noted, key = pipeline.module_state.noted, (id(task.module), id(spec))
    if task.module is None or key in noted:
        return
    noted[key] = spec
    module = getattr(task.module, "_orig_mod", task.module)
    note_parts(pipeline, task, [part.find(module) for part in spec.changed_state])


def note_changes(pipeline: Pipeline, task: Task, spec: OutputSpec, others: Sequence[torch.Tensor]) -> None:
    """Note in a task what its call changes (ORD-3)."""
    if task.module is None or not (spec.changed_state or spec.written_state or others):
        return
    module = getattr(task.module, "_orig_mod", task.module)
    found = [id_of(part) for part in (*(part.find(module) for part in spec.changed_state), *others) if part is not None]
    for _, tensor in state_of(module, spec.written_state):
        value = None if tensor is None else pipeline.located.get(id(tensor))
        if value is not None and value.owner is not None:
            found += [id(tensor), value.owner]
        for other, owner in pipeline.attribute_views.overlapping_tensors(tensor):
            found += [id(other), id(owner)]
    task.changes = tuple(dict.fromkeys(found))
    pipeline.module_state.shared.matter = True


def id_of(part: Any) -> int:
    """Return the id of a container, or of the storage of a tensor."""
    return storage_of(part) if isinstance(part, torch.Tensor) else id(part)


def note_parts(pipeline: Pipeline, task: Task, parts: Sequence[Any]) -> None:
    """Record containers and tensors that a call changes.

    Raises:
        SMPUsageError: Modules on other partitions have one, too.
    """
    pipeline.attribute_views.check_write(task.name, [part for part in parts if isinstance(part, torch.Tensor)])
    pipeline.module_state.shared.note(task.name, task.rank, parts)
    for part in parts:
        if isinstance(part, torch.Tensor):
            pipeline.stale_storages.add(part, own_rank=task.rank)
