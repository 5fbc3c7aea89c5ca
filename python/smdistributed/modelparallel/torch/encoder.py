"""Arguments of a call as a task has them, and a description of them that is equal for equal calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import structure
from smdistributed.modelparallel.torch.handle import Handle, Lost, Meta
from smdistributed.modelparallel.torch.tasks import Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.recording import Recording


class Encoder:
    """Puts values in the place of handles, and describes what it meets.

    Attributes:
        inputs: Values that it met.
        leaves: All tensors that it met; located ones as values.
        tensors: The same as the body has them.
        unknown: Whether it met something that cannot be described.
    """

    __slots__ = ("_key", "_located", "_recording", "inputs", "leaves", "tensors", "unknown")

    def __init__(self, located: Mapping[int, Any], recording: Recording | None = None) -> None:
        self._located, self._recording = located, recording
        self._key: list[Any] = []
        self.inputs: list[Value] = []
        self.leaves: list[Any] = []
        self.tensors: list[Any] = []
        self.unknown = False

    def key(self) -> Any:
        """Equal for calls of which the same comes out."""
        return tuple(self._key)

    def stable(self) -> Any:
        """The same, without what differs between processes."""
        return tuple(item for item in self._key if type(item) is not _Identity)

    def encode(self, value: Any) -> Any:
        """The same structure with values."""
        self._describe(value, 4)
        return structure.transform(value, self._leaf) if self.inputs else value

    def _leaf(self, tensor: Any) -> Any:
        return tensor.value if type(tensor) is Handle else self._located.get(id(tensor), tensor)

    def _value_of(self, handle: Handle) -> Value:
        return handle.value if self._recording is None else self._recording.own(handle)

    def _describe(self, value: Any, depth: int) -> None:
        key, kind = self._key, type(value)
        if kind is Handle or isinstance(value, torch.Tensor):
            located = self._value_of(value) if kind is Handle else self._located.get(id(value))
            if type(located) is Lost:
                raise SMPUsageError(located.reason)
            self.tensors.append(value)
            if located is not None:
                self.inputs.append(located)
                self.leaves.append(located)
                key.append(("located", located.meta))
            else:
                if self._recording is not None:
                    self._recording.check_fresh(value)
                self.leaves.append(value)
                key.append(Meta.of(value) if value.layout == torch.strided else str(value.layout))
            return
        if kind in structure.ATOMS:
            key.append((kind.__name__, str(value)) if kind in (float, complex) else (kind.__name__, value))
            return
        if kind is slice:
            key.append("slice")
            for part in (value.start, value.stop, value.step):
                # What comes out is as long as a tensor in it says.
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
        # Any other object: as its attributes are. Tensors in them stay what they are.
        attributes = Encoder({})
        key.append(kind.__qualname__)
        for name, item in vars(value).items():
            key.append(name)
            attributes._describe(item, depth - 1)
        self.unknown = self.unknown or attributes.unknown
        key.extend(attributes._key)


class _Identity:
    """An object as a part of a key: itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value
