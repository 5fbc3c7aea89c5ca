"""Tensors from outside of a call that is run to find its outputs or costs; afterwards they are as before it.

In a context of fake tensors, PyTorch computes operations on tensors that are not fake: `self.seen.mul_(0.5)` changes a
plain tensor in an attribute. If any operand is fake, numbers stay, but versions and graphs change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves


class _Before(NamedTuple):
    """A tensor before the first write: an alias of its memory, and a context that restores its version."""

    tensor: torch.Tensor
    alias: torch.Tensor
    is_leaf: bool
    version: Any


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor if tensor._base is None else tensor._base


class RestoredTensors:
    """Copies of tensors from before the first write of a call, and states of generators from before it draws."""

    def __init__(self) -> None:
        self._tensors: dict[int, _Before] = {}
        #: The numbers of those that operations have changed.
        self._numbers: dict[int, torch.Tensor] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def before(self, func: Any, args: Any, kwargs: Any, is_own: Callable[[torch.Tensor], bool]) -> None:
        """Keep what an operation that writes in place is about to change.

        Args:
            func: The operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            is_own: Returns whether a tensor is an argument of the call, or made by it.
        """
        # A fake view of a real tensor has its version.
        written = [base for tensor in written_by(func, args, kwargs) if not is_own(base := _base_of(tensor))]
        if not written:
            return
        is_computed = not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        self._before_write(written, is_computed)
        if is_computed and torch.Tag.nondeterministic_seeded in func.tags:
            self._before_draw(written[0].device, kwargs.get("generator"))

    def _before_write(self, tensors: Iterable[torch.Tensor], is_computed: bool) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for tensor in tensors:
                if tensor.layout != torch.strided:
                    continue
                is_inference = tensor.is_inference()
                with torch.inference_mode(is_inference):
                    if id(tensor) not in self._tensors:
                        version = None if is_inference else torch.autograd._unsafe_preserve_version_counter(tensor)
                        self._tensors[id(tensor)] = _Before(tensor, tensor.detach(), tensor.is_leaf, version)
                    if is_computed and id(tensor) not in self._numbers:
                        self._numbers[id(tensor)] = self._tensors[id(tensor)].alias.clone()

    def _before_draw(self, device: torch.device, generator: torch.Generator | None) -> None:
        if generator is None:
            is_host = device.type == "cpu"
            generator = torch.default_generator if is_host else torch.cuda.default_generators[device.index or 0]
        if id(generator) not in self._generators:
            with _disable_current_modes():
                self._generators[id(generator)] = generator, generator.get_state()

    def restore(self) -> None:
        """Give the tensors their numbers, shapes, graphs and versions, and the generators their states."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            # Tensors may share memory: the first copy is the last to be written back.
            for identity, numbers in reversed(self._numbers.items()):
                alias = self._tensors[identity].alias
                with torch.inference_mode(alias.is_inference()):
                    alias.copy_(numbers)
            for tensor, alias, is_leaf, version in self._tensors.values():
                if tensor.shape != alias.shape or tensor.data_ptr() != alias.data_ptr():
                    tensor.data = alias
                if is_leaf and not tensor.is_leaf:
                    tensor.detach_()
                if version is not None:
                    version.__exit__(None, None, None)
            for generator, state in self._generators.values():
                generator.set_state(state)
        self._tensors.clear()
        self._numbers.clear()
        self._generators.clear()


_aten = torch.ops.aten
#: Operators that write to running statistics, although their schemas do not show it: the places of these arguments, and
#: that of the argument that tells whether the layer is trained, if any.
_STATISTICS: dict[Any, tuple[tuple[int, int], int | None]] = {
    _aten.native_batch_norm: ((3, 4), 5),
    _aten.cudnn_batch_norm: ((3, 4), 5),
    _aten.miopen_batch_norm: ((3, 4), 5),
    _aten.batch_norm_update_stats: ((1, 2), None),
    _aten.batch_norm_gather_stats: ((3, 4), None),
    _aten.batch_norm_gather_stats_with_counts: ((3, 4), None),
}


def is_mutable(func: Any) -> bool:
    """Return whether an operator may write to an operand."""
    return bool(func._schema.is_mutable) or func._overloadpacket in _STATISTICS


def statistics_written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the running statistics to which an operation writes; autograd's version counters do not register this."""
    if func._overloadpacket not in _STATISTICS:
        return []
    places, training = _STATISTICS[func._overloadpacket]
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
    ]
    if training is not None and not given[training]:
        return []
    return [given[place] for place in places if given[place] is not None]


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the operands to which an operation writes."""
    yield from statistics_written_by(func, args, kwargs)
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        operand = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(operand) if isinstance(leaf, torch.Tensor))
