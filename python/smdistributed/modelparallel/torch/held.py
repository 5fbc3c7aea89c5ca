"""Replicated tensors that tasks hold: the body may write to them before the tasks run.

A task runs after the body, with the numbers that its arguments had at the call (REC-5). So before the body writes to a storage
that tasks hold, these tasks get a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.handle import Handle, Lost
from smdistributed.modelparallel.torch.unread import Unread

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tasks import Task


class HeldTensors:
    """Those of all microbatches of one step.

    Attributes:
        has_backward: Whether some microbatch has called ``model.backward``.
    """

    def __init__(self) -> None:
        self.has_backward = False
        self._tasks: dict[int, list[Task]] = {}
        #: Handles of located views of replicated tensors.
        self._views: dict[int, list[tuple[weakref.ref[Handle], torch.Tensor]]] = {}

    def add(self, task: Task, tensors: Sequence[torch.Tensor]) -> None:
        """Notes the replicated tensors among the arguments of a task."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._tasks.setdefault(_storage(tensor), []).append(task)

    def add_view(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Notes that a located tensor shares its storage with a replicated one."""
        self._views.setdefault(_storage(tensor), []).append((weakref.ref(handle), tensor))

    def lose_views(self, tensor: torch.Tensor, reason: str) -> None:
        """Located views of a replicated tensor that changes cannot be followed."""
        for reference, _ in self._views.pop(_storage(tensor), ()):
            handle = reference()
            if handle is not None:
                handle.value = Lost(f"this tensor is a view of another one, and {reason}: use a copy of either")  # type: ignore[assignment]

    def call(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Any:
        """Calls a function of replicated tensors, which may write to them.

        Raises:
            SMPUsageError: it wrote to a tensor that a task holds, and its name does not tell.
        """
        held = [tensor for tensor in tensors if tensor.layout == torch.strided and self._holds(tensor)]
        if not held:
            return func(*args, **kwargs)
        if _may_write(func, args, kwargs):
            for tensor in held:
                self._release(tensor, func)
            return func(*args, **kwargs)
        versions = [_version(tensor) for tensor in held]
        result = func(*args, **kwargs)
        if versions != [_version(tensor) for tensor in held]:
            raise SMPUsageError(
                f"`{getattr(func, '__name__', func)}` changed a tensor in place that a module was called with before, inside "
                "of a `smp.step` function: change a copy"
            )
        return result

    def _holds(self, tensor: torch.Tensor) -> bool:
        storage = _storage(tensor)
        return storage in self._tasks or storage in self._views

    def _release(self, tensor: torch.Tensor, func: Any) -> None:
        """Gives a copy to the tasks that hold the storage of ``tensor``."""
        storage = _storage(tensor)
        copies: dict[int, torch.Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Unread) or leaf.layout != torch.strided:
                return leaf
            if _storage(leaf) != storage:
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.clone()
            return copies[id(leaf)]

        # A copy that is made in inference mode could not be saved for a backward.
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            for task in self._tasks.pop(storage, ()):
                task.replace_leaves(copied)
        self.lose_views(tensor, f"`{getattr(func, '__name__', func)}` changed that in place")


class StorageRange(NamedTuple):
    """The part of a storage that a strided tensor covers, in bytes."""

    storage: int
    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageRange:
        """The range of a tensor."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * tensor.itemsize
        return cls(_storage(tensor), begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin)

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares bytes of the range."""
        if tensor.layout != torch.strided or _storage(tensor) != self.storage:
            return False
        other = StorageRange.of(tensor)
        return other.begin < self.end and self.begin < other.end


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()._cdata


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
