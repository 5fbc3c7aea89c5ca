"""Values that a step's body reads from constant tensors, such as masks of positions, equal in each microbatch.

Reading a value from a CUDA tensor waits for all work queued in its stream. Bodies read the same values in each
microbatch: for example, transformers checks ``torch.arange`` for packed sequences. The value is read from the device
once, and cached:

- CON-1: a tensor is constant if a function of :data:`_FUNCTIONS` computed it from constant tensors and other
  arguments. The function and the arguments identify it, not its address. Tensors that scripts create in order to
  write to them (``zeros``, ``full``) do not count as constant.
- CON-2: it stays constant until its version, or that of a tensor with the same storage, changes, or until it is
  passed to a function that is not listed. Such a function may write to it without a new version, or provide access to
  do so (``data``, ``data_ptr``, collectives).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta, version_of

#: Functions whose results depend only on their arguments.
_NAMES = (
    "arange", "eye", "tril", "triu",
    "view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "flatten", "permute", "transpose", "repeat",
    "flip", "cat", "stack", "diff", "cumsum", "where", "to", "type", "long", "int", "float", "bool", "clone",
    "contiguous", "add", "sub", "mul", "div", "floor_divide", "remainder", "neg", "abs", "clamp", "minimum", "maximum",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "all", "any", "min", "max", "sum",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__", "__neg__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__invert__", "__getitem__",
)  # fmt: skip
_FUNCTIONS = frozenset(
    getattr(owner, name) for owner in (torch, torch.Tensor) for name in _NAMES if hasattr(owner, name)
)
_QUESTIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
) | {torch.Tensor.is_nonzero, torch.is_nonzero}
_LIMIT = 10_000


class Constants:
    """Constant tensors in the bodies of a pipeline's steps, and values that were read from them.

    Args:
        devices: Types of the devices whose tensors are tracked: those on which reading a value waits.
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self._devices = frozenset(devices)
        #: By the id of a tensor: the tensor, its version, and the number of the call that computed it.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        #: Function calls with their arguments, numbered.
        self._producers: dict[Any, int] = {}
        self._answers: dict[Any, Any] = {}

    def end_of_body(self) -> None:
        """Forget the tensors of a microbatch, and keep the values that were read."""
        self._known.clear()

    def call(self, func: Any, key: Callable[[], Any], tensors: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Call a function of replicated tensors.

        Args:
            func: The function.
            key: Returns a description of its arguments, which need not describe the tensors; ``None`` if there is none.
            tensors: The tensors among its arguments, in the order of the description.
            compute: Calls the function.

        Returns:
            The function's result, possibly from an earlier call with the same constants.
        """
        if func in _QUESTIONS:
            producer = self._producer_of(tensors[0]) if len(tensors) == 1 else None
            described = None if producer is None else key()
            if described is None:
                return compute()
            question = (func, described, producer)
            if question not in self._answers:
                answer = compute()
                if isinstance(answer, list):
                    # Not cached, because the caller may change the list, and it may be long.
                    return answer
                self._answers[question] = answer
            return self._answers[question]
        result = compute()
        if func not in _FUNCTIONS:
            if any(id(tensor) in self._known for tensor in tensors):
                self._known.clear()
        elif isinstance(result, torch.Tensor):
            self._note(result, func, key, tensors)
        return result

    def _note(self, result: torch.Tensor, func: Any, key: Callable[[], Any], tensors: Sequence[Any]) -> None:
        if result.device.type not in self._devices or result.layout != torch.strided:
            return
        if result.requires_grad or result.is_inference():
            return
        operands = [self._producer_of(tensor) for tensor in tensors]
        described = None if None in operands else key()
        if described is None:
            return
        if len(self._producers) >= _LIMIT:
            self._known.clear()
            self._producers.clear()
            self._answers.clear()
            return
        producer = self._producers.setdefault((func, described, *operands, TensorMeta.of(result)), len(self._producers))
        self._known[id(result)] = weakref.ref(result), version_of(result), producer

    def _producer_of(self, tensor: torch.Tensor) -> int | None:
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != version_of(tensor):
            return None
        return found[2]
