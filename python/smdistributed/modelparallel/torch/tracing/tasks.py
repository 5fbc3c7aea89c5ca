"""The components of a recording: values, tasks that compute them, and digests that are equal for equal recordings."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.module_state import UNCHANGED, AttributeSnapshot
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.call_plan import CallPlan

_DEVICE_NUMBER = re.compile(r", index=\d+")


class Value:
    """A tensor that a task produces, or a parameter.

    Attributes:
        index: Its number in the recording; -1 for a parameter.
        rank: The partition that has it.
        level: Number of changes of partition before it.
        meta: Its shape, type and device.
        parameter: The path of the parameter or buffer, if it is one.
        owner: The id of the module of the parameter or buffer that is its ``home``; the first one if several have it.
        base: For a view, the value whose storage it shares; ``None`` for a value with a storage of its own.
        offset: For a view, its offset in the storage of ``base``, in elements.
        versioned: Whether autograd's version counter registers writes to it, which it does not through ``.data``.
        detached: For a tensor that `detach` or `.data` has returned, and views of it, a number of its own: a write to
        it changes the numbers of the other tensors of its storage, but not their graphs.
        home: The path of the parameter or buffer whose memory it is: for the parameter itself, and after in-place
        writes to it.
    """

    _smp_leaf = True
    __slots__ = (
        "base", "detached", "home", "index", "level", "meta", "offset", "owner", "parameter", "rank", "versioned",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        rank: int,
        level: int,
        meta: TensorMeta,
        parameter: str | None = None,
        owner: int | None = None,
    ) -> None:
        self.index, self.rank, self.level, self.meta, self.parameter = index, rank, level, meta, parameter
        self.owner = owner
        self.base: Value | None = None
        self.offset = 0
        self.versioned = True
        self.detached: int | None = None
        self.home = parameter

    @property
    def storage(self) -> Value:
        """Return the value that represents the storage: ``base``, or the value itself."""
        return self.base or self

    @property
    def storage_key(self) -> int | str:
        """Return an id of the storage in its recording; equal for recordings with equal tasks."""
        storage = self.base or self
        return storage.index if storage.parameter is None else storage.parameter


class Context:
    """The state of PyTorch and of the model's modules when the body made a call.

    Attributes:
        grad: Whether gradients are enabled.
        autocast: For each device: its name, whether autocast is enabled, the dtype, and whether casts are cached.
        modules: Attributes of modules that the body has changed in this step.
    """

    __slots__ = ("autocast", "grad", "modules")

    #: Whether a body runs in `casts_of_body_uncached`; `current` then tells that casts are cached.
    _is_uncached = False

    def __init__(
        self,
        grad: bool,
        autocast: tuple[tuple[str, bool, torch.dtype, bool], ...],
        modules: AttributeSnapshot = UNCHANGED,
    ) -> None:
        self.grad, self.autocast, self.modules = grad, autocast, modules

    @classmethod
    def current(cls, modules: AttributeSnapshot) -> Context:
        """Return the current state; ``modules`` is the part that PyTorch does not store."""
        devices = ("cpu", "cuda") if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else ()
        autocast = tuple(
            (
                device,
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
                cls._is_uncached or torch.is_autocast_cache_enabled(),
            )
            for device in devices
        )
        return cls(torch.is_grad_enabled(), autocast, modules)

    @classmethod
    @contextlib.contextmanager
    def casts_of_body_uncached(cls) -> Iterator[None]:
        """Return a context for a body in which autocast caches no casts. Tasks that are recorded in it cache theirs.

        Autocast that the script has entered around the step still caches, as in one process.
        """
        kind = torch.amp.autocast_mode.autocast
        own = kind.__enter__

        def enter(autocast: Any) -> Any:
            result = own(autocast)
            if cls._is_uncached:
                torch.set_autocast_cache_enabled(False)
            return result

        try:
            cls._is_uncached = True
            # Contexts may have been made elsewhere, with a setting of their own.
            kind.__enter__ = enter  # type: ignore[method-assign]
            yield
        finally:
            kind.__enter__ = own  # type: ignore[method-assign]
            cls._is_uncached = False

    @classmethod
    @contextlib.contextmanager
    def casts_of_tasks_cached(cls) -> Iterator[None]:
        """Return a context in :meth:`casts_of_body_uncached` for tasks, whose casts are cached."""
        before, is_uncached = torch.is_autocast_cache_enabled(), cls._is_uncached
        try:
            cls._is_uncached = False
            torch.set_autocast_cache_enabled(True)
            yield
        finally:
            torch.set_autocast_cache_enabled(before)
            cls._is_uncached = is_uncached

    def is_current(self, modules: AttributeSnapshot) -> bool:
        """Return whether this is the current state; ``modules`` is the part that PyTorch does not store."""
        if self.modules is not modules or self.grad is not torch.is_grad_enabled():
            return False
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return self.autocast == self.current(modules).autocast
        return not self.autocast

    def key(self) -> Any:
        """Return a key that is equal for equal contexts."""
        return (self.grad, self.autocast, self.modules)

    def same(self, other: Context) -> bool:
        """Return whether two contexts have the same effect on a task."""
        return self.grad is other.grad and self.modules is other.modules and self.autocast == other.autocast


class Write(NamedTuple):
    """A tensor that a task changes in place, or that shares the storage of one.

    Attributes:
        source: The value before; for a replicated tensor, its index among the leaves of the arguments.
        result: The value after.
        has_graph: Whether the graph of the value after contains the task, and not only that of the value before.
    """

    source: Value | int
    result: Value
    has_graph: bool = True


class Task:
    """A computation on one partition.

    Attributes:
        name: Name in messages: the module's path or the function's name.
        call: The function.
        module: The module, if the task is a call of a module.
        args, kwargs: The arguments, with values instead of remote tensors.
        inputs: The values among the arguments, in the order of the structure; then other values of a storage to which
        the task writes.
        outputs: The values of the result, then those after the writes.
        writes: In-place changes; for each storage, its base first.
        output_spec: The description of the result, ``None`` until it is known.
        has_containers: Whether the arguments contain lists, dictionaries or objects, which the call may change.
        parts: For a call of a module, the ids of what it may share with other modules (ORD-3): containers and storages
        in attributes, and parameters and buffers that several modules have.
        changes: The ids of those that it changes, and of the modules to which the changed parameters and buffers
        belong.
        digest: Equal on ranks that record the same.
        signature: The function without its inputs; equal on ranks that record the same.
    """

    __slots__ = (
        "args", "call", "changes", "context", "digest", "has_containers", "inputs", "kwargs", "level", "module",
        "name", "output_spec", "outputs", "overwritten", "parts", "plan", "rank", "signature", "writes",
    )  # fmt: skip

    def __init__(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Value]) -> None:
        self.name, self.call, self.args, self.kwargs, self.inputs = name, call, args, kwargs, inputs
        self.rank = self.level = self.digest = 0
        self.signature: Any = None
        self.module: nn.Module | None = None
        self.has_containers = False
        self.outputs: list[Value] = []
        self.writes: list[Write] = []
        self.parts: tuple[int, ...] = ()
        self.changes: tuple[int, ...] = ()
        self.output_spec: OutputSpec | None = None
        #: Keys of storages of parameters and buffers that the called module writes to, if the body has views of them.
        self.overwritten: tuple[int | str, ...] = ()
        #: How to fill the arguments; ``False`` if each microbatch has to look at them, ``None`` until it is known.
        self.plan: CallPlan | Literal[False] | None = None
        self.context: Context = None  # type: ignore[assignment]

    def copy(self) -> Task:
        """Return a copy that shares all parts; several times as fast as :func:`copy.copy`.

        Each microbatch copies the tasks with replicated tensors.
        """
        new = Task.__new__(Task)
        new.args, new.call, new.context, new.digest, new.plan = (
            self.args,
            self.call,
            self.context,
            self.digest,
            self.plan,
        )
        new.has_containers, new.inputs, new.kwargs = self.has_containers, self.inputs, self.kwargs
        new.level, new.module, new.name, new.output_spec = self.level, self.module, self.name, self.output_spec
        new.outputs, new.overwritten, new.rank = self.outputs, self.overwritten, self.rank
        new.signature, new.writes = self.signature, self.writes
        new.parts, new.changes = self.parts, self.changes
        return new

    def replace_leaves(self, leaf: Callable[[Any], Any]) -> None:
        """Replace each value and each tensor of the arguments by ``leaf(item)``, in their order."""
        if self.has_containers:
            self.args, self.kwargs = object_state.snapshot(self.args, self.kwargs, leaf)
        else:
            self.args, self.kwargs = pytree.transform((self.args, self.kwargs), leaf)

    def leaves(self) -> list[Any]:
        """Return each value and each tensor of the arguments, in their order."""
        found: list[Any] = []

        def note(leaf: Any) -> Any:
            found.append(leaf)
            return leaf

        if self.has_containers:
            object_state.snapshot(self.args, self.kwargs, note)
        else:
            pytree.transform((self.args, self.kwargs), note)
        return found

    @property
    def known_spec(self) -> OutputSpec:
        """Return the output spec of a task for which it is known."""
        assert self.output_spec is not None, "the output spec is not known yet"
        return self.output_spec

    def saved(self) -> list[Any]:
        """Return the values and replicated tensors that autograd saves for the backward of the task."""
        if self.output_spec is None or not self.output_spec.saved:
            return []
        leaves = self.leaves()
        return [self.outputs[-1 - place] if place < 0 else leaves[place] for place in self.output_spec.saved]

    def __str__(self) -> str:
        takes = ", ".join(f"{value.parameter or '%' + str(value.index)}: {value.meta}" for value in self.inputs)
        gives = ", ".join(f"%{value.index}: {value.meta}" for value in self.outputs)
        return f"`{self.name}` on partition {self.rank} ({takes}) -> ({gives})"


class WithAttributes:
    """A call of a module that also returns the tensors that its forward sets as attributes."""

    __slots__ = ("_attributes", "_call", "_module")

    def __init__(self, call: Callable[..., Any], module: nn.Module, attributes: Sequence[tuple[str, str]]) -> None:
        self._call, self._module, self._attributes = call, module, attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; return its result and the attributes that the call has set."""
        result = self._call(*args, **kwargs)
        owners = [(self._module.get_submodule(path), name) for path, name in self._attributes]
        return result, tuple(getattr(owner, name) for owner, name in owners)


def partition_of(inputs: list[Value]) -> int:
    """Return the partition of an operation: that of its last available input, so that the fewest ranks wait.

    A parameter that is larger than all the other inputs is not moved.
    """
    values = [value for value in inputs if value.parameter is None]
    parameters = [value for value in inputs if value.parameter is not None]
    if not values:
        return max(parameters, key=lambda value: (value.meta.bytes, -value.rank)).rank
    best = max(values, key=lambda value: (value.level, value.meta.bytes, -value.rank))
    others = sum(value.meta.bytes for value in values)
    for value in parameters:
        if value.rank != best.rank and value.meta.bytes > others:
            return value.rank
    return best.rank


def digest_of(key: Any) -> int:
    """Return a digest that is equal on all ranks; the index of a device is ignored, because it may differ."""
    text = _DEVICE_NUMBER.sub("", repr(key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def chained_digest(before: int, digest: int) -> int:
    """Return the digest of a recording after one more call."""
    return (before * 1_000_003 + digest) & 0x7FFF_FFFF_FFFF_FFFF
