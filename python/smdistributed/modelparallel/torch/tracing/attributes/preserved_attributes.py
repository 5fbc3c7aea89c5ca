"""The state of a module around a call that finds its output spec: attributes, and contents of containers in them.

The call runs on fake or random tensors, on all ranks. Afterwards the module is as it was before.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor, TensorMeta

#: Attributes of every module, which its forward does not set.
MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}


class StatePart(NamedTuple):
    """A container, an object or a tensor in an attribute of a called module.

    Attributes:
        path, name: The path of the module in the called one, and the attribute's name.
        is_tensor: Whether it is a tensor.
        place, total: Its index among those in the attribute, and their number.
    """

    path: str
    name: str
    is_tensor: bool
    place: int
    total: int

    def find(self, module: nn.Module) -> Any:
        """Return what the module has there now; ``None`` if the attribute has others in it."""
        parts = object_state.parts_of(vars(module.get_submodule(self.path)).get(self.name))[self.is_tensor]
        return parts[self.place] if len(parts) == self.total else None


class Content(NamedTuple):
    """A container in an attribute: a list, dictionary, set, or the dictionary of an object.

    Attributes:
        path, name: The path of the module in the called one, and the attribute's name.
        part: The container or the object.
        value: The container.
        before: A copy of it from before the call.
        where: Its place.
    """

    path: str
    name: str
    part: Any
    value: Any
    before: Any
    where: StatePart

    def additions(self) -> dict[Any, Any]:
        """Return entries that the call has added to a dictionary, or has filled."""
        if not isinstance(self.value, dict):
            return {}
        before = self.before
        return {
            key: item
            for key, item in self.value.items()
            if before.get(key) is None and not (key in before and item is None)
        }

    def has_changed(self) -> bool:
        """Return whether the call has changed it, other than by additions."""
        if isinstance(self.value, dict):
            return any(
                key not in self.value or self.value[key] is not item
                for key, item in self.before.items()
                if item is not None
            )
        return not _is_same_content(self.value, self.before)

    def restore(self) -> None:
        """Give it the entries from before the call."""
        value, before = self.value, self.before
        if not _is_same_content(value, before):
            value.clear()
            value.extend(before) if isinstance(value, list | deque) else value.update(before)


class preserved_attributes:  # noqa: N801 - a context
    """Restores the state that modules change during a call.

    Args:
        module: The called module.
        fake: Creates a fake tensor; attributes with remote tensors contain fake ones in the context.
        has_numbers: Whether the call computes, so that it may change the numbers of tensors in attributes.

    Attributes:
        tensors: Tensors in attributes that are neither parameters nor buffers, with their places.
        remote: The fake tensors in attributes with remote tensors, by path and name.
    """

    def __init__(
        self, module: nn.Module, fake: Callable[[TensorMeta], torch.Tensor], has_numbers: bool = False
    ) -> None:
        self._modules = list(module.named_modules())
        self._fake, self._has_numbers = fake, has_numbers
        self.tensors: list[tuple[StatePart, torch.Tensor]] = []
        self.remote: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._contents: list[Content] = []

    def __enter__(self) -> preserved_attributes:
        self._before = [dict(module.__dict__) for _, module in self._modules]
        # Parameters, buffers, submodules and hooks: a forward may register some, such as Hugging Face's models, which
        # note in an attribute that they have. Those of TorchScript's modules are no dictionaries, and do not change.
        tables = [vars(module).get(name) for _, module in self._modules for name in MODULE_INTERNALS]
        self._tables = [(table, copy.copy(table)) for table in tables if isinstance(table, dict | set)]
        for (path, module), before in zip(self._modules, self._before, strict=True):
            for name, value in before.items():
                if name not in MODULE_INTERNALS and type(value) not in pytree.ATOMS:
                    self._look_at(module, path, name, value)
        self._copies = [tensor.detach().clone() for _, tensor in self.tensors] if self._has_numbers else []
        self._at_call = [dict(module.__dict__) for _, module in self._modules]
        return self

    def _look_at(self, module: nn.Module, path: str, name: str, value: Any) -> None:
        parts, tensors = object_state.parts_of(value)
        for place, part in enumerate(parts):
            if _is_restorable(part):
                content = vars(part) if hasattr(part, "__dict__") else part
                where = StatePart(path, name, False, place, len(parts))
                self._contents.append(Content(path, name, part, content, copy.copy(content), where))
        self.tensors += [
            (StatePart(path, name, True, place, len(tensors)), tensor)
            for place, tensor in enumerate(tensors)
            if type(tensor) is torch.Tensor and tensor.layout == torch.strided
        ]
        if not _has_remote(value):
            return
        fakes = self.remote[path, name] = []

        def leaf(tensor: Any) -> Any:
            if type(tensor) is not RemoteTensor:
                return tensor
            fakes.append(self._fake(TensorMeta.of(tensor)))
            return fakes[-1]

        module.__dict__[name] = pytree.transform(value, leaf)

    def set_by_call(self) -> dict[tuple[str, str], Any]:
        """Return attributes that the call has set, by the path of their module and their name."""
        found = {}
        for (path, module), before in zip(self._modules, self._at_call, strict=True):
            for name, value in module.__dict__.items():
                is_known = name in MODULE_INTERNALS or value is before.get(name, self)
                if not is_known and not (type(value) in pytree.ATOMS and value == before.get(name, self)):
                    found[path, name] = value
        return found

    def changed_contents(self) -> list[Content]:
        """Return containers and objects that the call has changed, other than by adding entries to dictionaries."""
        return [content for content in self._contents if content.has_changed()]

    def additions(self) -> list[tuple[Content, dict[Any, Any]]]:
        """Return entries that the call has added to dictionaries and objects."""
        found = [(content, content.additions()) for content in self._contents]
        return [(content, entries) for content, entries in found if entries]

    def __exit__(self, *_: object) -> None:
        for (_, module), before in zip(self._modules, self._before, strict=True):
            if module.__dict__.keys() != before.keys():
                for name in module.__dict__.keys() - before.keys():
                    del module.__dict__[name]
            for name, value in before.items():
                if module.__dict__.get(name) is not value:
                    module.__dict__[name] = value
        for table, entries in self._tables:
            if not _is_same_content(table, entries):
                table.clear()
                table.update(entries)
        for content in self._contents:
            content.restore()
        for (_, changed), numbers in zip(self.tensors, self._copies, strict=False):
            changed.data.copy_(numbers)


def _is_restorable(part: Any) -> bool:
    return type(part) in (list, dict, set, deque, OrderedDict) or (
        hasattr(part, "__dict__") and object_state.is_object(type(part))
    )


def _is_same_content(value: Any, content: Any) -> bool:
    return value == content if type(value) is set else _same_items(value, content)


def _has_remote(value: Any) -> bool:
    if type(value) is RemoteTensor:
        return True
    if type(value) in (list, tuple):
        return any(map(_has_remote, value))
    return type(value) is dict and any(map(_has_remote, value.values()))


def _same_items(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and b[key] is value for key, value in a.items())
    return all(x is y for x, y in zip(a, b, strict=True))
