"""Copy-on-write of replicated tensors that recorded tasks refer to.

A task runs after the body, with the values that its arguments had at the call (REC-5). Before the body writes to memory
that tasks refer to, those tasks get a copy of it.

What counts is whether tensors overlap, not whether they share a storage: pieces of one batch share a storage on the
first rank only, because the other ranks receive them apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.placeholders import UnreadTensor
from smdistributed.modelparallel.torch.tracing.remote_tensor import InvalidatedValue, RemoteTensor, version_of

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.tasks import Task


class CopyOnWriteTensors:
    """The replicated tensors that tasks of one step refer to.

    Attributes:
        has_backward: Whether some microbatch has called ``model.backward``.
        before_write: Called before the body writes to a storage that tasks refer to, if some have run already: autograd
            may have saved it.
    """

    def __init__(self) -> None:
        self.has_backward = False
        self.before_write: Callable[[], None] | None = None
        #: By the storage, the tasks that hold a tensor of it, with their microbatches.
        self._tasks: dict[int, list[tuple[int, Task, torch.Tensor]]] = {}
        #: By the storage: attributes that hold tensors of it, the tasks of their microbatch, and how many there were.
        self._attributes: dict[int, list[tuple[str, Sequence[Task], int, torch.Tensor]]] = {}
        #: Remote tensors of located views of replicated tensors.
        self._views: dict[int, list[tuple[weakref.ref[RemoteTensor], torch.Tensor]]] = {}

    def add(self, task: Task, tensors: Sequence[torch.Tensor], microbatch: int) -> None:
        """Notes the replicated tensors among the arguments of a task."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._tasks.setdefault(storage_of(tensor), []).append((microbatch, task, tensor))

    def add_view(self, remote: RemoteTensor, tensor: torch.Tensor) -> None:
        """Notes that a located tensor shares its storage with a replicated one."""
        self._views.setdefault(storage_of(tensor), []).append((weakref.ref(remote), tensor))

    def lose_views(self, tensor: torch.Tensor, reason: str) -> None:
        """Located views of a replicated tensor that changes cannot be followed."""
        kept = []
        for reference, held in self._views.pop(storage_of(tensor), ()):
            remote = reference()
            if remote is not None and not _overlap(held, tensor):
                kept.append((reference, held))
            elif remote is not None:
                remote.value = InvalidatedValue(
                    f"this tensor is a view of another one, and {reason}: use a copy of either"
                )  # type: ignore[assignment]
        if kept:
            self._views[storage_of(tensor)] = kept

    def _saved(self, tensors: Sequence[torch.Tensor], microbatch: int) -> list[tuple[torch.Tensor, int, Task]]:
        """Tensors in the storages of ``tensors`` that autograd saves for the backward of tasks, with their versions."""
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
        return found

    def check_unversioned(self, microbatch: int, tensor: torch.Tensor, name: str) -> None:
        """Checks that autograd's version counter sees what a task writes to a replicated tensor.

        Only tensors whose numbers autograd has saved are checked.

        Raises:
            SMPUsageError: it does not.
        """
        saved = self._saved([tensor], microbatch)
        if not saved or tensor.is_inference():
            return
        torch.autograd.graph.increment_version(tensor)
        _check_versions(saved, [tensor], name)

    def call(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any], microbatch: int) -> Any:
        """Calls a function of replicated tensors, which may write to them.

        Raises:
            SMPUsageError: it wrote to a tensor that a task holds, and its name does not tell.
        """
        held = [tensor for tensor in tensors if tensor.layout == torch.strided and self._holds(tensor)]
        if not held:
            return func(*args, **kwargs)
        if _may_write(func, args, kwargs):
            if self.before_write is not None:
                self.before_write()
            self._check_attributes(held, func)
            saved = self._saved(held, microbatch)
            if func == _SET_DATA:
                for tensor, _, task in saved:
                    if tensor is args[0]:
                        raise unversioned_write("data.__set__", task)
            for tensor in held:
                self._release(tensor, func)
            versions = [version_of(tensor) for tensor in held]
            result = func(*args, **kwargs)
            written = [tensor for tensor, version in zip(held, versions, strict=True) if version_of(tensor) != version]
            _check_versions(saved, written, getattr(func, "__name__", str(func)))
            return result
        versions = [version_of(tensor) for tensor in held]
        result = func(*args, **kwargs)
        if versions != [version_of(tensor) for tensor in held]:
            raise SMPUsageError(
                f"`{getattr(func, '__name__', func)}` changed a tensor in place after a module had been called with "
                "it, inside of a `smp.step` function: change a copy"
            )
        return result

    def hold_attribute(self, tensor: torch.Tensor, path: str, tasks: Sequence[Task]) -> None:
        """Notes that the body has assigned a replicated tensor to an attribute, which tasks from now on read."""
        if tensor.layout == torch.strided:
            self._attributes.setdefault(storage_of(tensor), []).append((path, tasks, len(tasks), tensor))

    def _check_attributes(self, tensors: Sequence[torch.Tensor], func: Any) -> None:
        """Checks that no task reads these tensors, which the body changes in place, from an attribute.

        Raises:
            SMPUsageError: One may.
        """
        for tensor in tensors:
            for path, tasks, count, held in self._attributes.get(storage_of(tensor), ()):
                if len(tasks) > count and _overlap(held, tensor):
                    raise SMPUsageError(
                        f"`{getattr(func, '__name__', func)}` changes the tensor in `{path}` in place, inside of a "
                        "`smp.step` function, and modules that were called before read it later: assign a changed "
                        "copy to the attribute"
                    )

    def _holds(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        # The last ones first: most often they are those of this microbatch.
        return any(
            held is tensor or _overlap(held, tensor)
            for held in (
                *(each[-1] for each in reversed(self._tasks.get(storage, ()))),
                *(each[-1] for each in self._views.get(storage, ())),
                *(each[-1] for each in self._attributes.get(storage, ())),
            )
        )

    def _release(self, tensor: torch.Tensor, func: Any) -> None:
        """Copies what overlaps ``tensor`` for the tasks that refer to it."""
        storage = storage_of(tensor)
        held = self._tasks.get(storage, [])
        copies: dict[int, torch.Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, UnreadTensor) or leaf.layout != torch.strided:
                return leaf
            if not _overlap(leaf, tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.clone()
            return copies[id(leaf)]

        # A copy that is made in inference mode could not be saved for a backward.
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            for entry in held:
                if _overlap(entry[-1], tensor):
                    entry[1].replace_leaves(copied)
        if held:
            self._tasks[storage] = [entry for entry in held if not _overlap(entry[-1], tensor)]
        self.lose_views(tensor, f"`{getattr(func, '__name__', func)}` changed that in place")


class StorageRange(NamedTuple):
    """The part of a storage that a strided tensor covers, in bytes."""

    storage: int
    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageRange:
        """The range of a tensor."""
        last = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = int(tensor.storage_offset()) * tensor.itemsize
        return cls(storage_of(tensor), begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin)

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares bytes of the range."""
        if tensor.layout != torch.strided or storage_of(tensor) != self.storage:
            return False
        other = StorageRange.of(tensor)
        return other.begin < self.end and self.begin < other.end


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory."""
    with torch._C.DisableTorchFunction():
        return one is other or StorageRange.of(one).overlaps(other)


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies the storage of a strided tensor."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()._cdata


#: Gives a tensor other numbers, also where autograd has saved it.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def unversioned_write(name: str, saver: Task) -> SMPUsageError:
    """The error of a write that autograd's version counter does not see."""
    return SMPUsageError(
        f"`{name}` writes in place through `.data` to a tensor that autograd has saved for the backward of "
        f"`{saver.name}`: its gradient would be wrong; write to a copy"
    )


def _check_versions(
    saved: Sequence[tuple[torch.Tensor, int, Task]], written: Sequence[torch.Tensor], name: str
) -> None:
    """Checks that the versions of saved tensors have changed where something was written to them."""
    ranges = [StorageRange.of(tensor) for tensor in written]
    for tensor, version, task in saved:
        if version_of(tensor) == version and any(each.overlaps(tensor) for each in ranges):
            raise unversioned_write(name, task)


def _may_write(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function's name or arguments say that it changes an operand in place."""
    schemas = getattr(func, "_schemas", None) or getattr(func, "_schema", None)
    if schemas is not None:
        schemas = schemas.values() if isinstance(schemas, dict) else [schemas]
        return any(schema.is_mutable for schema in schemas)
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in _NO_WRITES)
    # Functions take `inplace` by position, too.
    return name.endswith("_") or True in [arg for arg in args if type(arg) is bool]


_NO_WRITES = frozenset({"__index__", "__int__", "__invert__", "__iter__", "__init__"})
