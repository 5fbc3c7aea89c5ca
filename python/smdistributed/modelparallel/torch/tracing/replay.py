"""Microbatches that do what one before them did: they take its tasks over, instead of recording them again.

- RPL-1: a call is taken over if the same is called, with the same values at the same places, in the same context. The
  numbers of replicated tensors are no part of that: a task that has some gets those of its own microbatch.
- RPL-2: so were all calls before it, so that values are the same objects, and all that leaves no call, such as a
  backward: the digest tells. From the first other call on, a microbatch is recorded.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing import object_state
from smdistributed.modelparallel.torch.tracing.encoder import leave_out
from smdistributed.modelparallel.torch.tracing.remote_tensor import Handle, Meta

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording
    from smdistributed.modelparallel.torch.tracing.tasks import Context, Task, Value


class Replicated:
    """The place of a replicated tensor in what a call was called with."""

    _smp_leaf = True
    __slots__ = ("meta",)

    def __init__(self, meta: Meta) -> None:
        self.meta = meta


class Call:
    """What one call of the body left.

    Attributes:
        what: What was called; of a module, also whether it was training.
        args, kwargs: With values and :class:`Replicated` instead of tensors.
        task: Its task, without replicated tensors.
        before: Tasks in front of it that it brought along.
        since: The recording's digest before it.
        after: Of the recording, what its digest, its levels and its number of values were then.
        plain: Whether there are no replicated tensors.
    """

    __slots__ = ("after", "args", "before", "kwargs", "plain", "since", "task", "training", "what")

    def __init__(self, what: Any, training: bool, task: Task, args: Any, kwargs: Any) -> None:
        self.what, self.training = what, training
        self.plain = True

        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                self.plain = False
                return Replicated(Meta.of(item))
            return item

        if task.follows:
            self.args, self.kwargs = object_state.snapshot(args, kwargs, leaf)
        else:
            self.args, self.kwargs = pytree.transform(args, leaf), pytree.transform(kwargs, leaf)
        self.task = task
        self.before: list[Task] = []
        self.since = 0
        self.after: tuple[int, int, int] = (0, 0, 0)

    def settle(self, task: Task, before: list[Task], after: tuple[int, int, int]) -> None:
        """Takes note of what became of it."""
        self.before, self.after = before, after
        if not self.plain:
            # The numbers of this microbatch are not kept for the next one.
            self.task = copy.copy(task)
            self.task.args, self.task.kwargs = self.args, self.kwargs


class Replay:
    """The calls of a microbatch before, as far as they are made again.

    Args:
        calls: They.
        located: Values of parameters and buffers, by the identity of what stands for them.
        recording: The recording that makes them again.
    """

    __slots__ = ("_calls", "_containers", "_located", "_paired", "_pairs", "_recording", "place")

    def __init__(self, calls: list[Call], located: Mapping[int, Value], recording: Recording) -> None:
        self._calls, self._located, self._recording, self.place = calls, located, recording, 0
        #: Of the call of a module, containers that were met; and for the identity of each, what it was in the known call.
        self._containers: list[Any] | None = None
        self._pairs: dict[int, Any] = {}
        #: The identities of these containers of the known call.
        self._paired: set[int] = set()

    def find(
        self,
        what: Any,
        training: bool,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        since: int,
        containers: list[Any] | None = None,
    ) -> Call | None:
        """The next call, if it was this one, after the same; then ``tensors`` gets those that it is called with, and
        ``containers`` those that it may change, if it is of a module."""
        if self.place >= len(self._calls):
            return None
        call = self._calls[self.place]
        if call.since != since:
            return None
        if call.what is not what and not _same_partial(call.what, what):
            return None
        if containers is not None and self._pairs:
            self._pairs = {}
            self._paired = set()
        self._containers = containers
        if call.training is not training or not self._same(call.args, args, tensors):
            return None
        if call.kwargs or kwargs:
            known = call.kwargs
            if list(known) != list(kwargs):
                return None
            for name, item in kwargs.items():
                if not self._same(known[name], item, tensors):
                    return None
        return call

    def _same(self, known: Any, value: Any, tensors: list[torch.Tensor]) -> bool:
        kind = type(value)
        if kind is Handle:
            tensors.append(value)
            # Microbatches that are alike share their values, not their handles.
            return value.value is known and value.recording is self._recording
        if self._containers is not None and kind not in pytree.ATOMS and object_state.is_container(kind):
            return self._same_container(known, value, tensors)
        if kind is tuple or kind is list:
            return (
                type(known) is kind
                and len(known) == len(value)
                and all(self._same(a, b, tensors) for a, b in zip(known, value, strict=True))
            )
        if kind is dict:
            return (
                type(known) is kind
                and list(known) == list(value)
                and all(self._same(a, b, tensors) for a, b in zip(known.values(), value.values(), strict=True))
            )
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            # What comes out is as long as a tensor in it says.
            return (
                type(known) is slice
                and not any(isinstance(part, torch.Tensor) for part in parts)
                and self._same((known.start, known.stop, known.step), parts, tensors)
            )
        if kind in pytree.ATOMS:
            # Of numbers that are equal, 0.0 and -0.0 are not the same.
            return type(known) is kind and (known is value or (known == value and repr(known) == repr(value)))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            located = self._located.get(id(value))
            if located is not None:
                return located is known
            self._recording.check_fresh(value)
            return type(known) is Replicated and value.layout == torch.strided and known.meta == Meta.of(value)
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

    def task(self, call: Call, context: Context, args: Any, kwargs: Any) -> Task | None:
        """The task of a call that :meth:`find` has found, for this microbatch; ``None`` if it must be recorded."""
        known = call.task
        if not known.context.same(context):
            return None
        if call.plain:
            return known
        if call.before:
            return None
        task = copy.copy(known)
        if not known.follows:
            task.args, task.kwargs = pytree.transform((args, kwargs or {}), self._leaf)
            return task
        task.args, task.kwargs = object_state.snapshot(args, kwargs, self._leaf)
        if task.outcome.unread:
            leave_out(task, task.outcome.unread)
        return task

    def _leaf(self, tensor: Any) -> Any:
        return tensor.value if type(tensor) is Handle else self._located.get(id(tensor), tensor)


def _same_partial(known: Any, what: Any) -> bool:
    """Whether two functions are the same with the same arguments, as checkpointed modules are."""
    return (
        type(known) is functools.partial
        and type(what) is functools.partial
        and known.func is what.func
        and len(known.args) == len(what.args)
        and all(a is b for a, b in zip(known.args, what.args, strict=True))
        and known.keywords == what.keywords
    )
