"""Encodes the arguments of a call: tensors are replaced by values, and a key describes the arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.placeholders import UnreadTensor
from smdistributed.modelparallel.torch.tracing.remote_tensor import InvalidatedValue, RemoteTensor, TensorMeta
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


class Encoder:
    """Replaces tensors by values, and describes the arguments by a key that is equal for equal calls.

    Attributes:
        inputs: The values among the arguments.
        leaves: All tensors among the arguments; located ones as values.
        tensors: The same as the body's tensors.
        unknown: Whether an argument cannot be described.
        containers: For a call of a module: lists, dictionaries and objects that it may change
        (``tracing/attributes/object_state.py``).
        in_containers: Indices, among all tensors, of those that are in such containers.
        may_read: Whether the operation can get integers instead of tensors if it reads their values.
    """

    __slots__ = (
        "_depth", "_key", "_known", "_located", "_recording", "containers", "in_containers", "inputs", "leaves",
        "may_read", "tensors", "unknown",
    )  # fmt: skip

    def __init__(self, located: Mapping[int, Any], recording: Recording | None = None) -> None:
        self._located, self._recording = located, recording
        self.containers: list[Any] = []
        self.in_containers: list[int] = []
        #: Numbers of the containers found so far, by id.
        self._known: dict[int, int] = {}
        #: Nesting depth of containers around the current item; -1 if containers are not described.
        self._depth = -1
        self._key: list[Any] = []
        self.inputs: list[Value] = []
        self.leaves: list[Any] = []
        self.tensors: list[Any] = []
        self.unknown = self.may_read = False

    def key(self) -> Any:
        """Return a key that is equal for calls with equal outputs."""
        return tuple(self._key)

    def stable(self) -> Any:
        """Return the key without parts that differ between processes."""
        return tuple(item for item in self._key if type(item) is not _Identity)

    def encode(self, value: Any) -> Any:
        """Return the same structure with tensors replaced by values."""
        self._describe(value, 4)
        return pytree.transform(value, self._leaf) if self.inputs else value

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a module's call with values, in their current state (OBJ-1)."""
        self._depth = 0
        self._describe(args, 4)
        self._key.append(tuple(kwargs))
        for item in kwargs.values():
            self._describe(item, 4)
        if self.containers:
            return object_state.snapshot(args, kwargs, self._leaf)
        if not self.inputs:
            return args, kwargs
        return pytree.transform(args, self._leaf), {key: pytree.transform(x, self._leaf) for key, x in kwargs.items()}

    def _leaf(self, tensor: Any) -> Any:
        return tensor.value if type(tensor) is RemoteTensor else self._located.get(id(tensor), tensor)

    def _value_of(self, remote: RemoteTensor) -> Value:
        return remote.value if self._recording is None else self._recording.value_of(remote)

    def _describe(self, value: Any, depth: int) -> None:
        key, kind = self._key, type(value)
        if kind not in pytree.ATOMS and self._depth >= 0 and object_state.is_container(kind):
            self._describe_container(value, kind, depth)
            return
        if kind is RemoteTensor or isinstance(value, torch.Tensor):
            if self._depth > 0:
                self.in_containers.append(len(self.leaves))
            located = self._value_of(value) if kind is RemoteTensor else self._located.get(id(value))
            if located is None and self._recording is not None:
                located = self._recording.value_of_replicated(value)
            if type(located) is InvalidatedValue:
                raise SMPUsageError(located.reason)
            self.tensors.append(value)
            if located is not None:
                self.inputs.append(located)
                self.leaves.append(located)
                key.append(("located", located.meta))
            else:
                self.leaves.append(value)
                key.append(TensorMeta.of(value) if value.layout == torch.strided else str(value.layout))
            return
        if kind in pytree.ATOMS:
            key.append((kind.__name__, str(value)) if kind in (float, complex) else (kind.__name__, value))
            return
        for base in (int, float, complex, str, bytes):
            if isinstance(value, base):
                # A subclass of a number or text, whose extra attributes do not change the value.
                key.append((kind.__qualname__, base.__repr__(value)))
                return
        if kind is slice:
            key.append("slice")
            for part in (value.start, value.stop, value.step):
                # The length of the result depends on the value of a tensor.
                self.unknown = self.unknown or isinstance(part, torch.Tensor)
                self._describe(part, depth)
            return
        if isinstance(value, list | tuple):
            key.append((kind.__name__, len(value)))
            for item in value:
                self._describe(item, depth)
            return
        if isinstance(value, dict):
            key.append((kind.__name__, tuple(map(str, value))))
            for item in value.values():
                self._describe(item, depth)
            return
        if kind in (set, frozenset) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            items = value if kind in (set, frozenset) else [getattr(value, x.name) for x in dataclasses.fields(value)]
            key.append((kind.__qualname__, len(items)))
            for item in items:
                self._describe(item, depth)
            return
        if isinstance(value, nn.Module) or callable(value):
            key.append(getattr(value, "__qualname__", kind.__qualname__))
            key.append(_Identity(value))
            return
        if kind.__module__ == "builtins" or depth == 0 or not hasattr(value, "__dict__"):
            key.append(kind.__qualname__)
            self.unknown = self.unknown or not isinstance(value, Ellipsis.__class__)
            return
        # Any other object is described by its attributes; tensors in them are not replaced.
        attributes = Encoder({})
        key.append(kind.__qualname__)
        for name, item in vars(value).items():
            key.append(name)
            attributes._describe(item, depth - 1)
        self.unknown = self.unknown or attributes.unknown
        key.extend(attributes._key)

    def _describe_container(self, value: Any, kind: type, depth: int) -> None:
        key = self._key
        known = self._known.get(id(value))
        if known is not None:
            key.append(("again", known))
            return
        self._known[id(value)] = len(self.containers)
        self.containers.append(value)
        state = object_state.State(value)
        key.append(kind.__qualname__)
        key.append(_Identity(kind))
        self._depth += 1
        if isinstance(value, dict):
            key.append(tuple(map(str, state.items)))
            for item in state.items.values():
                self._describe(item, depth)
        elif isinstance(value, list):
            key.append(len(state.items))
            for item in state.items:
                self._describe(item, depth)
        key.append(tuple(state.attributes))
        for item in state.attributes.values():
            self._describe(item, depth)
        self._depth -= 1


def leave_out(task: Task, unread: Collection[int]) -> None:
    """Remove tensors that a task never reads from its inputs; ``unread`` are their indices among all its tensors."""
    place = -1
    left: list[Value] = []

    def leaf(item: Any) -> Any:
        nonlocal place
        place += 1
        if type(item) is not Value:
            return item
        if place in unread:
            return UnreadTensor(item.meta, task.name)
        left.append(item)
        return item

    task.replace_leaves(leaf)
    task.inputs = left


class _Identity:
    """An object as part of a key, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value
