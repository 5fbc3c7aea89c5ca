"""A list, dictionary, set or object in an attribute of modules, with the state that the body of a step has given it.

See MST-7 in :mod:`.module_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.attributes import object_state

#: Types whose values are compared by their texts.
ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


class TrackedContainer:
    """A list, dictionary, set or object in an attribute (MST-7).

    Attributes:
        path: The path of an attribute that refers to it.
        value: The container.
        before: Its state at the first call of the step.
        state: Its state when the body's last change was recorded.
        ranks: The partitions of modules that have it.
    """

    __slots__ = ("before", "path", "ranks", "state", "value")

    def __init__(self, path: str, value: Any, ranks: Iterable[int] = ()) -> None:
        self.path, self.value, self.ranks = path, value, set(ranks)
        self.before = self.state = object_state.State(value)

    def watched(self) -> tuple[Any, Any, bool] | None:
        """Return the container with its state as ``_core.are_unchanged`` takes it; ``None`` for rarer kinds."""
        kind = type(self.value)
        if kind is list or kind is dict:
            return self.value, self.state.items, False
        if isinstance(self.value, list | dict | set | deque) or object_state.has_slots(kind):
            return None
        return self.value, self.state.attributes, True

    def put(self, old: object_state.State, new: object_state.State) -> None:
        """Replace a state that the body has given it by another one; changes by calls are kept (MST-4)."""
        if old.is_of(self.value):
            new.put_into(self.value)
            return
        now = object_state.State(self.value)
        if isinstance(now.items, dict):
            now.items = self._merged(old.items, new.items, now.items)
        elif _identities(now.items) == _identities(old.items):
            now.items = new.items
        elif _identities(new.items) != _identities(old.items):
            raise self._conflict()
        now.attributes = self._merged(old.attributes, new.attributes, now.attributes)
        now.put_into(self.value)

    def _merged(self, old: dict[Any, Any], new: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
        merged = dict(new)
        for key in dict.fromkeys((*now, *old)):
            value, before = now.get(key, MISSING), old.get(key, MISSING)
            if value is before:
                continue
            if new.get(key, MISSING) is not before:
                raise self._conflict()
            if value is MISSING:
                merged.pop(key, None)
            else:
                merged[key] = value
        return merged

    def _conflict(self) -> SMPUsageError:
        return SMPUsageError(
            f"the `smp.step` function and a call of a module both change the content of `{self.path}`. The call runs "
            "on one partition, when the function has returned: change it in one of the two"
        )

    def keep_changes_of_calls(self) -> bool:
        """Take changes by tasks that have run for no changes by the body; return whether there are some."""
        if self.state.is_of(self.value):
            return False
        now = object_state.State(self.value)
        if self.before is self.state:
            self.before = now
        self.state = now
        return True


def members_of(state: object_state.State) -> list[Any]:
    """Return the items and the values of attributes."""
    items = state.items.values() if isinstance(state.items, dict) else state.items or ()
    return [*items, *state.attributes.values()]


def _identities(items: Any) -> Any:
    """Return a value that is equal for equal items of a container."""
    if isinstance(items, dict):
        return tuple((identity_of(key), identity_of(item)) for key, item in items.items())
    if isinstance(items, set):
        return frozenset(map(identity_of, items))
    return None if items is None else tuple(map(identity_of, items))


def state_identity(state: object_state.State) -> Any:
    """Return a value that is equal for states with the same content."""
    return _identities(state.items), _identities(state.attributes)


def state_text(before: object_state.State, state: object_state.State) -> str:
    """Return a text of what has changed, which is equal on all ranks."""
    texts = []
    for old, new in ((before.items, state.items), (before.attributes, state.attributes)):
        if isinstance(new, dict):
            texts += [
                f"{text_of(key)}: {text_of(new.get(key, MISSING))}"
                for key in dict.fromkeys((*old, *new))
                if not is_same(old.get(key, MISSING), new.get(key, MISSING))
            ]
        elif new is not None and _identities(old) != _identities(new):
            items = map(text_of, new)
            texts.append(str(sorted(items) if isinstance(new, set) else list(items)))
    return "; ".join(texts)


def identity_of(value: Any) -> tuple[str, Any]:
    """Return a value that is equal for equal numbers and texts, and otherwise for one object."""
    return (type(value).__name__, repr(value)) if type(value) in ATOMS else ("object", id(value))


def text_of(value: Any) -> str:
    """Return a text that is equal on all ranks."""
    return repr(value) if type(value) in ATOMS else type(value).__qualname__


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or equal numbers or texts."""
    return a is b or (type(a) is type(b) and type(a) in ATOMS and repr(a) == repr(b))
