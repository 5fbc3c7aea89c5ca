"""Values that a step's body reads from constant tensors, such as masks made of positions, which no microbatch changes.

Reading a value from a CUDA tensor waits for all work queued in its stream. Bodies read the same in each microbatch:
transformers looks at ``torch.arange`` for packed sequences, for example. The device is asked once, and the answer is
remembered:

- CON-1: a tensor is constant if a function of :data:`_FUNCTIONS` made it of constant tensors and of arguments that are
  no tensors. The function and the arguments identify it, not its address. Tensors that scripts make to be written to
  (``zeros``, ``full``) are not constant.
- CON-2: it stays constant until its version changes, or that of a tensor with the same storage, or until a function
  that is not listed gets it. Such a function may write to it without a new version, or give a way to do so (``data``,
  ``data_ptr``, collectives).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta, version_of

#: Functions of which the same comes out for the same arguments, in any state of the process.
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
    """Constant tensors of the bodies of a pipeline's steps, and answers about them.

    Args:
        devices: Types of the devices whose tensors are followed: those on which a question waits.
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self._devices = frozenset(devices)
        #: By the identity of a tensor: it, its version, and the number of what it was made by.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        #: Functions with their arguments, numbered.
        self._producers: dict[Any, int] = {}
        self._answers: dict[Any, Any] = {}

    def end_of_body(self) -> None:
        """Forgets the tensors of a microbatch, and keeps the answers."""
        self._known.clear()

    def call(self, func: Any, key: Any, tensors: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Calls a function of replicated tensors.

        Args:
            func: The function.
            key: A description of its arguments but for the numbers of tensors; ``None`` if there is none.
            tensors: The tensors among its arguments, in the order of the description.
            compute: The call.

        Returns:
            What the function returns, or returned for the same constants before.
        """
        if func in _QUESTIONS:
            producer = self._producer_of(tensors[0]) if len(tensors) == 1 else None
            if producer is None or key is None:
                return compute()
            question = (func, key, producer)
            if question not in self._answers:
                answer = compute()
                if isinstance(answer, list):
                    # The caller may change it, and it may be long.
                    return answer
                self._answers[question] = answer
            return self._answers[question]
        result = compute()
        if func not in _FUNCTIONS:
            if any(id(tensor) in self._known for tensor in tensors):
                self._known.clear()
        elif key is not None and isinstance(result, torch.Tensor):
            self._note(result, func, key, tensors)
        return result

    def _note(self, result: torch.Tensor, func: Any, key: Any, tensors: Sequence[Any]) -> None:
        if result.device.type not in self._devices or result.layout != torch.strided:
            return
        if result.requires_grad or result.is_inference():
            return
        operands = [self._producer_of(tensor) for tensor in tensors]
        if None in operands:
            return
        if len(self._producers) >= _LIMIT:
            self._known.clear()
            self._producers.clear()
            self._answers.clear()
            return
        producer = self._producers.setdefault((func, key, *operands, TensorMeta.of(result)), len(self._producers))
        self._known[id(result)] = weakref.ref(result), version_of(result), producer

    def _producer_of(self, tensor: torch.Tensor) -> int | None:
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != version_of(tensor):
            return None
        return found[2]
