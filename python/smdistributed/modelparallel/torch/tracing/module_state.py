"""Attributes of modules that a step's body changes, such as ``training``: each task runs with those of its call.

The body runs before the tasks. So each change of an attribute is recorded when it happens, a task refers to the
snapshot of its call, and the executor restores that snapshot before it runs the task.

- MST-1: a snapshot holds only the attributes that differ from their values at the start of the step. Equal snapshots
  are one object on each rank, so tasks compare them by identity.
- MST-2: while the body runs and after the step, attributes have the values that the body gave them.
- MST-3: an attribute that a module's own forward sets to a tensor is an output of the task. While the body runs, it
  holds the remote tensor; after the task, the task's value.
- MST-4: if a module's own forward changes an attribute in another way, such as a call counter, only the partition of
  the module gets the new value, when the task runs. The body must not read such an attribute.
- MST-5: a module must not be called any more after the tensor in one of its attributes was changed in place on
  another partition, because the module's partition does not get that change.
- MST-6: in the next step the body reads an attribute of MST-3 as a remote tensor of the earlier step, on all ranks,
  unless the script has set the attribute in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.remote_tensor import InvalidatedValue, RemoteTensor

#: Largest number of cached snapshots.
_LIMIT = 1 << 10
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


#: Attributes that every module has.
_INTERNALS = frozenset(nn.Module().__dict__)


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


class AttributeSnapshot:
    """Values of changed attributes, by (id of their owner, name)."""

    __slots__ = ("text", "values")

    def __init__(self, values: Mapping[tuple[int, str], Any], text: str) -> None:
        self.values, self.text = values, text

    def __repr__(self) -> str:
        """Return a text that is equal on all ranks."""
        return self.text


#: The attributes as they were at the start of the step.
UNCHANGED = AttributeSnapshot({}, "{}")


class ModuleState:
    """The attributes of the modules of one model, during its steps.

    Args:
        modules: The modules that run in tasks.
        paths: Their names, by id.

    Attributes:
        current: The current snapshot of the body.
    """

    def __init__(self, modules: Sequence[nn.Module], paths: Mapping[int, str]) -> None:
        self._paths = paths
        self.current = UNCHANGED
        self._applied = UNCHANGED
        self._before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._known: dict[Any, AttributeSnapshot] = {(): UNCHANGED}
        #: Attributes that contain remote tensors at present, with their values before.
        self._outputs: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        #: For each of these attributes, its remote tensors with their values and recordings when it was set.
        self._shown: dict[tuple[int, str], list[tuple[RemoteTensor, Any, Any]]] = {}
        #: Attributes whose tensors were changed on other partitions in earlier steps (MST-5).
        self._lost: set[tuple[int, str]] = set()
        #: The remote tensors in attributes at the end of the bodies of the last step, with their owners; then also with
        #: the values of the attributes at its end (MST-6).
        self._ending: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._ended: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        #: Attributes that calls change (MST-4), and a function to call when the first one is found.
        self.changed_by_calls: set[tuple[int, str]] = set()
        self.on_first_change: Callable[[], None] | None = None
        self._modules = modules
        #: Lists, dictionaries and plain objects in attributes, as (location, object, description of its content).
        self._contents: list[tuple[str, Any, Any]] | None = None

    def begin(self) -> None:
        """Begin a step without changes."""
        self._contents = None
        self.current = self._applied = UNCHANGED
        self._before.clear()
        self._outputs.clear()
        self._ending.clear()
        for key, (owner, tensors, value) in self._ended.items():
            if _value(owner, key[1]) is value:
                self.put(owner, key[1], tensors)
        self._ended.clear()
        if len(self._known) > _LIMIT:
            self._known = {(): UNCHANGED}

    def before_call(self, module: nn.Module) -> None:
        """Record the contents of attributes before the body's first call of a module.

        Changes that the body makes to objects before the first call of a step count for all calls.

        Raises:
            SMPUsageError: The tensor in an attribute was changed on another partition (MST-5).
        """
        if self._outputs or self._lost:
            self._check_outputs(module)
        if self._contents is not None:
            return
        found: dict[int, tuple[str, Any, Any]] = {}
        for module in self._modules:
            path = self._paths[id(module)]
            for name, value in vars(module).items():
                if (
                    type(value) not in _ATOMS
                    and name not in _INTERNALS
                    and id(value) not in found
                    and _is_mutable(value)
                ):
                    found[id(value)] = (f"{path}.{name}" if path else name, value, _content(value, 3))
        self._contents = list(found.values())

    def check_contents(self) -> None:
        """Check that the body has not changed objects in attributes, whose earlier contents tasks may need.

        Raises:
            SMPUsageError: The body has changed one.
        """
        for where, value, content in self._contents or ():
            if _differs(content, _content(value, 3)):
                raise SMPUsageError(
                    f"the `smp.step` function changed the content of `{where}`, which modules on partitions may read "
                    f"after "
                    "that: change it before the first call of the step, or assign a changed copy to the attribute"
                )

    def follows(self, owner: Any) -> bool:
        """Return whether attributes of ``owner`` are tracked for tasks."""
        return id(owner) in self._paths

    @contextlib.contextmanager
    def changing(self, owner: Any, name: str, path: str | None = None) -> Iterator[None]:
        """Return a context for a change of an attribute by the body."""
        before = _value(owner, name)
        yield
        self._note(owner, name, path or self._paths[id(owner)], before, _value(owner, name))

    def _note(self, owner: Any, name: str, path: str, before: Any, after: Any) -> None:
        key = (id(owner), name)
        self._outputs.pop(key, None)
        self._lost.discard(key)
        if key not in self._before:
            self._before[key] = (owner, path, before)
        values = dict(self.current.values)
        if _same(self._before[key][2], after):
            values.pop(key, None)
        else:
            values[key] = after
        identity = tuple(sorted(((each, _identity(value)) for each, value in values.items()), key=str))
        known = self._known.get(identity)
        if known is None:
            texts = sorted(f"{self._before[each][1]}.{each[1]}={_text(value)}" for each, value in values.items())
            known = self._known[identity] = AttributeSnapshot(values, "{" + ", ".join(texts) + "}")
        self.current = self._applied = known

    # Outputs in attributes (MST-3).

    def put(self, owner: Any, name: str, tensors: Any) -> None:
        """Set an attribute to remote tensors for the body, until :meth:`hidden`."""
        key = (id(owner), name)
        before = self._outputs[key][1] if key in self._outputs else _value(owner, name)
        self._outputs[key] = (owner, before, tensors)
        remote = [leaf for leaf in pytree.tensors_of(tensors) if type(leaf) is RemoteTensor]
        self._shown[key] = [(leaf, leaf.value, leaf.recording) for leaf in remote]
        owner.__dict__[name] = tensors

    def _check_outputs(self, module: nn.Module) -> None:
        modules = frozenset(map(id, module.modules()))
        for key in (*self._outputs, *self._lost):
            if key[0] in modules and (key in self._lost or self._is_lost(key)):
                path = self._paths.get(key[0], "")
                raise SMPUsageError(
                    f"the tensor in `{f'{path}.{key[1]}'.removeprefix('.')}` was changed in place after a call of the "
                    "module had set the attribute, by another partition or after another one had computed, so the "
                    "module would read what was there before: let it keep a copy, or change a copy"
                )

    def _is_lost(self, key: tuple[int, str]) -> bool:
        for leaf, value, recording in self._shown.get(key, ()):
            now = leaf.value
            if now is value:
                continue
            if isinstance(now, InvalidatedValue):
                return True
            if leaf.recording is not recording:
                # A later microbatch works on a copy, which may have changed.
                return not leaf.recording.retained.is_copy(now, recording, value)
            # Within a stage, the attribute and the body's tensor share a storage.
            if (now.rank, now.level) != (value.rank, value.level):
                return True
        return False

    def note_changes(self, module: nn.Module, attributes: Sequence[tuple[str, str]]) -> None:
        """Register attributes of a called module, as (path relative to it, name), that the call changes (MST-4)."""
        if not attributes:
            return
        self.changed_by_calls.update((id(module.get_submodule(path)), name) for path, name in attributes)
        if self.on_first_change is not None:
            self.on_first_change()
            self.on_first_change = None

    def check_use(self, owner: Any, name: str) -> None:
        """Check that the body may read an attribute.

        Raises:
            SMPUsageError: Calls of modules change it (MST-4).
        """
        if (id(owner), name) in self.changed_by_calls:
            path = f"{self._paths.get(id(owner), type(owner).__name__)}.{name}".removeprefix(".")
            raise SMPUsageError(
                f"the `smp.step` function uses the attribute `{path}`, which a call of its module changes. The call "
                "runs on one partition, when the function has returned: let the module return the value as a tensor, "
                "or change the attribute outside of the module"
            )

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Return a context for tasks that run before the body has ended; attributes then contain no remote tensors."""
        self._hide()
        try:
            yield
        finally:
            for key, (owner, _, tensors) in self._outputs.items():
                # The following tasks use the values that these tasks have set.
                self._outputs[key] = (owner, _value(owner, key[1]), tensors)
                owner.__dict__[key[1]] = tensors

    def _hide(self) -> None:
        for (_, name), (owner, before, tensors) in self._outputs.items():
            if owner.__dict__.get(name) is tensors:
                _set(owner, name, before)

    def end_of_bodies(self) -> None:
        """End the bodies of all microbatches: from now on, attributes keep the values that tasks set."""
        self._hide()
        self._lost.update(key for key in self._outputs if self._is_lost(key))
        self._ending = {key: (owner, tensors) for key, (owner, _, tensors) in self._outputs.items()}
        self._outputs.clear()
        self._shown.clear()

    def end_of_step(self) -> None:
        """End a step that has succeeded; its tasks have run (MST-6)."""
        self._ended = {
            key: (owner, tensors, _value(owner, key[1]))
            for key, (owner, tensors) in self._ending.items()
            if key not in self._lost
        }

    # Snapshots for tasks.

    def apply(self, snapshot: AttributeSnapshot) -> None:
        """Set the attributes to a snapshot."""
        applied = self._applied
        if snapshot is applied:
            return
        self._applied = snapshot
        for key in applied.values.keys() | snapshot.values.keys():
            owner, _, before = self._before[key]
            _set(owner, key[1], snapshot.values.get(key, before))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context for tasks; afterwards the attributes have the body's values again (MST-2)."""
        try:
            yield
        finally:
            self.apply(self.current)


def _is_mutable(value: Any) -> bool:
    if isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
        return False
    return isinstance(value, list | dict | set) or hasattr(value, "__dict__")


def _content(value: Any, depth: int) -> Any:
    """Return a description of an object, for :func:`_differs`."""
    if type(value) in _ATOMS:
        return (type(value).__name__, repr(value)) if type(value) is float else value
    if depth == 0 or not _is_mutable(value):
        return id(value)
    if isinstance(value, dict):
        return {key: _content(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_content(item, depth - 1) for item in value]
    if isinstance(value, set):
        return frozenset(map(id, value))
    return {name: _content(item, depth - 1) for name, item in vars(value).items()}


def _differs(before: Any, now: Any) -> bool:
    """Return whether a content has changed, except for absent or ``None`` values that were set, as in caches."""
    if isinstance(before, dict) and isinstance(now, dict):
        return any(key not in now or (item is not None and _differs(item, now[key])) for key, item in before.items())
    return before != now


def _value(owner: Any, name: str) -> Any:
    if isinstance(owner, torch.Tensor):
        return owner.requires_grad
    return owner.__dict__.get(name, _MISSING)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            owner.requires_grad_(value)
    elif value is _MISSING:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value


def _identity(value: Any) -> tuple[str, Any]:
    return (type(value).__name__, repr(value)) if type(value) in _ATOMS else ("object", id(value))


def _text(value: Any) -> str:
    return repr(value) if type(value) in _ATOMS else type(value).__qualname__


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _ATOMS and repr(a) == repr(b))
