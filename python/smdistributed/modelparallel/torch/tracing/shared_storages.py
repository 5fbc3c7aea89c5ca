"""Tensors of a step body that share a storage: a write to one of them is visible in all.

A value never changes (REC-3). So a task that writes to a storage creates a new value for every tensor of that storage
to which the body still refers, and their remote tensors refer to the new values. Values between two writes have one
base, and the executor gives them one storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.copy_on_write import overlap, unversioned_write
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec, SharedStorage
from smdistributed.modelparallel.torch.tracing.remote_tensor import InvalidatedValue, RemoteTensor, TensorMeta
from smdistributed.modelparallel.torch.tracing.state_order import state_of
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value, Write

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


class SharedStorages:
    """The shared storages of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        #: Remote tensors of values that share a storage, by the value that represents the storage.
        self._views: dict[Value, list[weakref.ref[RemoteTensor]]] = {}
        #: Replicated tensors of which located values are views, by the value that represents the storage.
        self._replicated_bases: dict[Value, torch.Tensor] = {}

    def add_writes(self, task: Task, leaves: Sequence[Any]) -> None:
        """Create new values for all tensors that a task changes (REC-3).

        Raises:
            SMPUsageError: Another argument is a view of a replicated tensor that the task changes. The partition would
                get copies, so it would not see the change.
        """
        # An in-place operation may make a tensor require a gradient.
        trains = task.context.grad and any(value.meta.requires_grad for value in task.inputs)
        taken = {value.index for value in task.inputs}

        # A write to a detached tensor leaves the graphs of the other tensors of its storage as they are.
        graphs = {
            (leaf.storage, leaf.detached)
            for leaf in (leaves[place] for place in task.known_spec.mutated)
            if isinstance(leaf, Value)
        }

        def new(source: Value | torch.Tensor, place: int | None = None) -> Value:
            meta = source.meta if isinstance(source, Value) else TensorMeta.of(source)
            has_graph = not isinstance(source, Value) or (source.storage, source.detached) in graphs
            if trains and has_graph and not meta.requires_grad:
                meta = meta._replace(requires_grad=meta.dtype.is_floating_point or meta.dtype.is_complex)
            value = self._recording.new_value(task.rank, task.level, meta)
            value.versioned = not isinstance(source, Value) or source.versioned
            task.outputs.append(value)
            if place is not None:
                task.writes.append(Write(place, value))
            elif isinstance(source, Value):
                value.detached = source.detached
                task.writes.append(Write(source, value, has_graph))
            if isinstance(source, Value) and source.parameter is None and source.index not in taken:
                taken.add(source.index)
                task.inputs.append(source)
            return value

        for place in task.known_spec.mutated:
            if not isinstance(leaves[place], Value):
                self._recording.copy_on_write.check_checkpointed(leaves[place], task.name)
                for other in leaves:
                    if isinstance(other, torch.Tensor) and other is not leaves[place] and overlap(other, leaves[place]):
                        raise SMPUsageError(
                            f"`{task.name}` on partition {task.rank} changes an argument in place of which another "
                            "argument is a view: pass a copy of either"
                        )
                new(leaves[place], place)
        for base, values in self.written(task.known_spec, leaves, task.rank).items():
            if base.rank != task.rank:
                new(values[0])
                continue
            new_base = new(base)
            new_base.home, new_base.owner = base.home, base.owner
            for value in values:
                if value is not base:
                    view = new(value)
                    view.base, view.offset = new_base, value.offset

    def state_of_call(self, task: Task, path: str | None) -> Value | None:
        """Return the value of a parameter or buffer that a called module has on its partition, by its path there."""
        if task.module is None or path is None:
            return None
        _, tensor = next(state_of(task.module, (path,)))
        value = self._recording.located.get(id(tensor))
        return value if type(value) is Value and value.rank == task.rank else None

    def lose_views_of_state(self, task: Task) -> None:
        """Invalidate the body's views of buffers or parameters that a called module writes to.

        If the body has written to such a buffer before, later reads use the buffer again, and not what the body wrote.
        """
        assert task.module is not None, "only a module has state"
        written = [tensor for _, tensor in state_of(task.module, task.known_spec.written_state)]
        for tensor in list(written):
            written += [other for other, _ in self._recording.pipeline.attribute_views.overlapping_tensors(tensor)]
        for tensor in written:
            value = self._recording.located.get(id(tensor))
            if tensor is None or type(value) is not Value:
                continue
            is_written = value is not self._recording.pipeline.located[id(tensor)]
            if not is_written and value.storage not in self._views:
                continue
            if value.storage_key not in task.overwritten:
                task.overwritten = (*task.overwritten, value.storage_key)
            for view in self._remote_tensors_of(value.storage):
                view.value = InvalidatedValue(
                    f"`{task.name}` on partition {task.rank} changed `{value.home}` in place, and this tensor is "
                    "a view of it: take the view again after the call, or a copy before it"
                )  # type: ignore[assignment]
            if is_written:
                self._recording.rebind(tensor, self._recording.pipeline.located[id(tensor)])

    def check_unversioned(self, task: Task, leaves: Sequence[Any]) -> None:
        """Check that a task does not write through ``.data`` to a tensor that autograd has saved.

        In one process, the backward would use the changed values. On partitions, it would use them only if the
        operation that saved the tensor runs in the same stage as the write.

        Raises:
            SMPUsageError: The task does so.
        """
        for place in task.known_spec.mutated:
            leaf = leaves[place]
            if not isinstance(leaf, Value):
                self._recording.copy_on_write.check_unversioned(self._recording.microbatch, leaf, task.name)
            elif (place in task.known_spec.unversioned or not leaf.versioned) and leaf.storage.parameter is None:
                saver = self._saver(leaf.storage, task)
                if saver is not None:
                    raise unversioned_write(task.name, saver)

    def check_not_saved(self, storage: Value, task: Task) -> None:
        """Check that a task which is called after ``model.backward`` does not write to what that backward needs.

        In one process the backward has run by then.

        Raises:
            SMPUsageError: An earlier task has saved a tensor of the storage.
        """
        # Stages that have run already got copies of what a later one writes to (EXE-3).
        first = self._recording.num_executed
        saver = self._saver(storage, task, first) if storage.parameter is None else None
        if saver is not None:
            raise SMPUsageError(
                f"`{task.name}` after `model.backward` changes in place a tensor that autograd has saved for the "
                f"backward of `{saver.name}`, which runs when the `smp.step` function has returned: change a copy"
            )

    def _saver(self, storage: Value, before: Task, first: int = 0) -> Task | None:
        """Return the last task before another one for whose backward autograd saves a tensor of a storage.

        Tasks before the one with the number ``first`` do not count.
        """
        savers: dict[Value, Task] = {}
        for task in self._recording.tasks[first:]:
            if task is before:
                continue
            for value in task.saved():
                if isinstance(value, Value):
                    savers[value.storage] = task
            for source, result, _ in task.writes:
                if isinstance(source, Value) and source.storage in savers:
                    savers.setdefault(result.storage, savers[source.storage])
                elif not isinstance(source, Value) and source in task.known_spec.saved:
                    savers[result.storage] = task
        return savers.get(storage)

    def written(self, spec: OutputSpec, leaves: Sequence[Any], rank: int) -> dict[Value, list[Value]]:
        """Return the values that change when a call on ``rank`` writes in place, by base; ``leaves`` are its arguments.

        For a storage of another partition, only the argument itself is included, because other views cannot be
        updated.
        """
        found: dict[Value, list[Value]] = {}
        for place in spec.mutated:
            leaf = leaves[place]
            if not isinstance(leaf, Value) or leaf.storage in found:
                continue
            base = leaf.storage
            values = [leaf]
            if base.rank == rank:
                values += [
                    base,
                    *(remote.value for remote in self._remote_tensors_of(base) if remote.value.rank == rank),
                    *(self._recording.located[id(tensor)] for tensor in self._recording.rebound_views(base)),
                ]
            found[base] = list(dict.fromkeys(values))
        return found

    def has_others(self, remote: RemoteTensor, storage: Value) -> bool:
        """Return whether the body refers to a storage by other tensors than this remote tensor."""
        others = [each for each in self._remote_tensors_of(storage) if each is not remote]
        return bool(others) or storage in self._replicated_bases or storage.parameter is not None

    def _remote_tensors_of(self, base: Value) -> list[RemoteTensor]:
        """Return the existing remote tensors of values that share a storage with others."""
        found: dict[int, RemoteTensor] = {}
        for reference in self._views.get(base, ()):
            remote = reference()
            if remote is not None and type(remote.value) is Value and remote.value.storage is base:
                found[id(remote)] = remote
        return list(found.values())

    def writes_alike(self, task: Task, tensors: list[torch.Tensor]) -> bool:
        """Return whether a task of the previous microbatch writes in place to the same values in this one."""
        if not task.writes:
            return True
        leaves = [
            tensor.value if type(tensor) is RemoteTensor else self._recording.located.get(id(tensor))
            for tensor in tensors
        ]
        known = {write.source for write in task.writes}
        written = self.written(task.known_spec, leaves, task.rank)
        return all(value in known for values in written.values() for value in values)

    def add_view(
        self, result: torch.Tensor, shared: SharedStorage, tensors: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Record that a remote tensor shares its storage."""
        if type(result) is not RemoteTensor:
            return
        if shared.place is None:
            if result.value.base is not None:
                self._views.setdefault(result.value.base, []).append(weakref.ref(result))
            return
        other = results[-1 - shared.place] if shared.place < 0 else tensors[shared.place]
        base = result.value.storage
        if not self._recording.is_located(other):
            self._replicated_bases[base] = other
            self._recording.copy_on_write.add_view(result, other)
            return
        if base in self._replicated_bases:
            # A view of a view of it.
            self._recording.copy_on_write.add_view(result, self._replicated_bases[base])
        remotes = self._views.setdefault(base, [])
        remotes.append(weakref.ref(result))
        if type(other) is RemoteTensor and other.value.storage is base:
            remotes.append(weakref.ref(other))

    def follow_writes(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Make the body's tensors refer to the values after a task's writes."""
        after = {write.source: write.result for write in task.writes}
        where = f"`{task.name}` on partition {task.rank}"
        for place in task.known_spec.mutated:
            tensor = tensors[place]
            old = tensor.value if type(tensor) is RemoteTensor else self._recording.located.get(id(tensor))
            if old is None:
                self._recording.rebind(tensor, after[place])
                self._recording.copy_on_write.lose_views(tensor, f"{where} changed that in place")
                continue
            base = old.storage
            views = self._remote_tensors_of(base)
            replicated = self._replicated_bases.pop(base, None)
            if replicated is not None:
                self._recording.rebind(replicated, InvalidatedValue(
                    f"{where} changed a tensor in place through a view that a module had returned: pass a copy to the "
                    "module, or use what it returned"
                ))  # fmt: skip
            if old in after:
                self._recording.rebind(tensor, after[old])
            for view in views:
                if view is not tensor:
                    lost = InvalidatedValue(
                        f"{where} changed the storage of this view in place, which lies on partition {base.rank}: take "
                        "the view again from the changed tensor, or change a copy"
                    )
                    moved = after.get(view.value)
                    view.set_value(lost if moved is None else moved)
            for rebound in self._recording.rebound_views(base):
                if rebound is not tensor:
                    now = after.get(self._recording.located[id(rebound)])
                    self._recording.rebind(rebound, InvalidatedValue(
                        f"{where} changed the storage of this tensor in place through a view: change a copy"
                    ) if now is None else now)  # fmt: skip
            if views and base in after:
                living = [weakref.ref(view) for view in (*views, tensor) if type(view) is RemoteTensor]
                self._views.setdefault(after[base].storage, []).extend(living)
