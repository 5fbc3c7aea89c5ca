"""Replay: a microbatch with the same calls as the previous one reuses its tasks instead of recording them.

- RPL-1: a call is reused if it has the same function, the same values as arguments and the same context. The values
  of replicated tensors may differ: a task with such arguments gets those of its own microbatch.
- RPL-2: all earlier calls must have been reused as well. The digest shows this, including actions that are no calls,
  such as a backward. From the first different call on, the microbatch is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime.call_plan import CallPlan
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.copy_on_write import storage_of
from smdistributed.modelparallel.torch.tracing.encoder import leave_out
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor, TensorMeta

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.attributes.module_state import AttributeSnapshot
    from smdistributed.modelparallel.torch.tracing.recording import Recording
    from smdistributed.modelparallel.torch.tracing.tasks import Task, Value


class Replicated:
    """The index of a replicated tensor among a call's arguments."""

    _smp_leaf = True
    __slots__ = ("meta",)

    def __init__(self, meta: TensorMeta) -> None:
        self.meta = meta


class Call:
    """A recorded call of the body.

    Attributes:
        what: The function or module; for a module, also whether it was in training mode.
        args, kwargs: The arguments, with tensors replaced by values and :class:`Replicated`.
        task: The task, without replicated tensors.
        before: Tasks that were added before it because of this call.
        digest_before: The recording's digest before the call.
        state_after: The recording's digest, levels and number of values after the call.
        is_plain: Whether there are no replicated tensors.
        new_args, new_kwargs: The places and names of arguments with replicated tensors, if the task gets no containers.
    """

    __slots__ = (
        "args", "before", "digest_before", "is_plain", "kwargs", "new_args", "new_kwargs", "state_after", "task",
        "training", "what",
    )  # fmt: skip

    def __init__(self, what: Any, training: bool, task: Task, args: Any, kwargs: Any) -> None:
        self.what, self.training = what, training
        self.is_plain = True

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                self.is_plain = False
                return Replicated(TensorMeta.of(item))
            return item

        if task.has_containers:
            self.args, self.kwargs = object_state.snapshot(args, kwargs, leaf)
        else:
            self.args, self.kwargs = pytree.transform(args, leaf), pytree.transform(kwargs, leaf)
        self.new_args: list[int] = []
        self.new_kwargs: list[str] = []
        if not self.is_plain and not task.has_containers:
            self.new_args = [place for place, item in enumerate(self.args) if _has_replicated(item)]
            self.new_kwargs = [name for name, item in (self.kwargs or {}).items() if _has_replicated(item)]
        self.task = task
        self.before: list[Task] = []
        self.digest_before = 0
        self.state_after: tuple[int, int, int] = (0, 0, 0)

    def complete(self, task: Task, before: list[Task], after: tuple[int, int, int]) -> None:
        """Complete the call after its task is recorded."""
        self.before, self.state_after = before, after
        if not self.is_plain:
            # Values that belong to this microbatch only are not kept for the next one.
            task.plan = CallPlan.of(task)
            self.task = task.copy()
            self.task.args, self.task.kwargs = self.args, self.kwargs


def next_number(replay: Replay | None, tasks: Iterable[Task], count: int) -> int:
    """Return the number of the next value of a recording with ``count`` values, whose replay ends.

    The values so far are those of an earlier microbatch, which may have been renumbered (SAME-1).
    """
    if replay is None:
        return count
    return max([count, *(value.index + 1 for task in tasks for value in task.outputs)])


class Replay:
    """The calls of the previous microbatch, as far as they are repeated.

    Args:
        calls: The calls.
        located: Values of parameters and buffers, by the ids of their tensors on this rank.
        recording: The recording that repeats the calls.
    """

    __slots__ = (
        "_calls", "_compared", "_containers", "_located", "_paired", "_pairs", "_recording", "place", "replicated",
    )  # fmt: skip

    def __init__(self, calls: list[Call], located: Mapping[int, Value], recording: Recording) -> None:
        self._calls, self._located, self._recording, self.place = calls, located, recording, 0
        #: Containers in the arguments of a module's call, with those of the known call, by id.
        self._containers: list[Any] | None = None
        self._pairs: dict[int, Any] = {}
        #: Ids of the known call's containers that have a counterpart.
        self._paired: set[int] = set()
        #: Replicated tensors among the arguments of the call that was found last, with the ids of their storages.
        self.replicated: list[tuple[torch.Tensor, int]] = []
        #: Replicated tensors, by id, with their metadata and storages; until the body calls a function, which may
        #: change these.
        self._compared: dict[int, tuple[TensorMeta, tuple[torch.Tensor, int]]] = {}

    def body_calls_function(self) -> None:
        """Read the metadata of tensors again from now on."""
        self._compared.clear()

    def find(
        self,
        what: Any,
        training: bool,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        digest_before: int,
        containers: list[Any] | None = None,
    ) -> Call | None:
        """Return the next known call, if it is the same as this call.

        ``tensors`` then gets the tensors among its arguments, and :attr:`replicated` the replicated ones. For a
        module's call, ``containers`` gets the containers that it may change.
        """
        if self.place >= len(self._calls):
            return None
        call = self._calls[self.place]
        if call.digest_before != digest_before:
            return None
        if call.what is not what and not _same_partial(call.what, what):
            return None
        if containers is not None and self._pairs:
            self._pairs = {}
            self._paired = set()
        self._containers = containers
        self.replicated = []
        if call.training is not training or len(call.args) != len(args):
            return None
        if not self._same_arguments(call.args, args, tensors):
            return None
        if call.kwargs or kwargs:
            known = call.kwargs
            if list(known) != list(kwargs) or not self._same_arguments(known.values(), kwargs.values(), tensors):
                return None
        return call

    def _same_arguments(self, known: Iterable[Any], values: Iterable[Any], tensors: list[torch.Tensor]) -> bool:
        """Compare arguments, most of which are remote tensors and constants, without a call for each."""
        atoms, recording = pytree.ATOMS, self._recording
        for one, value in zip(known, values, strict=True):
            kind = type(value)
            if kind is RemoteTensor:
                tensors.append(value)
                if value.value is not one or value.recording is not recording:
                    return False
            elif (value is not one or kind not in atoms) and not self._same(one, value, tensors):
                return False
        return True

    def _same(self, known: Any, value: Any, tensors: list[torch.Tensor]) -> bool:
        kind = type(value)
        if kind is RemoteTensor:
            tensors.append(value)
            # Equal microbatches share values, but not remote tensors.
            return value.value is known and value.recording is self._recording
        if kind in pytree.ATOMS:
            # 0.0 and -0.0 are equal, but different arguments.
            return type(known) is kind and (known is value or (known == value and repr(known) == repr(value)))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            located = self._located.get(id(value))
            if located is not None:
                return located is known
            if self._recording.pipeline.stale_storages.has(value) or type(known) is not Replicated:
                return False
            compared = self._compared.get(id(value))
            if compared is None:
                if value.layout != torch.strided:
                    return False
                compared = self._compared[id(value)] = TensorMeta.of(value), (value, storage_of(value))
            self.replicated.append(compared[1])
            return known.meta == compared[0]
        if kind is not tuple and self._containers is not None and object_state.is_container(kind):
            return self._same_container(known, value, tensors)
        if kind is tuple or kind is list:
            return type(known) is kind and len(known) == len(value) and self._same_arguments(known, value, tensors)
        if kind is dict:
            return (
                type(known) is kind
                and list(known) == list(value)
                and self._same_arguments(known.values(), value.values(), tensors)
            )
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            # The length of the result depends on the value of a tensor.
            return (
                type(known) is slice
                and not any(isinstance(part, torch.Tensor) for part in parts)
                and self._same((known.start, known.stop, known.step), parts, tensors)
            )
        return known is value and callable(value)

    def _same_container(self, known: Any, value: Any, tensors: list[torch.Tensor]) -> bool:
        assert self._containers is not None
        if id(value) in self._pairs:
            return self._pairs[id(value)] is known
        if type(known) is not type(value) or id(known) in self._paired:
            return False
        self._pairs[id(value)] = known
        self._paired.add(id(known))
        self._containers.append(value)
        before, now = object_state.State(known), object_state.State(value)
        if isinstance(value, dict):
            if list(before.items) != list(now.items):
                return False
            pairs = list(zip(before.items.values(), now.items.values(), strict=True))
        elif isinstance(value, list):
            if len(before.items) != len(now.items):
                return False
            pairs = list(zip(before.items, now.items, strict=True))
        else:
            pairs = []
        if list(before.attributes) != list(now.attributes):
            return False
        pairs += zip(before.attributes.values(), now.attributes.values(), strict=True)
        return all(self._same(one, other, tensors) for one, other in pairs)

    def task(self, call: Call, modules: AttributeSnapshot, args: Any, kwargs: Any) -> Task | None:
        """Return the task of a call that :meth:`find` has found, for this microbatch; ``None`` to record it instead.

        ``modules`` are the attributes of modules at the call.
        """
        known = call.task
        if not known.context.is_current(modules):
            return None
        if call.is_plain:
            return known
        if call.before:
            return None
        task = known.copy()
        if known.has_containers:
            task.args, task.kwargs = object_state.snapshot(args, kwargs, self._leaf)
            if task.known_spec.unread:
                leave_out(task, task.known_spec.unread)
            return task
        if call.new_args:
            new_args = list(known.args)
            for place in call.new_args:
                new_args[place] = pytree.transform(args[place], self._leaf)
            task.args = tuple(new_args)
        if call.new_kwargs:
            task.kwargs = known.kwargs | {name: pytree.transform(kwargs[name], self._leaf) for name in call.new_kwargs}
        return task

    def _leaf(self, tensor: Any) -> Any:
        return tensor.value if type(tensor) is RemoteTensor else self._located.get(id(tensor), tensor)


def _has_replicated(item: Any) -> bool:
    return any(type(leaf) is Replicated for leaf in pytree.tensors_of(item))


def _same_partial(known: Any, what: Any) -> bool:
    """Return whether two partial functions are the same with the same arguments, such as checkpointed modules."""
    return (
        type(known) is functools.partial
        and type(what) is functools.partial
        and known.func is what.func
        and len(known.args) == len(what.args)
        and all(a is b for a, b in zip(known.args, what.args, strict=True))
        and known.keywords == what.keywords
    )
