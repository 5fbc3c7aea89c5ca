"""Objects that a module's call reads and changes: key-value caches, dataclasses, lists, dictionaries.

- OBJ-1: a task runs later than its call, on one rank, so it has a copy of each object as it was at the call.
- OBJ-2: the final state of the copies is an output of the task. It is written to the caller's objects when the call
  is recorded.
- OBJ-3: tensors in objects that the call never reads are not inputs of the task.

Lists, dictionaries and instances of Python classes are tracked to any depth, including cycles. Modules, classes,
functions and other callables are passed unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import operator
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch import pytree

#: A flag of types that Python code has defined, and not C code.
_HEAP_TYPE = 1 << 9
_OPAQUE = (
    nn.Module, type, enum.Enum, BaseException, torch.Tensor, types.ModuleType, weakref.ref, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip
_followed: dict[type, bool] = {}
_BUILT_IN = frozenset({list, dict, set, deque, tuple, frozenset})


def is_object(kind: type) -> bool:
    """Return whether the attributes of a class's instances are tracked."""
    known = _followed.get(kind)
    if known is None:
        known = _followed[kind] = _is_object(kind)
    return known


def _is_object(kind: type) -> bool:
    if issubclass(kind, types.SimpleNamespace):
        return True
    if not kind.__flags__ & _HEAP_TYPE or issubclass(kind, _OPAQUE) or getattr(kind, "_smp_leaf", False):
        return False
    if issubclass(kind, list | dict) or issubclass(kind, tuple | set | frozenset | str | bytes | int | float | complex):
        return False
    if any("__call__" in vars(base) for base in kind.__mro__):
        return False
    package = kind.__module__.partition(".")[0]
    return package not in ("builtins", "threading", "_thread", "io") and (
        package != "torch" or kind.__module__.startswith("torch.distributions")
    )


def is_container(kind: type) -> bool:
    """Return whether instances of a class are containers that a call may change in place."""
    return kind is list or kind is dict or (issubclass(kind, list | dict) and not is_output(kind)) or is_object(kind)


def mutable_parts(value: Any) -> list[Any]:
    """Return the lists, dictionaries, sets and objects in a value, at any depth."""
    return parts_of(value)[0]


def parts_of(value: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the lists, dictionaries, sets and objects in a value, at any depth, and the tensors."""
    found: dict[int, Any] = {}
    tensors: dict[int, torch.Tensor] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind in pytree.ATOMS or id(item) in found:
            continue
        if isinstance(item, torch.Tensor):
            tensors[id(item)] = item
            continue
        if not (issubclass(kind, list | dict | set | deque | tuple | frozenset) or is_object(kind)):
            continue
        found[id(item)] = item
        if isinstance(item, dict):
            pending.extend(each for each in item.values() if type(each) not in pytree.ATOMS)
        elif isinstance(item, list | set | deque | tuple | frozenset):
            pending.extend(each for each in item if type(each) not in pytree.ATOMS)
        if kind not in _BUILT_IN:
            pending.extend(each for _, each in attributes(item) if type(each) not in pytree.ATOMS)
    return [item for item in found.values() if not isinstance(item, tuple | frozenset)], list(tensors.values())


def is_output(kind: type) -> bool:
    """Return whether a class is a dictionary with fields, such as the results of Hugging Face's models."""
    return issubclass(kind, dict) and dataclasses.is_dataclass(kind)


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, including slots, in the order of their creation."""
    yield from _dictionary_of(value).items()
    kind: Any = type(value)
    for name in _slots(kind):
        if hasattr(value, name):
            yield name, getattr(value, name)


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of attributes in slots."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def has_slots(kind: type) -> bool:
    """Return whether instances have attributes in slots, or no dictionary of attributes."""
    return bool(_slots(kind)) or not kind.__dictoffset__


def _dictionary_of(value: Any) -> dict[str, Any]:
    """Return the dictionary in which an object has its attributes; an empty one if it has none."""
    try:
        # Not by `vars`: a class may compute attributes, as configurations of Hugging Face's models do, in Python.
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes as a dictionary, which may be the object's own."""
    kind: Any = type(value)
    return dict(attributes(value)) if _slots(kind) else _dictionary_of(value)


class State:
    """The state of a container: its items and attributes, but not their contents."""

    __slots__ = ("attributes", "items")

    def __init__(self, value: Any) -> None:
        self.items: Any = None
        if isinstance(value, dict):
            self.items = dict(value.items())
        elif isinstance(value, list):
            self.items = list(value)
        elif isinstance(value, set | deque):
            self.items = set(value) if isinstance(value, set) else list(value)
        self.attributes = {} if type(value) in _BUILT_IN else dict(_attributes_of(value))

    def same(self, other: State) -> bool:
        """Return whether both have identical items and attributes."""
        mine, theirs = self.items, other.items
        if isinstance(mine, dict):
            if list(mine) != list(theirs) or not all(map(_same, mine.values(), theirs.values())):
                return False
        elif mine is not None and (len(mine) != len(theirs) or not all(map(_same, mine, theirs))):
            return False
        return list(self.attributes) == list(other.attributes) and all(
            map(_same, self.attributes.values(), other.attributes.values())
        )

    def is_of(self, value: Any) -> bool:
        """Return whether a container has this state, with identical items and attributes."""
        items = self.items
        if items is not None:
            if isinstance(items, set):
                is_same = value == items
            else:
                is_same = len(value) == len(items) and all(map(operator.is_, value, items))
                if isinstance(items, dict):
                    is_same = is_same and all(map(operator.is_, value.values(), items.values()))
            if not is_same or type(value) in _BUILT_IN:
                return is_same
        now, before = _attributes_of(value), self.attributes
        return (
            len(now) == len(before)
            and all(map(operator.is_, now.values(), before.values()))
            and all(map(operator.eq, now, before))
        )

    def put_into(self, value: Any) -> None:
        """Set the items and attributes of ``value`` to this state."""
        if isinstance(value, list):
            list.__setitem__(value, slice(None), self.items)
        elif isinstance(value, dict):
            base = OrderedDict if isinstance(value, OrderedDict) else dict
            base.clear(value)
            for key, item in self.items.items():
                base.__setitem__(value, key, item)
        elif isinstance(value, set | deque):
            value.clear()
            value.update(self.items) if isinstance(value, set) else value.extend(self.items)
        if type(value) in _BUILT_IN:
            return
        for name, _ in list(attributes(value)):
            if name not in self.attributes:
                object.__delattr__(value, name)
        for name, item in self.attributes.items():
            object.__setattr__(value, name, item)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in pytree.ATOMS and bool(one == other))


class Origin:
    """A placeholder in a recorded state: the container among the call's arguments with this number."""

    _smp_leaf = True
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Given:
    """A placeholder in a recorded state: a tensor that the call was given and that is not also a result."""

    _smp_leaf = True
    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class Copier:
    """Copies structures with all objects that they refer to; the references between containers are preserved.

    Args:
        leaf: Returns the replacement of a tensor, or of an object whose class is a leaf (``pytree.transform``).

    Attributes:
        originals: The containers that were found, in order.
        copies: Their copies.
    """

    def __init__(self, leaf: Callable[[Any], Any]) -> None:
        self.leaf = leaf
        self._memo: dict[int, Any] = {}
        self.originals: list[Any] = []
        self.copies: list[Any] = []

    def set_copy(self, value: Any, copy: Any) -> None:
        """Use ``copy`` as the copy of ``value``."""
        self._memo[id(value)] = copy
        # A reference, so that its address is not reused.
        self.originals.append(value)
        self.copies.append(copy)

    def __contains__(self, identity: int) -> bool:
        return identity in self._memo

    def copy(self, value: Any) -> Any:
        """Return the copy of a value."""
        kind: Any = type(value)
        if kind in pytree.ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, torch.Tensor) or getattr(kind, "_smp_leaf", False):
            return self.leaf(value)
        if kind is tuple:
            return tuple([self.copy(item) for item in value])
        if isinstance(value, State):
            new = State.__new__(State)
            new.items, new.attributes = self._items(value.items), {k: self.copy(v) for k, v in value.attributes.items()}
            return new
        if not is_container(kind):
            return self._other(value, kind)
        new = [] if kind is list else {} if kind is dict else _empty(value)
        self.set_copy(value, new)
        # Plain lists and dictionaries are filled directly.
        if kind is list:
            new.extend(self.copy(item) for item in value)
        elif kind is dict:
            new.update((key, self.copy(item)) for key, item in value.items())
        elif issubclass(kind, list | dict) or _slots(kind) or not hasattr(new, "__dict__"):
            self.copy(State(value)).put_into(new)
        else:
            # The fast path for most objects, of which a cache has many: they have only a dictionary.
            own = vars(new)
            for name, item in list(vars(value).items()):
                own[name] = item if type(item) in pytree.ATOMS else self.copy(item)
        return new

    def _items(self, items: Any) -> Any:
        if isinstance(items, dict):
            return {key: self.copy(item) for key, item in items.items()}
        return None if items is None else [self.copy(item) for item in items]

    def _other(self, value: Any, kind: type) -> Any:
        """Copy other kinds of values, as ``pytree.transform`` does."""
        if is_output(kind):
            return pytree.rebuilt_mapping(value, {key: self.copy(item) for key, item in value.items()})
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            try:
                return kind(*items) if hasattr(value, "_fields") else kind(items)
            except TypeError:
                return value
        if kind in (set, frozenset):
            return kind([self.copy(item) for item in value])
        if kind is slice:
            return slice(*(self.copy(part) for part in (value.start, value.stop, value.step)))
        return value


def _empty(value: Any) -> Any:
    """Return an empty object of the same class, whose state is set afterwards."""
    kind = type(value)
    if isinstance(value, list | dict):
        return copy.copy(value)
    if issubclass(kind, types.SimpleNamespace):
        return types.SimpleNamespace.__new__(kind)
    return object.__new__(kind)


def snapshot(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with copies of the containers among them."""
    copier = Copier(leaf)
    return copier.copy(args), {key: copier.copy(item) for key, item in kwargs.items()}


class Effects:
    """The final state of a call's containers, by their numbers, and its result.

    Attributes:
        result: What the call returned.
        states: New states of containers that it changed.
    """

    __slots__ = ("result", "states")

    def __init__(self, result: Any, states: Mapping[int, State]) -> None:
        self.result, self.states = result, dict(states)

    def template(self, containers: list[Any], leaf: Callable[[Any], Any], given: Mapping[int, int]) -> Effects:
        """Return the state with tensors replaced by ``leaf(tensor)``.

        Containers of the arguments, and tensors that stay in them, are replaced by placeholders.

        Args:
            containers: The copies that were passed to the call.
            leaf: Returns the replacement of a tensor.
            given: Indices of the input tensors, by id.
        """
        copier = Copier(leaf)
        for number, container in enumerate(containers):
            copier.set_copy(container, Origin(number))
        for value in _objects_in(self.result):
            if id(value) not in copier and not has_tensors(value):
                # For example an object in an attribute of the module: the caller gets the same object.
                copier.set_copy(value, value)
        result = copier.copy(self.result)
        copier.leaf = lambda tensor: Given(given[id(tensor)]) if id(tensor) in given else leaf(tensor)
        return Effects(result, {number: copier.copy(state) for number, state in self.states.items()})

    def apply(self, containers: list[Any], results: list[Any], tensors: list[Any]) -> Any:
        """Apply a template: write the states to the caller's containers, and return the result (OBJ-2).

        Args:
            containers: The caller's containers.
            results: The values of the template's slots.
            tensors: The input tensors.
        """

        def filled(item: Any) -> Any:
            if type(item) is pytree.Slot:
                return results[item.index]
            if type(item) is Origin:
                return containers[item.number]
            return tensors[item.place] if type(item) is Given else item

        copier = Copier(filled)
        new = Effects(copier.copy(self.result), {number: copier.copy(state) for number, state in self.states.items()})
        for number, state in new.states.items():
            state.put_into(containers[number])
        return new.result


def _objects_in(value: Any) -> Iterator[Any]:
    """Yield the objects in a structure of tuples, lists and dictionaries."""
    kind = type(value)
    if kind in pytree.ATOMS or isinstance(value, torch.Tensor):
        return
    if isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _objects_in(item)
    elif is_object(kind):
        yield value


def has_objects(value: Any) -> bool:
    """Return whether a structure of tuples, lists and dictionaries contains objects whose attributes are tracked."""
    return next(_objects_in(value), None) is not None


def has_tensors(value: Any) -> bool:
    """Return whether a value contains tensors, at any depth."""
    found = False

    def leaf(tensor: Any) -> Any:
        nonlocal found
        found = True
        return tensor

    Copier(leaf).copy(value)
    return found


class Watch:
    """The containers among a call's arguments, in their state before the call."""

    def __init__(self, containers: list[Any]) -> None:
        self.containers = containers
        self._before = [State(container) for container in containers]

    def effects(self, result: Any) -> Effects:
        """Return the effects of the call."""
        after = map(State, self.containers)
        states = {
            number: new for number, (old, new) in enumerate(zip(self._before, after, strict=True)) if not old.same(new)
        }
        return Effects(result, states)


def described(value: Any) -> str:
    """Return a text that is equal for templates with the same structure and the same constants."""
    lines: list[str] = []
    known: dict[int, int] = {}

    def describe(item: Any) -> None:
        kind = type(item)
        if kind in pytree.ATOMS or kind in (pytree.Slot,):
            lines.append(repr(item))
        elif kind is Origin:
            lines.append(f"container {item.number}")
        elif kind is Given:
            lines.append(f"given {item.place}")
        elif id(item) in known:
            lines.append(f"again {known[id(item)]}")
        elif isinstance(item, Effects):
            describe(item.result)
            describe(item.states)
        elif isinstance(item, State):
            describe(item.items)
            describe(item.attributes)
        elif isinstance(item, tuple | set | frozenset) or is_output(kind) or is_container(kind):
            known[id(item)] = len(known)
            lines.append(kind.__qualname__)
            parts = (
                item.items()
                if isinstance(item, dict)
                else item
                if isinstance(item, tuple | list | set | frozenset)
                else ()
            )
            for part in parts:
                describe(part)
            if is_object(kind):
                for part in attributes(item):
                    describe(part)
        else:
            lines.append(kind.__qualname__)

    describe(value)
    return "\n".join(lines)
