"""Containers in attributes of modules are compared with their earlier state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from smdistributed import _core
from smdistributed.modelparallel.torch.tracing.attributes.tracked_container import TrackedContainer


class Plain:
    """An object whose class computes attributes."""

    def __init__(self):
        self.number, self.items = 1000, [1]

    def __getattribute__(self, name):
        if name == "__dict__":
            return {}
        return object.__getattribute__(self, name)


class Slotted:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 1000


class Items(dict):
    """A dictionary with attributes."""


def _set(name, value):
    return lambda container: setattr(container, name, value)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1000, "a"], lambda each: each.reverse()),
        (lambda: [1000], lambda each: each.append(1)),
        (lambda: [[1]], lambda each: each.__setitem__(0, [1])),
        (lambda: {"a": 1000, "b": [2]}, lambda each: each.update(b=[2])),
        (lambda: {"a": None}, lambda each: each.update(c=each.pop("a"))),
        (lambda: {"a": 1, "b": 1}, lambda each: each.update(a=each.pop("a"))),
        (Plain, _set("number", 1001)),
        (Plain, _set("items", [1])),
        (Plain, _set("other", None)),
        (lambda: SimpleNamespace(a=1, b=2), lambda each: each.__delattr__("b")),
    ],
)
def test_each_change_of_a_container_is_seen(make, change):
    container = TrackedContainer("path", make())
    watched = container.watched()
    assert watched is not None
    assert _core.are_unchanged([watched, watched])
    change(container.value)
    assert not _core.are_unchanged([watched])
    assert not container.state.is_of(container.value)


@pytest.mark.parametrize("make", [Slotted, Items, set])
def test_containers_of_rarer_kinds_are_compared_in_python(make):
    container = TrackedContainer("path", make())
    assert container.watched() is None
    assert container.state.is_of(container.value)


def test_a_wrong_kind_of_state_is_a_type_error():
    with pytest.raises(TypeError):
        _core.are_unchanged([({}, [], False)])
