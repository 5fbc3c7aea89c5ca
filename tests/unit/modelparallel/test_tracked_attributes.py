"""Containers in attributes of modules, and copies of tasks: what each microbatch of a recording looks at."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.torch.tracing.attributes.attribute_views import AttributeViews  # noqa: E402
from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState  # noqa: E402
from smdistributed.modelparallel.torch.tracing.attributes.object_state import State  # noqa: E402
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages  # noqa: E402
from smdistributed.modelparallel.torch.tracing.tasks import Task  # noqa: E402


class _Configuration:
    """A configuration that several modules share, with a list in it; each access to an attribute is counted."""

    accesses = 0

    def __init__(self) -> None:
        self.sizes = [1, 2]
        self.name = "shared"

    def __getattribute__(self, name: str) -> Any:
        _Configuration.accesses += 1
        return object.__getattribute__(self, name)


def _modules(count: int) -> tuple[Any, list[Any], ModuleState]:
    configuration = _Configuration()
    modules = [torch.nn.Linear(1, 1) for _ in range(count)]
    for module in modules:
        module.config = configuration
    paths = {id(module): f"layers.{index}" for index, module in enumerate(modules)}
    views = AttributeViews(types.SimpleNamespace(shared=[]), 0, StaleStorages())
    state = ModuleState(modules, paths, {id(module): index for index, module in enumerate(modules)}, [], views)
    state.begin()
    return configuration, modules, state


def test_a_container_that_the_body_adds_to_a_shared_configuration_is_tracked():
    configuration, (first, second), state = _modules(2)
    stale = StaleStorages()
    state.before_call(first, stale)
    added = [3]
    configuration.sizes.append(added)
    state.before_call(second, stale)
    before = state.current
    assert str(before) != "{}", "the change of the list is part of the snapshot"
    added.append(4)
    state.before_call(second, stale)
    assert state.current is not before
    assert str(state.current) != str(before), "the change of the nested list is part of the snapshot"


def test_a_tuple_that_replaces_another_one_in_an_attribute_is_inspected_again():
    _, (module,), state = _modules(1)
    stale = StaleStorages()
    module.pair = ([1], 2)
    state.before_call(module, stale)
    with state.changing(module, "pair"):
        module.pair = (kept := [5], 6)
    state.before_call(module, stale)
    before = state.current
    kept.append(7)
    state.before_call(module, stale)
    assert state.current is not before


def test_a_comparison_reads_no_computed_attribute():
    configuration = _Configuration()
    state, accesses = State(configuration), _Configuration.accesses
    assert state.is_of(configuration)
    assert _Configuration.accesses == accesses
    object.__setattr__(configuration, "name", "another")
    assert not state.is_of(configuration)
    object.__setattr__(configuration, "name", "shared")
    assert state.is_of(configuration)
    object.__setattr__(configuration, "more", None)
    assert not state.is_of(configuration)


def test_a_copy_of_a_task_has_all_its_attributes():
    task = Task("layer", len, (), {}, [])
    for name in Task.__slots__:
        setattr(task, name, object())
    new = copy.copy(task)
    assert new is not task
    assert [name for name in Task.__slots__ if getattr(new, name) is not getattr(task, name)] == []
