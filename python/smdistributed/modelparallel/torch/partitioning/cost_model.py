"""The cost model: estimated time and saved memory of operations, from their shapes.

The partitioner and the schedules use it. This module counts operations and bytes; the core converts them to times
(``rust-core/src/partition/device_model.rs``).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from smdistributed import _core
from smdistributed.modelparallel.torch.tracing.restored_tensors import (
    RestoredTensors,
    is_mutable,
    statistics_written_by,
    written_by,
)

_aten = torch.ops.aten


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of two products for each query head; groups of query heads may share key and value heads."""
    del args, kwargs
    return 2 * query.numel() * key.shape[-2] + 2 * math.prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _grouped_product_flops(rows: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a grouped product, in which each row is multiplied by the matrix of one group."""
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


#: Operations for which fake tensors report another result type than real ones, if operands have different types.
_PROMOTED_OTHERWISE = {_aten.binary_cross_entropy_with_logits, _aten.huber_loss, _aten.soft_margin_loss}


class OpCost(NamedTuple):
    """The cost of a task for one microbatch.

    Nanoseconds of its forward and of the two parts of its backward; bytes saved for the first part in addition to
    inputs and outputs, and bytes kept from there for the second part.
    """

    forward: int
    input: int
    weight: int
    kept_bytes: int
    waiting_bytes: int


#: The cost of a task that could not be traced.
UNKNOWN_COST = OpCost(*(int(_core.operation_nanoseconds(0.0, 0)),) * 3, kept_bytes=0, waiting_bytes=0)


def nanoseconds(func: Any, args: Any, kwargs: Any, out: Any, moved_bytes: int) -> float:
    """Estimate the time of an operation that reads and writes ``moved_bytes``."""
    if func._schema.name.startswith("aten::empty"):
        # Allocations without computation.
        return 0.0
    formula = _FLOPS.get(func._overloadpacket)
    return _core.operation_nanoseconds(_flops(formula, args, kwargs, out) if formula else 0.0, moved_bytes)


def _flops(formula: Any, args: Any, kwargs: Any, out: Any) -> float:
    try:
        return float(formula(*args, **kwargs, out_val=out))
    except Exception:
        return _product_flops(args, kwargs, out)


def _product_flops(args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of a product with unsupported shapes: those of two matrices with as many elements."""
    sizes = sorted(
        (leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), reverse=True
    )
    made = max((leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), default=0)
    return 2.0 * math.sqrt(math.prod(sizes[:2]) * made)


def casts_are_cached() -> bool:
    """Return whether autocast casts a parameter once for all microbatches of a step."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def is_cast(func: Any) -> bool:
    """Return whether it is the operation with which autocast casts a parameter."""
    return func is _aten._to_copy.default


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function that may draw random numbers uses the default generator.

    Attention without dropout draws none.
    """
    if kwargs.get("generator") is not None:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0))


class _Active(threading.local):
    counter: Counter | None = None


_active = _Active()


def counter() -> Counter | None:
    """Return the active counter of this thread."""
    return _active.counter


class Counter(TorchDispatchMode):
    """Sums up the cost of the operations in the context."""

    def __init__(self) -> None:
        super().__init__()
        self._casts_are_cached = casts_are_cached()
        self._parameters: set[int] = set()
        #: Storages to which operations write.
        self.written: set[int] = set()
        #: Storages of running statistics. Autograd saves them, but the backward does not use them.
        self.statistics: set[int] = set()
        #: The tensors to which operations write that are not fake, such as those in attributes; ``None`` if not wanted.
        self.written_real: list[torch.Tensor] | None = None
        #: Storages of arguments, and of what operations compute from them or from parameters.
        self._derived: set[int] = set()
        self._outside: set[int] = set()
        # References to the tensors, so that their addresses are not reused.
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        #: Tensors without storage, such as sparse ones, kept for the same reason.
        self._others: list[torch.Tensor] = []
        self._saved: set[int] = set()
        self._taken: set[int] = set()
        #: The first operation that fake tensors describe wrongly, if any.
        self.mistrusted: Any = None
        self._forward = self._input = self._weight = 0.0
        # Deferred products keep a layer's input, and a gradient of the size of its output.
        self._multiplied: set[int] = set()
        self._gradient_bytes = 0
        self._recomputes = False
        #: Kinds of PyTorch's default generators from which operations draw.
        self.draws: set[str] = set()
        #: Storages that operations have made.
        self._made: set[int] = set()
        self._restored = RestoredTensors()

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor as a parameter; return it."""
        self._parameters.add(self._key(tensor))
        return tensor

    def argument(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor as an argument of the call; return it."""
        self._derived.add(self._key(tensor))
        return tensor

    def is_derived(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is an argument or a parameter, or was computed from one."""
        return self._key(tensor) in self._derived or self.is_parameter(tensor)

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Return whether an operation has read a tensor of this storage."""
        return self._key(tensor) in self._taken

    def storage(self, tensor: torch.Tensor) -> int:
        """Return an id of a tensor's storage that is unique as long as this object exists."""
        return self._key(tensor)

    def writes_parameters(self) -> bool:
        """Return whether an operation writes to a parameter or buffer."""
        return not self.written.isdisjoint(self._parameters)

    def is_saved(self, tensor: torch.Tensor) -> bool:
        """Return whether autograd has saved a tensor of this storage for the backward."""
        return self._key(tensor) in self._saved

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the storage of a parameter."""
        return self._key(tensor) in self._parameters

    def outside(self, tensor: torch.Tensor) -> None:
        """Register an input or output, whose memory belongs to the caller."""
        self._outside.add(self._key(tensor))

    def unread(self, tensors: Mapping[int, torch.Tensor], outputs: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Return the indices of tensors that no operation has read and that share no storage with an output."""
        made = {self._key(output) for output in outputs}
        keys = {place: self._key(tensor) for place, tensor in tensors.items()}
        return tuple(place for place, key in keys.items() if key not in self._taken and key not in made)

    def cost(self) -> OpCost:
        """Return the sum of the costs."""
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
        """Return a context whose operations save only their arguments, and run again in the backward."""
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
        self._restored.restore()
        _active.counter = None
        self._saving.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_mutable(func):
            self._restored.before(func, args, kwargs, self._is_own)
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.draws.update(leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        if is_mutable(func):
            changed = list(written_by(func, args, kwargs))
            self.written.update(map(self._key, changed))
            self.statistics.update(map(self._key, statistics_written_by(func, args, kwargs)))
            if self.written_real is not None:
                self.written_real += [tensor for tensor in changed if not isinstance(tensor, FakeTensor)]
        if func._overloadpacket in _PROMOTED_OTHERWISE and len({tensor.dtype for tensor in operands}) > 1:
            self.mistrusted = func
        taken = {self._key(tensor) for tensor in operands}
        self._taken |= taken
        made = {self._key(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        self._made |= made - taken
        if not (taken.isdisjoint(self._derived) and taken.isdisjoint(self._parameters)):
            self._derived |= made
        if self._casts_are_cached and is_cast(func) and taken <= self._parameters:
            self._parameters |= made
        elif func._schema.is_mutable or not taken & made:
            moved = self._bytes(taken | made)
            time = nanoseconds(func, args, kwargs, out, moved)
            self._forward += time
            # Each of the two gradients costs about as much as the forward.
            wanted = {self._key(tensor) for tensor in operands if tensor.requires_grad}
            self._input += time * (min(2, len(wanted - self._parameters)) + self._recomputes)
            if wanted & self._parameters:
                # The second part of a backward consists of products and of the gradients of embeddings.
                if func._overloadpacket in _FLOPS or func._overloadpacket is _aten.embedding:
                    self._weight += time
                    self._multiplied |= taken - self._parameters
                    self._gradient_bytes += self._bytes(made)
                else:
                    self._input += time
        elif taken & self._parameters:
            self._parameters |= made
        return out

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is an argument or a parameter, or was made in the context."""
        key = self._key(tensor)
        own = (self._made, self._derived, self._parameters)
        return isinstance(tensor, FakeTensor) or any(key in each for each in own)

    def _key(self, tensor: torch.Tensor) -> int:
        if tensor.layout != torch.strided:
            # A sparse tensor has no storage itself, but its components have.
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
