"""The cost model: estimated time and saved memory of operations, from their shapes.

The partitioner and the schedules use it. Here operations are counted; what they cost a device is the core's to say
(``rust-core/src/partition/device_model.rs``).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from smdistributed import _core

_aten = torch.ops.aten


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Two products for each query head; groups of query heads may share heads of keys and values."""
    del args, kwargs
    return 2 * query.numel() * key.shape[-2] + 2 * math.prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _grouped_product_flops(rows: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Each row meets the matrix of one group."""
    del args, kwargs
    return 2 * rows.numel() * weights.shape[-1]


_FLOPS = dict(flop_registry)
_FLOPS |= {
    getattr(_aten, name): _attention_flops
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)
}  # fmt: skip
if hasattr(_aten, "_grouped_mm"):
    _FLOPS[_aten._grouped_mm] = _grouped_product_flops


#: With operands of several types, fake tensors give these another type than real ones.
_PROMOTED_OTHERWISE = {_aten.binary_cross_entropy_with_logits, _aten.huber_loss, _aten.soft_margin_loss}


class OpCost(NamedTuple):
    """The cost of a task for one microbatch.

    Nanoseconds of its forward and of the two parts of its backward; bytes saved for the first part beside inputs and
    outputs, and bytes kept from there for the second one.
    """

    forward: int
    input: int
    weight: int
    kept_bytes: int
    waiting_bytes: int


#: The cost of a task that could not be traced.
UNKNOWN_COST = OpCost(*(int(_core.operation_nanoseconds(0.0, 0)),) * 3, kept_bytes=0, waiting_bytes=0)


def nanoseconds(func: Any, args: Any, kwargs: Any, out: Any, moved_bytes: int) -> float:
    """Estimates the time of an operation that reads and writes ``moved_bytes``."""
    if func._schema.name.startswith("aten::empty"):
        # Memory without numbers.
        return 0.0
    formula = _FLOPS.get(func._overloadpacket)
    return _core.operation_nanoseconds(_flops(formula, args, kwargs, out) if formula else 0.0, moved_bytes)


def _flops(formula: Any, args: Any, kwargs: Any, out: Any) -> float:
    try:
        return float(formula(*args, **kwargs, out_val=out))
    except Exception:
        return _product_flops(args, kwargs, out)


def _product_flops(args: Any, kwargs: Any, out: Any) -> float:
    """A product whose formula does not know these shapes: that of two matrices with as many elements."""
    sizes = sorted(
        (leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), reverse=True
    )
    made = max((leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), default=0)
    return 2.0 * math.sqrt(math.prod(sizes[:2]) * made)


def casts_are_cached() -> bool:
    """Whether autocast makes a narrow parameter once for all microbatches of a step."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def is_cast(func: Any) -> bool:
    """Whether it is the operation by which autocast narrows a parameter."""
    return func is _aten._to_copy.default


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function that may draw random numbers draws them from the default generator.

    Attention without dropout does not.
    """
    if kwargs.get("generator") is not None:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0))


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
    """Returns the active counter of this thread."""
    return _active.counter


class Counter(TorchDispatchMode):
    """Sums up the cost of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self._casts_are_cached = casts_are_cached()
        self._parameters: set[int] = set()
        #: Storages that are written to.
        self.written: set[int] = set()
        self._outside: set[int] = set()
        # Kept, so that no address is used again.
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        #: Tensors that are not strided, kept for the same reason.
        self._others: list[torch.Tensor] = []
        self._saved: set[int] = set()
        self._taken: set[int] = set()
        #: An operation that fake tensors describe wrongly, if there was one.
        self.mistrusted: Any = None
        self._forward = self._input = self._weight = 0.0
        # Products that may be put off take what a layer was called with, and a gradient as large as what it made.
        self._multiplied: set[int] = set()
        self._gradient_bytes = 0
        self._recomputes = False
        #: Kinds of the default generators of PyTorch that operations draw from.
        self.draws: set[str] = set()

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Registers a tensor as a parameter; returns it."""
        self._parameters.add(self._key(tensor))
        return tensor

    def storage(self, tensor: torch.Tensor) -> int:
        """Identifies a tensor's storage, as long as this object exists."""
        return self._key(tensor)

    def writes_parameters(self) -> bool:
        """Whether a parameter or buffer is written to."""
        return not self.written.isdisjoint(self._parameters)

    def is_saved(self, tensor: torch.Tensor) -> bool:
        """Whether autograd has saved a tensor of this storage for the backward."""
        return self._key(tensor) in self._saved

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares the storage of a parameter."""
        return self._key(tensor) in self._parameters

    def outside(self, tensor: torch.Tensor) -> None:
        """Registers an input or output: its memory belongs to the caller."""
        self._outside.add(self._key(tensor))

    def untouched(self, tensors: Mapping[int, torch.Tensor], outputs: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Returns the places of the tensors that no operation read and that share no memory with an output."""
        made = {self._key(output) for output in outputs}
        keys = {place: self._key(tensor) for place, tensor in tensors.items()}
        return tuple(place for place, key in keys.items() if key not in self._taken and key not in made)

    def cost(self) -> OpCost:
        """Returns the sum."""
        kept = self._bytes(self._saved - self._parameters - self._outside)
        waiting = self._bytes(self._multiplied) + self._gradient_bytes
        return OpCost(round(self._forward), round(self._input), round(self._weight), kept, waiting)

    def _bytes(self, keys: set[int]) -> int:
        return sum(self._size(key) for key in keys)

    def _size(self, key: int) -> int:
        known = self._seen.get(key)
        return 0 if known is None else known[1]

    @contextlib.contextmanager
    def recomputing(self, *arguments: Any) -> Iterator[None]:
        """A context whose operations save their arguments only, and run again in the backward."""
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                self._save(leaf)
        before, self._recomputes = self._recomputes, True
        try:
            yield
        finally:
            self._recomputes = before

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
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.draws.update(leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        if func._schema.is_mutable:
            self.written.update(map(self._key, _written(func._schema, args, kwargs)))
        if func._overloadpacket in _PROMOTED_OTHERWISE and len({tensor.dtype for tensor in operands}) > 1:
            self.mistrusted = func
        taken = {self._key(tensor) for tensor in operands}
        self._taken |= taken
        made = {self._key(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        if self._casts_are_cached and is_cast(func) and taken <= self._parameters:
            self._parameters |= made
        elif func._schema.is_mutable or not taken & made:
            moved = self._bytes(taken | made)
            time = nanoseconds(func, args, kwargs, out, moved)
            self._forward += time
            # A gradient of either costs about as much as the forward.
            wanted = {self._key(tensor) for tensor in operands if tensor.requires_grad}
            self._input += time * (min(2, len(wanted - self._parameters)) + self._recomputes)
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
        if tensor.layout != torch.strided:
            # Sparse tensors have no memory of their own: their parts have.
            self._others.append(tensor)
            return -id(tensor)
        memory = tensor.untyped_storage()
        ref = StorageWeakRef(memory)
        self._seen.setdefault(ref.cdata, (ref, memory.nbytes()))
        return ref.cdata

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and not self._recomputes:
            self._saved.add(self._key(tensor))
        return tensor
