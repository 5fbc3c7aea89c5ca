"""Attributes of modules that a step's body changes, such as ``training``: each task runs with those of its call.

The body runs before the tasks. So each change of an attribute is recorded when it happens, a task refers to the
snapshot of its call, and the executor restores that snapshot before it runs the task.

- MST-1: a snapshot holds only the attributes that differ from their values at the start of the step. Equal snapshots
  are one object on each rank, so tasks compare them by identity.
- MST-2: while the body runs and after the step, attributes have the values that the body gave them.
- MST-3: an attribute that a module's own forward sets to a tensor is an output of the task. While the body runs, it
  holds the remote tensor, or what the body has set since; while tasks run, what the last task has set. Snapshots
  contain it only between a change by the body and the next call that sets it, and only tasks of its module apply it.
- MST-4: if a module's own forward changes an attribute in another way, such as a call counter, only the partition of
  the module gets the new value, when the task runs. The body must not read such an attribute.
- MST-5: a module must not be called any more after the tensor in one of its attributes was changed in place on
  another partition, because the module's partition does not get that change.
- MST-6: in the next step the body reads an attribute of MST-3 as a remote tensor of the earlier step, on all ranks,
  unless the script has set the attribute in between.
- MST-7: snapshots also hold the states of lists, dictionaries, sets and objects in attributes, at any depth, that the
  body has changed in place since the first call of the step. Changes are found at each call of a module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed import _core
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.attribute_output import AttributeOutput
from smdistributed.modelparallel.torch.tracing.attributes.attribute_tensors import (
    AttributeTensor,
    AttributeTensors,
    Copies,
)
from smdistributed.modelparallel.torch.tracing.attributes.attribute_views import AttributeViews
from smdistributed.modelparallel.torch.tracing.attributes.shared_parts import SharedParts
from smdistributed.modelparallel.torch.tracing.attributes.tracked_container import (
    ATOMS,
    MISSING,
    TrackedContainer,
    identity_of,
    is_same,
    members_of,
    state_identity,
    state_text,
    text_of,
)
from smdistributed.modelparallel.torch.tracing.copy_on_write import storage_of
from smdistributed.modelparallel.torch.tracing.remote_tensor import InvalidatedValue, RemoteTensor
from smdistributed.modelparallel.torch.tracing.stale_storages import StaleStorages

#: Largest number of cached snapshots.
_LIMIT = 1 << 10


#: Attributes that every module has.
_INTERNALS = frozenset(nn.Module().__dict__)


class AttributeSnapshot:
    """Values of changed attributes, by (id of their owner, name), and states of changed containers, by id."""

    __slots__ = ("contents", "text", "values")

    def __init__(
        self, values: dict[tuple[int, str], Any], text: str, contents: Mapping[int, object_state.State]
    ) -> None:
        self.values, self.text, self.contents = values, text, contents

    def __repr__(self) -> str:
        """Return a text that is equal on all ranks."""
        return self.text


class _Reached(NamedTuple):
    """Containers and plain tensors in attributes of a module, and ids of what other modules may share (ORD-3)."""

    containers: list[TrackedContainer]
    tensors: list[AttributeTensor]
    parts: tuple[int, ...]
    #: The containers as `_core.are_unchanged` takes them, if it takes all of them.
    watched: list[tuple[Any, Any, bool]] | None


#: Containers, plain tensors, and ids of parameters and buffers, in the attributes of one module.
_OwnParts = tuple[list[TrackedContainer], list[AttributeTensor], list[int]]

#: The attributes as they were at the start of the step.
UNCHANGED = AttributeSnapshot({}, "{}", {})


class ModuleState:
    """The attributes of the modules of one model, during its steps.

    Args:
        modules: The modules that run in tasks.
        paths: Their names, by id.
        ranks: Their partitions, by id.
        others: The modules that are divided among partitions.
        views: The attributes that share memory with parameters or buffers.

    Attributes:
        current: The current snapshot of the body.
        tensors: Plain tensors in attributes of all modules.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        paths: Mapping[int, str],
        ranks: Mapping[int, int],
        others: Sequence[nn.Module],
        views: AttributeViews,
    ) -> None:
        self.views = views
        self._paths, self._ranks, self._others = paths, ranks, others
        self.tensors = AttributeTensors()
        #: The modules of calls in this step, with their submodules.
        self._called: set[int] = set()
        self.current = UNCHANGED
        self._applied = UNCHANGED
        self._before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._known: dict[Any, AttributeSnapshot] = {(): UNCHANGED}
        #: Snapshots of this step that have got copies of tensors (ATN-1). They may have other tensors, to which the
        #: body writes later.
        self._past: list[AttributeSnapshot] = []
        #: Attributes that calls have set to tensors, until the bodies of the step have ended; and their keys, until the
        #: next step.
        self._outputs: dict[tuple[int, str], AttributeOutput] = {}
        self._set_by_calls: set[tuple[int, str]] = set()
        #: Attributes that the body has set to tensors on partitions, which no call can read.
        self._given: set[tuple[int, str]] = set()
        #: Attributes whose tensors were changed on other partitions in earlier steps (MST-5).
        self._lost: set[tuple[int, str]] = set()
        #: The attributes of `_outputs` at the end of the bodies of the last step; then their owners, remote tensors
        #: and values at its end (MST-6).
        self._ending: dict[tuple[int, str], AttributeOutput] = {}
        self._ended: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        #: Attributes that calls change (MST-4), and a function to call when the first one is found.
        self.changed_by_calls: set[tuple[int, str]] = set()
        self.on_first_change: Callable[[], None] | None = None
        self._modules = modules
        #: The containers in attributes of all modules, by id; ``None`` before the first call of a step.
        self._tracked: dict[int, TrackedContainer] | None = None
        #: By the id of a value in an attribute: the value, its containers and its tensors. Many modules share one, such
        #: as a configuration.
        self._contents: dict[int, tuple[Any, list[TrackedContainer], list[torch.Tensor]]] = {}
        #: The containers and tensors that a called module reaches, by its id.
        self._reached: dict[int, _Reached] = {}
        #: What each module has in attributes of its own, by its id, with the number of its attributes then.
        self._own: dict[int, tuple[int, _OwnParts]] = {}
        self.shared = SharedParts(self, modules, others)
        self._assigned: list[tuple[str, torch.Tensor]] = []
        #: The specs of calls that change state, as noted in this step, by the ids of the module and of the spec.
        self.noted: dict[tuple[int, int], Any] = {}
        #: The ids of called modules' submodules, by the module's id.
        self._submodules: dict[int, frozenset[int]] = {}

    def begin(self) -> None:
        """Begin a step without changes."""
        self._forget_containers()
        self._restore_set()
        self.current = self._applied = UNCHANGED
        self._before.clear()
        self._past.clear()
        self._outputs.clear()
        self._set_by_calls.clear()
        self._given.clear()
        for key, (owner, tensors, value) in self._ended.items():
            if _value(owner, key[1]) is value:
                self.put(owner, key[1], tensors)
        self._ended.clear()
        if len(self._known) > _LIMIT:
            self._known = {(): UNCHANGED}

    def _forget_containers(self) -> None:
        self._tracked = None
        self._contents.clear()
        self.tensors.clear()
        self._called.clear()
        self._reached.clear()
        self._own.clear()
        self._assigned.clear()
        self.shared.forget_holders()
        self.noted.clear()
        self._submodules.clear()

    def before_call(self, module: nn.Module, stale: StaleStorages) -> tuple[int, ...]:
        """Record what the body has changed in containers that a module reaches (MST-7).

        Changes before the first call of a step count for all calls.

        Returns:
            The ids of what the call may share with calls of other modules (ORD-3).

        Raises:
            SMPUsageError: The tensor in an attribute was changed on another partition (MST-5, ATN-2).
        """
        if self._outputs or self._lost:
            self._check_outputs(module)
        if self._tracked is None:
            self._tracked = {}
            self._parts_of(self._modules)
            self.shared.keep(self._tracked)
        reached = self._reached.get(id(module)) or self._reached_by(module, stale)
        if reached.containers and not (reached.watched and _core.are_unchanged(reached.watched)):
            self._note_contents(reached.containers)
            if not self._reached:
                # The body has put other containers into these.
                reached = self._reached_by(module, stale)
        for each in () if stale.is_empty else reached.tensors:
            if stale.has_of_body(each.tensor):
                raise SMPUsageError(
                    f"the `smp.step` function writes values of a partition to the tensor in `{each.path}`, and then "
                    "calls the module, whose partition does not have them: pass the tensor to the module instead"
                )
        return reached.parts

    def _reached_by(self, module: nn.Module, stale: StaleStorages) -> _Reached:
        """Return the containers and tensors in attributes of a called module and its submodules.

        Raises:
            SMPUsageError: A call on another partition has changed it (MST-8).
        """
        reached = self._reached.get(id(module))
        if reached is None:
            modules = list(module.modules())
            containers, tensors, registered = self._parts_of(modules)
            parts = [id(each.value) for each in containers]
            parts += dict.fromkeys(storage_of(each.tensor) for each in tensors)
            parts += self.shared.tied_in(modules)
            parts += dict.fromkeys((*registered, *self.views.ids_sharing_memory(each.tensor for each in tensors)))
            watched = [each.watched() for each in containers]
            known = [each for each in watched if each is not None]
            reached = self._reached[id(module)] = _Reached(
                containers, tensors, tuple(parts), known if len(known) == len(watched) else None
            )
            self._called.update(map(id, modules))
            self.shared.check_reached(self._ranks.get(id(module)), containers, tensors, stale)
        return reached

    def tracked(self, value: Any) -> TrackedContainer | None:
        """Return the record of a container in an attribute; ``None`` if it is not tracked."""
        return (self._tracked or {}).get(id(value))

    def note_contents(self) -> None:
        """Record what the body has changed in all containers."""
        if self._tracked:
            self._note_contents(list(self._tracked.values()))

    def take_assigned(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that the body has put into containers since the last call, with the attributes' paths."""
        found, self._assigned = self._assigned, []
        return found

    def _parts_of(
        self, modules: Iterable[nn.Module]
    ) -> tuple[list[TrackedContainer], list[AttributeTensor], list[int]]:
        """Return what attributes of modules have in them, at any depth.

        Returns:
            The containers, the plain tensors, and the ids of parameters and buffers.
        """
        found: dict[int, TrackedContainer] = {}
        tensors: list[AttributeTensor] = []
        registered: list[int] = []
        for module in modules:
            count, own = self._own.get(id(module), (0, None))
            if own is None or count != len(vars(module)):
                own = self._own_parts(module)
                self._own[id(module)] = len(vars(module)), own
            found.update((id(container), container) for container in own[0])
            tensors += own[1]
            registered += own[2]
        return list(found.values()), tensors, registered

    def _own_parts(self, module: nn.Module) -> _OwnParts:
        containers: list[TrackedContainer] = []
        tensors: list[AttributeTensor] = []
        registered: list[int] = []
        path, rank = self._paths.get(id(module), ""), self._ranks.get(id(module))
        for name, value in vars(module).items():
            if type(value) in ATOMS or name in _INTERNALS or self._is_shown((id(module), name)):
                continue
            full = f"{path}.{name}" if path else name
            parts, leaves = self.parts_of_value(value, full)
            if rank is not None:
                for container in parts:
                    container.ranks.add(rank)
            containers += parts
            for leaf in leaves:
                if self.shared.is_registered(leaf):
                    registered.append(id(leaf))
                if type(leaf) is torch.Tensor and leaf.layout == torch.strided:
                    tensors.append(AttributeTensor(leaf, module, name, full, rank, leaf is value))
                    self.tensors.add(tensors[-1])
        return containers, tensors, registered

    def attributes_of(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of a module that may have containers or tensors in them."""
        for name, value in vars(module).items():
            if type(value) not in ATOMS and name not in _INTERNALS and not self._is_shown((id(module), name)):
                yield name, value

    def parts_of_value(self, value: Any, path: str) -> tuple[list[TrackedContainer], list[torch.Tensor]]:
        """Return the containers and the tensors in a value; ``path`` is the attribute's, for new ones."""
        assert self._tracked is not None, "before_call has set it"
        known = self._contents.get(id(value))
        if known is not None and all(each.state.is_of(each.value) for each in known[1]):
            return known[1:]
        parts, leaves = object_state.parts_of(value)
        containers = []
        for part in parts:
            container = self._tracked.get(id(part))
            if container is None:
                container = self._tracked[id(part)] = TrackedContainer(path, part)
            containers.append(container)
        if containers:
            self._contents[id(value)] = value, containers, leaves
        return containers, leaves

    def _note_contents(self, containers: Iterable[TrackedContainer]) -> None:
        pending = [each for each in containers if not each.state.is_of(each.value)]
        while pending:
            container = pending.pop()
            if container.state.is_of(container.value):
                continue
            before, container.state = container.state, object_state.State(container.value)
            contents = dict(self.current.contents)
            if state_identity(container.state) == state_identity(container.before):
                contents.pop(id(container.value), None)
            else:
                contents[id(container.value)] = container.state
            self._forget_reached()
            assert self._tracked is not None, "the container is tracked"
            for part in object_state.mutable_parts(container.value):
                known = self._tracked.get(id(part))
                if known is None:
                    self._tracked[id(part)] = TrackedContainer(container.path, part, container.ranks)
                else:
                    # The body may have changed it while no module had it.
                    known.ranks |= container.ranks
                    pending.append(known)
            self._set_current(dict(self.current.values), contents)
            had = set(map(id, members_of(before)))
            self._assigned += [
                (container.path, each)
                for each in members_of(container.state)
                if isinstance(each, torch.Tensor) and id(each) not in had
            ]

    def _forget_reached(self) -> None:
        """Forget which containers attributes and modules reach: a container refers to other ones now."""
        self._reached.clear()
        self._own.clear()
        self._contents.clear()
        self.shared.forget_holders()

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
        output = self._outputs.get(key)
        if output is not None:
            output.show(after, is_set=True)
            before = output.value
        self._lost.discard(key)
        self._given.discard(key)
        if any(type(leaf) is RemoteTensor for leaf in pytree.tensors_of(after)):
            self._given.add(key)
        if key not in self._before:
            self._before[key] = (owner, path, before)
        values = dict(self.current.values)
        if output is None and is_same(self._before[key][2], after):
            values.pop(key, None)
        else:
            values[key] = after
        if type(before) not in ATOMS or type(after) not in ATOMS:
            self._reached.clear()
            self._own.clear()
            self.shared.forget_holders()
        self._set_current(values, self.current.contents)

    def changed_since(self, earlier: AttributeSnapshot, modules: Iterable[nn.Module]) -> str | None:
        """Return the path of an attribute of these modules that has changed since a snapshot.

        Attributes of their submodules and of the modules that contain them count, too.
        """
        paths = {self._paths[id(module)] for module in modules if id(module) in self._paths}
        changed = []
        for key in earlier.values.keys() | self.current.values.keys():
            _, path, original = self._before[key]
            before, now = (snapshot.values.get(key, original) for snapshot in (earlier, self.current))
            if not is_same(before, now):
                changed.append((path, f"{path}.{key[1]}" if path else key[1]))
        for number in earlier.contents.keys() | self.current.contents.keys():
            container = (self._tracked or {})[number]
            states = (snapshot.contents.get(number, container.before) for snapshot in (earlier, self.current))
            if len({state_identity(state) for state in states}) > 1:
                changed.append((container.path, container.path))
        for owner, path in sorted(changed):
            if any(_contains_path(one, other) for each in paths for one, other in ((owner, each), (each, owner))):
                return path
        return None

    def _set_current(self, values: dict[tuple[int, str], Any], contents: Mapping[int, object_state.State]) -> None:
        """Make the snapshot with these attributes and contents the current one."""
        tracked = self._tracked or {}
        identity = (
            *sorted(((each, identity_of(value)) for each, value in values.items()), key=str),
            *sorted(((each, tracked[each].path, state_identity(state)) for each, state in contents.items()), key=str),
        )
        known = self._known.get(identity)
        if known is None:
            texts = sorted(f"{self._before[each][1]}.{each[1]}={text_of(value)}" for each, value in values.items())
            texts += sorted(
                f"content of {tracked[each].path}: {state_text(tracked[each].before, state)}"
                for each, state in contents.items()
            )
            known = AttributeSnapshot(values, "{" + ", ".join(texts) + "}", contents)
            self._known[identity] = known
        self.current = self._applied = known

    # Outputs in attributes (MST-3).

    def put(self, owner: Any, name: str, tensors: Any) -> None:
        """Set an attribute to remote tensors for the body, until :meth:`hidden`."""
        key = (id(owner), name)
        output = self._outputs.get(key)
        if output is None:
            value = self._before[key][2] if key in self._before else _value(owner, name)
            output = self._outputs[key] = AttributeOutput(owner, value)
            self._own.pop(id(owner), None)
            self._set_by_calls.add(key)
        output.show(tensors, is_set=False)
        self._given.discard(key)
        owner.__dict__[name] = tensors
        if key in self.current.values:
            self._set_current(
                {each: value for each, value in self.current.values.items() if each != key}, self.current.contents
            )

    def _is_shown(self, key: tuple[int, str]) -> bool:
        """Return whether an attribute contains remote tensors that a call has set."""
        return key in self._outputs and not self._outputs[key].is_set

    def check_given(self, module: nn.Module, attributes: Iterable[tuple[str, str]] | None) -> None:
        """Check that the body has not set attributes that a call reads, as (path, name), to tensors on partitions.

        ``None`` stands for all attributes of the module and its submodules.

        Raises:
            SMPUsageError: It has set one.
        """
        if not self._given:
            return
        if attributes is None:
            parts = {id(part): path for path, part in module.named_modules()}
            attributes = [(parts[owner], name) for owner, name in self._given if owner in parts]
        for path, name in attributes:
            owner = module.get_submodule(path)
            if (id(owner), name) in self._given:
                full = f"{self._paths.get(id(owner), type(owner).__name__)}.{name}".removeprefix(".")
                raise SMPUsageError(
                    f"the `smp.step` function sets `{full}` to a tensor on a partition, and a call of the module reads "
                    "the attribute: pass the tensor to the module instead"
                )

    def _check_outputs(self, module: nn.Module) -> None:
        modules = frozenset(map(id, module.modules()))
        for key in (*self._outputs, *self._lost):
            if key[0] in modules and (key in self._lost or self._is_lost(key)):
                path = self._paths.get(key[0], "")
                raise SMPUsageError(
                    f"the tensor in `{f'{path}.{key[1]}'.removeprefix('.')}` was changed in place after a call of the "
                    "module had set the attribute, by another partition or after another partition had computed, so "
                    "the module would read the old values: let it keep a copy, or change a copy"
                )

    def _is_lost(self, key: tuple[int, str]) -> bool:
        output = self._outputs.get(key)
        for leaf, value, recording in () if output is None else output.remote:
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
        self.note_changed_attributes({(id(module.get_submodule(path)), name) for path, name in attributes})

    def note_changed_attributes(self, attributes: Collection[tuple[int, str]]) -> None:
        """Register attributes that calls change, as (id of the module, name)."""
        self.changed_by_calls.update(attributes)
        if attributes and self.on_first_change is not None:
            self.on_first_change()
            self.on_first_change = None

    # Plain tensors in attributes, to which the body writes (ATN-1).

    def copies_before_write(self, operands: Sequence[torch.Tensor]) -> Copies:
        """Return copies of tensors in attributes to which a function of the body may write."""
        return Copies(self.tensors, operands, self._called)

    def after_write(self, copies: Copies, written: Sequence[torch.Tensor], name: str) -> None:
        """Give earlier calls the copies of tensors that the function ``name`` has changed.

        Raises:
            SMPUsageError: They cannot get one.
        """
        for each, copy in copies.of_written(written):
            if not each.is_direct or each.tensor.requires_grad:
                raise SMPUsageError(
                    f"`{name}` changes the tensor in `{each.path}` in place, inside of a `smp.step` function, and "
                    "modules that were called before read it later: assign a changed copy to the attribute"
                )
            self._replace_past(each.owner, each.name, each.tensor, copy)

    def _replace_past(self, owner: Any, name: str, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Replace the tensor in an attribute for the calls so far; later calls have the tensor itself."""
        key = (id(owner), name)
        path, before = self._before[key][1:] if key in self._before else (self._paths.get(id(owner), ""), tensor)
        self._before[key] = (owner, path, copy if before is tensor else before)
        output = self._outputs.get(key)
        if output is not None and output.value is tensor:
            output.value = copy
        for snapshot in self._past:
            if snapshot.values.get(key) is tensor:
                snapshot.values[key] = copy
        for identity, snapshot in list(self._known.items()):
            if snapshot.values.get(key) is tensor:
                snapshot.values[key] = copy
                self._past.append(self._known.pop(identity))
        if _value(owner, name) is tensor:
            self._set_current({**self.current.values, key: tensor}, self.current.contents)

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
            for (_, name), output in self._outputs.items():
                # The following tasks use the values that these tasks have set.
                output.value = _value(output.owner, name)
                _set(output.owner, name, output.shown)

    def _hide(self) -> None:
        for (_, name), output in self._outputs.items():
            _set(output.owner, name, output.value)

    def end_bodies(self) -> None:
        """End the bodies of all microbatches: from now on, attributes keep the values that tasks set."""
        self._hide()
        self._lost.update(key for key in self._outputs if self._is_lost(key))
        self._ending = dict(self._outputs)
        self._outputs.clear()

    def end_of_step(self) -> None:
        """End a step that has succeeded; its tasks have run (MST-6)."""
        self._forget_containers()
        self.current = self._applied = UNCHANGED
        self._ended = {
            key: (output.owner, output.shown, _value(output.owner, key[1]))
            for key, output in self._ending.items()
            if not output.is_set and key not in self._lost
        }
        self._restore_set()

    def _restore_set(self) -> None:
        """Give attributes that the body has set after the last call the body's values (MST-2)."""
        for (_, name), output in self._ending.items():
            if output.is_set:
                _set(output.owner, name, output.shown)
        self._ending.clear()

    # Snapshots for tasks.

    def apply(self, snapshot: AttributeSnapshot, module: nn.Module | None = None) -> None:
        """Set the attributes to a snapshot, for a task that calls ``module``, if given.

        Attributes that calls set keep their values, except those of the module that the body has set before the call.
        """
        applied = self._applied
        if module is not None and self._set_by_calls:
            for key in snapshot.values.keys() & self._set_by_calls:
                # Other modules' attributes may have been set by later calls, which run in an earlier stage.
                if self._contains(module, key[0]):
                    _set(self._before[key][0], key[1], snapshot.values[key])
        if snapshot is applied:
            return
        self._applied = snapshot
        for key in (applied.values.keys() | snapshot.values.keys()) - self._set_by_calls:
            owner, _, before = self._before[key]
            _set(owner, key[1], snapshot.values.get(key, before))
        for each in applied.contents.keys() | snapshot.contents.keys():
            assert self._tracked is not None, "contents are those of tracked containers"
            container = self._tracked[each]
            before = container.before
            container.put(applied.contents.get(each, before), snapshot.contents.get(each, before))

    def _contains(self, module: nn.Module, owner: int) -> bool:
        parts = self._submodules.get(id(module))
        if parts is None:
            parts = self._submodules[id(module)] = frozenset(map(id, module.modules()))
        return owner in parts

    @contextlib.contextmanager
    def in_backward(self, snapshot: AttributeSnapshot) -> Iterator[None]:
        """Return a context for a backward; later calls then find attributes as the calls before them have set them."""
        self.apply(snapshot)
        set_by_body = snapshot.values.keys() & self._set_by_calls
        before = {key: _value(self._before[key][0], key[1]) for key in set_by_body}
        for key in set_by_body:
            _set(self._before[key][0], key[1], snapshot.values[key])
        try:
            yield
        finally:
            for key, value in before.items():
                _set(self._before[key][0], key[1], value)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context for tasks; afterwards the attributes have the body's values again (MST-2)."""
        self.note_contents()
        try:
            yield
        finally:
            self.apply(self.current)
            for container in (self._tracked or {}).values():
                if container.keep_changes_of_calls():
                    self._forget_reached()


def _contains_path(outer: str, inner: str) -> bool:
    """Return whether a module's path is that of ``inner``, or of a module that contains it."""
    return not outer or inner == outer or inner.startswith(outer + ".")


def _value(owner: Any, name: str) -> Any:
    if isinstance(owner, torch.Tensor):
        return owner.requires_grad
    return owner.__dict__.get(name, MISSING)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            owner.requires_grad_(value)
    elif value is MISSING:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value
