"""What operations are estimated to take and to keep, from their shapes: for partitions and for schedules.

Only ratios matter. They are about those of a current accelerator that computes in bfloat16.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

FLOPS_PER_NANOSECOND = 400_000.0
MEMORY_BYTES_PER_NANOSECOND = 3_000.0
LINK_NANOSECONDS = 10_000
LINK_BYTES_PER_NANOSECOND = 200
# No operation takes less: that much its launch costs.
OPERATION_NANOSECONDS = 2_000.0
# What a task takes of the host, on the rank that runs it and on those that only record it.
TASK_NANOSECONDS = 15_000

_aten = torch.ops.aten
_FLOPS = dict(flop_registry)
_FLOPS[_aten._scaled_dot_product_flash_attention_for_cpu] = lambda q, k, v, *args, out_val=None, **kwargs: sdpa_flop(
    q.shape, k.shape, v.shape
)


class Price(NamedTuple):
    """Of a task, for one microbatch: nanoseconds of its forward and of both parts of its backward; the bytes that it keeps for
    the first part beside what goes in and comes out, and those that it keeps from there to the second one."""

    forward: int
    input: int
    weight: int
    kept_bytes: int
    waiting_bytes: int


#: Of what nobody could look at.
UNKNOWN = Price(*[int(OPERATION_NANOSECONDS)] * 3, 0, 0)


def nanoseconds(func: Any, args: Any, kwargs: Any, out: Any, moved_bytes: int) -> float:
    """What an operation takes that reads and writes so many bytes."""
    if func._schema.name.startswith("aten::empty"):
        # Memory without numbers.
        return 0.0
    flops = _FLOPS.get(func._overloadpacket)
    arithmetic = flops(*args, **kwargs, out_val=out) / FLOPS_PER_NANOSECOND if flops else 0.0
    return max(arithmetic, moved_bytes / MEMORY_BYTES_PER_NANOSECOND, OPERATION_NANOSECONDS)


def casts_are_kept() -> bool:
    """Whether autocast makes a narrow parameter once for all microbatches of a step."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def is_cast(func: Any) -> bool:
    """Whether it is the operation by which autocast narrows a parameter."""
    return func is _aten._to_copy.default


def _written(schema: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The operands that an operation writes to."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        operand = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(operand) if isinstance(leaf, torch.Tensor))


class _Active(threading.local):
    counter: Counter | None = None


_active = _Active()


def counter() -> Counter | None:
    """What counts in this thread."""
    return _active.counter


class Counter(TorchDispatchMode):
    """Adds up what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self._casts_are_kept = casts_are_kept()
        self._parameters: set[int] = set()
        #: Storages that are written to.
        self.written: set[int] = set()
        self._outside: set[int] = set()
        # Kept, so that no address is used again.
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._saved: set[int] = set()
        self._forward = self._input = self._weight = 0.0
        # Products that may be put off take what a layer was called with, and a gradient as large as what it made.
        self._multiplied: set[int] = set()
        self._gradient_bytes = 0
        self._computes_again = False
        #: Kinds of the default generators of PyTorch that operations draw from.
        self.draws: set[str] = set()

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Says that a tensor is a parameter; returns it."""
        self._parameters.add(self._key(tensor))
        return tensor

    def storage(self, tensor: torch.Tensor) -> int:
        """Identifies a tensor's storage, as long as this object exists."""
        return self._key(tensor)

    def writes_parameters(self) -> bool:
        """Whether a parameter or buffer is written to."""
        return not self.written.isdisjoint(self._parameters)

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares the storage of a parameter."""
        return self._key(tensor) in self._parameters

    def outside(self, tensor: torch.Tensor) -> None:
        """Says that a tensor goes in or comes out: it is kept by whoever has it."""
        self._outside.add(self._key(tensor))

    def price(self) -> Price:
        """The sum."""
        kept = self._bytes(self._saved - self._parameters - self._outside)
        waiting = self._bytes(self._multiplied) + self._gradient_bytes
        return Price(round(self._forward), round(self._input), round(self._weight), kept, waiting)

    def _bytes(self, keys: set[int]) -> int:
        return sum(self._seen[key][1] for key in keys)

    @contextlib.contextmanager
    def computing_again(self, *arguments: Any) -> Iterator[None]:
        """What runs inside keeps its arguments only, and runs again in the backward."""
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                self._save(leaf)
        before, self._computes_again = self._computes_again, True
        try:
            yield
        finally:
            self._computes_again = before

    def __enter__(self) -> Counter:
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._saving.__enter__()
        _active.counter = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _active.counter = None
        self._saving.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.draws.update(leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        if func._schema.is_mutable:
            self.written.update(map(self._key, _written(func._schema, args, kwargs)))
        taken = {self._key(tensor) for tensor in operands}
        made = {self._key(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        if self._casts_are_kept and is_cast(func) and taken <= self._parameters:
            self._parameters |= made
        elif func._schema.is_mutable or not taken & made:
            moved = sum(self._seen[key][1] for key in taken | made)
            time = nanoseconds(func, args, kwargs, out, moved)
            self._forward += time
            # A gradient of either costs about as much as the forward.
            wanted = {self._key(tensor) for tensor in operands if tensor.requires_grad}
            self._input += time * (min(2, len(wanted - self._parameters)) + self._computes_again)
            if wanted & self._parameters:
                # Of a backward's two parts, the second one has products only.
                if func._overloadpacket in _FLOPS:
                    self._weight += time
                    self._multiplied |= taken - self._parameters
                    self._gradient_bytes += self._bytes(made)
                else:
                    self._input += time
        elif taken & self._parameters:
            self._parameters |= made
        return out

    def _key(self, tensor: torch.Tensor) -> int:
        memory = tensor.untyped_storage()
        ref = StorageWeakRef(memory)
        self._seen.setdefault(ref.cdata, (ref, memory.nbytes()))
        return ref.cdata

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and not self._computes_again:
            self._saved.add(self._key(tensor))
        return tensor
