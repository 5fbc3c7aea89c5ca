"""Copy-on-write of replicated tensors that recorded tasks refer to.

A task runs after the body, with the values that its arguments had at the call (REC-5). Before the body writes to
memory that tasks refer to, those tasks get a copy of it.

Slices of one batch share a storage, and autograd's version counter, on the first rank only, because the other ranks
receive them separately. Tasks therefore get a copy if they share the storage, so that the write does not invalidate
what autograd has saved. Errors depend on the memory that tensors cover, which is the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.placeholders import UnreadTensor
from smdistributed.modelparallel.torch.tracing.remote_tensor import (
    InvalidatedValue,
    RemoteTensor,
    offset_of,
    version_of,
)

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.attributes.module_state import AttributeSnapshot, ModuleState
    from smdistributed.modelparallel.torch.tracing.tasks import Task, Value


class CopyOnWriteTensors:
    """The replicated tensors to which tasks of one step refer.

    Args:
        modules: The attributes of modules, which tasks read.

    Attributes:
        has_backward: Whether some microbatch has called ``model.backward``.
        before_write: Called before the body writes to a storage to which tasks refer, if some tasks have run already,
        because autograd may have saved it.
    """

    def __init__(self, modules: ModuleState) -> None:
        self._modules = modules
        self.has_backward = False
        self.before_write: Callable[[], None] | None = None
        #: For each storage, the tasks that hold a tensor of it, with their microbatches.
        self._tasks: dict[int, list[tuple[int, Task, torch.Tensor]]] = {}
        #: For each storage, tensors that tasks got a copy of although the write did not change them.
        self._copied: dict[int, list[tuple[int, Task, torch.Tensor]]] = {}
        #: For each storage, attributes with tensors of it: path, tasks of the microbatch, their number then, tensor.
        self._attributes: dict[int, list[tuple[str, Sequence[Task], int, torch.Tensor]]] = {}
        #: Tensors that activation checkpoints of the body read. One process reads them again in the next backward.
        self._checkpointed: list[torch.Tensor | Value] = []
        #: For each checkpoint whose function is running: replicated tensors that it reads, storages that it makes, and
        #: the attributes of modules when it began.
        self._reading: list[tuple[list[torch.Tensor], set[int], AttributeSnapshot]] = []
        #: For each checkpoint until the next backward: the modules that its function called, and those attributes.
        self._checkpointed_modules: list[tuple[list[nn.Module], AttributeSnapshot]] = []
        #: Remote tensors of located views of replicated tensors.
        self._views: dict[int, list[tuple[weakref.ref[RemoteTensor], torch.Tensor]]] = {}

    def add(self, task: Task, tensors: Sequence[torch.Tensor], microbatch: int) -> None:
        """Record the replicated tensors among the arguments of a task."""
        for read, _, _ in self._reading:
            read += (tensor for tensor in tensors if tensor.layout != torch.strided)
        self.add_strided(
            task, [(tensor, storage_of(tensor)) for tensor in tensors if tensor.layout == torch.strided], microbatch
        )

    def add_strided(self, task: Task, tensors: Sequence[tuple[torch.Tensor, int]], microbatch: int) -> None:
        """Record replicated tensors among the arguments of a task, with the ids of their storages."""
        for read, _, _ in self._reading:
            read += (tensor for tensor, _ in tensors)
        for tensor, storage in tensors:
            held = self._tasks.get(storage)
            if held is None:
                held = self._tasks[storage] = []
            held.append((microbatch, task, tensor))

    def add_view(self, remote: RemoteTensor, tensor: torch.Tensor) -> None:
        """Record that a located tensor shares its storage with a replicated one."""
        self._views.setdefault(storage_of(tensor), []).append((weakref.ref(remote), tensor))

    def lose_views(self, tensor: torch.Tensor, reason: str) -> None:
        """Invalidate the located views of a replicated tensor that is about to change."""
        kept = []
        for reference, held in self._views.pop(storage_of(tensor), ()):
            remote = reference()
            if remote is not None and not overlap(held, tensor):
                kept.append((reference, held))
            elif remote is not None:
                remote.value = InvalidatedValue(
                    f"this tensor is a view of another one, and {reason}: use a copy of either"
                )  # type: ignore[assignment]
        if kept:
            self._views[storage_of(tensor)] = kept

    def _saved(self, tensors: Sequence[torch.Tensor], microbatch: int) -> list[tuple[torch.Tensor, int, Task]]:
        """Return tensors in these storages that autograd saves for backwards of tasks, with their versions."""
        found = []
        for storage in {storage_of(tensor) for tensor in tensors}:
            for number, task, _ in self._tasks.get(storage, ()):
                # In one process, the backward of a microbatch before has been.
                if number == microbatch:
                    found += [
                        (leaf, version_of(leaf), task)
                        for leaf in task.saved()
                        if isinstance(leaf, torch.Tensor)
                        and leaf.layout == torch.strided
                        and storage_of(leaf) == storage
                    ]
            copied = self._copied.get(storage, ())
            found += [(tensor, version_of(tensor), task) for number, task, tensor in copied if number == microbatch]
        return found

    def check_unversioned(self, microbatch: int, tensor: torch.Tensor, name: str) -> None:
        """Check that autograd's version counter registers a task's write to a replicated tensor.

        Only tensors that autograd has saved are checked.

        Raises:
            SMPUsageError: The write is not registered.
        """
        saved = self._saved([tensor], microbatch)
        if not saved or tensor.is_inference():
            return
        # The task writes to a copy. A counter that stays incremented would invalidate what autograd has saved of other
        # slices of the batch.
        with torch._C.DisableTorchFunction(), torch.autograd._unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            _check_versions(saved, [tensor], name)

    def call(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any], microbatch: int) -> Any:
        """Call a function of replicated tensors, which may write to them.

        Raises:
            SMPUsageError: It wrote to a tensor to which a task refers, although its name does not show that.
        """
        if self._reading:
            result = self._call(func, args, kwargs, tensors, microbatch)
            self._note_read(tensors, result)
            return result
        return self._call(func, args, kwargs, tensors, microbatch)

    def _call(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any], microbatch: int) -> Any:
        if self._modules.views.has_some and tensors and _may_write(func, args, kwargs):
            self._modules.views.check_write(_name(func), [_target(kwargs, tensors)])
        if self._checkpointed and _may_write(func, args, kwargs) and tensors:
            self.check_checkpointed(_target(kwargs, tensors), _name(func))
        held = [tensor for tensor in tensors if tensor.layout == torch.strided and self._holds(tensor)]
        if not held:
            return func(*args, **kwargs)
        if _may_write(func, args, kwargs):
            if self.before_write is not None:
                self.before_write()
            saved = self._saved(held, microbatch)
            if func == _SET_DATA:
                self._check_attributes(held[:1], func)
                for tensor, _, task in saved:
                    if tensor is args[0]:
                        raise unversioned_write("data.__set__", task)
                self.lose_views(args[0], "`data.__set__` changed that in place")
            for storage in {storage_of(tensor) for tensor in held}:
                self._release(storage)
            versions = [version_of(tensor) for tensor in held]
            copies = self._modules.copies_before_write(held)
            result = func(*args, **kwargs)
            written = [
                tensor
                for tensor, version in zip(held, versions, strict=True)
                if version_of(tensor) != version or tensor.is_inference()
            ]
            target = _target(kwargs, tensors)
            if any(tensor is target for tensor in written):
                # Pieces of one batch have one version, so other operands may only seem to be written.
                written = [each for each in written if storage_of(each) != storage_of(target) or overlap(each, target)]
            _check_versions(saved, written, _name(func))
            self._note_written(written, func)
            self._modules.after_write(copies, written, _name(func))
            return result
        held = [tensor for tensor in held if self._overlaps(tensor)]
        versions = [version_of(tensor) for tensor in held]
        result = func(*args, **kwargs)
        if versions != [version_of(tensor) for tensor in held]:
            raise SMPUsageError(
                f"`{getattr(func, '__name__', func)}` changed a tensor in place after a module had been called with "
                "it, inside of a `smp.step` function: change a copy"
            )
        return result

    def begin_checkpoint(self) -> None:
        """Begin to record what the function of a checkpoint reads."""
        self._modules.note_contents()
        self._reading.append(([], set(), self._modules.current))

    def end_checkpoint(self, values: Iterable[Value], modules: list[nn.Module]) -> None:
        """End the function of a checkpoint.

        Args:
            values: The storages of values that it reads.
            modules: The modules that it called.
        """
        read, made, attributes = self._reading.pop()
        self._checkpointed_modules.append((modules, attributes))
        known = {id(each) for each in self._checkpointed}
        for tensor in read:
            if tensor.layout == torch.strided and id(tensor) not in known and storage_of(tensor) not in made:
                known.add(id(tensor))
                self._checkpointed.append(tensor)
        self._checkpointed += values

    def _note_read(self, tensors: Sequence[Any], result: Any) -> None:
        storages = {storage_of(tensor) for tensor in tensors if tensor.layout == torch.strided}
        new = [
            storage_of(tensor)
            for tensor in pytree.tensors_of(result)
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        ]
        for read, made, _ in self._reading:
            read += tensors
            made.update(storage for storage in new if storage not in storages)

    def end_of_checkpoints(self) -> None:
        """End the effect of all checkpoints so far, because the body has called ``model.backward``.

        Raises:
            SMPUsageError: An attribute of a module that a checkpoint's function called has changed since. One process
                would compute the function again, with the changed attribute.
        """
        for modules, attributes in self._checkpointed_modules:
            path = self._modules.changed_since(attributes, modules)
            if path is not None:
                raise SMPUsageError(
                    f"`{path}` is changed after a `torch.utils.checkpoint.checkpoint` whose function calls the module, "
                    "before `model.backward`, inside of a `smp.step` function: change it after the backward"
                )
        self._checkpointed_modules.clear()
        self._checkpointed.clear()

    def check_checkpointed(self, written: torch.Tensor | Value, name: str) -> None:
        """Check that a write in place does not change what the function of a checkpoint reads.

        One process would compute the function again, with the changed tensor.

        Raises:
            SMPUsageError: It does.
        """
        for held in self._checkpointed:
            if held is written or (
                isinstance(held, torch.Tensor) and isinstance(written, torch.Tensor) and overlap(held, written)
            ):
                raise SMPUsageError(
                    f"`{name}` changes a tensor in place that the function of a `torch.utils.checkpoint.checkpoint` "
                    "reads, before the backward, inside of a `smp.step` function: change a copy"
                )

    def hold_attribute(self, tensor: torch.Tensor, path: str, tasks: Sequence[Task]) -> None:
        """Record that the body has assigned a replicated tensor to an attribute, which later tasks may read."""
        if tensor.layout == torch.strided:
            self._attributes.setdefault(storage_of(tensor), []).append((path, tasks, len(tasks), tensor))

    def _check_attributes(self, tensors: Sequence[torch.Tensor], func: Any) -> None:
        """Check that no task reads these tensors, which the body changes in place, from an attribute.

        Raises:
            SMPUsageError: A task may read one.
        """
        for tensor in tensors:
            for path, tasks, count, held in self._attributes.get(storage_of(tensor), ()):
                if len(tasks) > count and overlap(held, tensor):
                    raise SMPUsageError(
                        f"`{getattr(func, '__name__', func)}` changes the tensor in `{path}` in place, inside of a "
                        "`smp.step` function, and modules that were called before read it later: assign a changed "
                        "copy to the attribute"
                    )

    def is_used(self, tensor: torch.Tensor) -> bool:
        """Return whether a task refers to memory of a replicated tensor."""
        return any(overlap(held, tensor) for _, _, held in self._tasks.get(storage_of(tensor), ()))

    def _holds(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return any(
            storage in known for known in (self._tasks, self._copied, self._views, self._attributes)
        ) or self._modules.tensors.has_storage(storage)

    def _overlaps(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        # In reverse order, because most matches are tasks of the current microbatch.
        return any(
            held is tensor or overlap(held, tensor)
            for held in (
                *(each[-1] for each in reversed(self._tasks.get(storage, ()))),
                *(each[-1] for each in self._views.get(storage, ())),
                *(each[-1] for each in self._attributes.get(storage, ())),
            )
        )

    def _release(self, storage: int) -> None:
        """Make earlier tasks read a copy of their tensors in a storage, before the storage changes."""
        copies: dict[int, torch.Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, UnreadTensor) or leaf.layout != torch.strided:
                return leaf
            if storage_of(leaf) != storage:
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.clone()
            return copies[id(leaf)]

        # Copied outside of inference mode, because an inference tensor cannot be saved for a backward.
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            held = self._tasks.pop(storage, [])
            for number, task, each in held:
                if any(leaf is each for leaf in task.saved()):
                    self._copied.setdefault(storage, []).append((number, task, each))
            for _, task, _ in held:
                task.replace_leaves(copied)

    def _note_written(self, written: Sequence[torch.Tensor], func: Any) -> None:
        """Record that the body has written to these tensors.

        Autograd registers writes to saved tensors, unless they went through ``.data``; these have raised.
        """
        for tensor in written:
            storage = storage_of(tensor)
            if storage in self._copied:
                self._copied[storage] = [each for each in self._copied[storage] if not overlap(each[-1], tensor)]
            self._check_attributes([tensor], func)
            self.lose_views(tensor, f"`{_name(func)}` changed that in place")


class StorageRange(NamedTuple):
    """The bytes of a storage that a strided tensor covers."""

    storage: int
    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageRange:
        """Return the range of a tensor."""
        with torch._C.DisableTorchFunction():
            last = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = offset_of(tensor) * tensor.itemsize
        return cls(storage_of(tensor), begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin)

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self.end - self.begin

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares bytes of the range."""
        if tensor.layout != torch.strided or storage_of(tensor) != self.storage:
            return False
        other = StorageRange.of(tensor)
        return other.begin < self.end and self.begin < other.end


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    with torch._C.DisableTorchFunction():
        return one is other or (one.layout == torch.strided and StorageRange.of(one).overlaps(other))


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of the storage of a strided tensor."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()._cdata


#: Replaces a tensor's values, even if autograd has saved it.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def unversioned_write(name: str, saver: Task) -> SMPUsageError:
    """Return the error of a write that autograd's version counter does not register."""
    return SMPUsageError(
        f"`{name}` writes in place through `.data` to a tensor that autograd has saved for the backward of "
        f"`{saver.name}`: its gradient would be wrong; write to a copy"
    )


def _check_versions(
    saved: Sequence[tuple[torch.Tensor, int, Task]], written: Sequence[torch.Tensor], name: str
) -> None:
    """Check that the versions of saved tensors have changed if they were written to."""
    ranges = [StorageRange.of(tensor) for tensor in written]
    for tensor, version, task in saved:
        if version_of(tensor) == version and any(each.overlaps(tensor) for each in ranges):
            raise unversioned_write(name, task)


def _target(kwargs: Any, tensors: Sequence[Any]) -> Any:
    """Return the operand to which a function writes in place: that of `out`, or the first one."""
    out = kwargs.get("out")
    return out if isinstance(out, torch.Tensor) else tensors[0]


def _may_write(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function's name or arguments show that it changes an operand in place."""
    schemas = getattr(func, "_schemas", None) or getattr(func, "_schema", None)
    if schemas is not None:
        schemas = schemas.values() if isinstance(schemas, dict) else [schemas]
        return any(schema.is_mutable for schema in schemas)
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in _NO_WRITES)
    # `inplace` may be a positional argument.
    return name.endswith("_") or True in [arg for arg in args if type(arg) is bool]


_NO_WRITES = frozenset({"__index__", "__int__", "__invert__", "__iter__", "__init__"})
