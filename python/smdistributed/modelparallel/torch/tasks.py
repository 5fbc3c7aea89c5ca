"""What a recording consists of: values, and tasks that make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from smdistributed.modelparallel.torch.handle import Meta
from smdistributed.modelparallel.torch.metadata import Outcome

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.running import Simple


class Value:
    """A tensor that some task makes, or a parameter.

    Attributes:
        index: Its number in the recording; -1 for a parameter.
        rank: The partition where it is.
        level: How many changes of the partition lie before it.
        meta: All but its numbers.
        parameter: The path of the parameter or buffer that it is.
    """

    _smp_leaf = True
    __slots__ = ("index", "level", "meta", "parameter", "rank")

    def __init__(self, index: int, rank: int, level: int, meta: Meta, parameter: str | None = None) -> None:
        self.index, self.rank, self.level, self.meta, self.parameter = index, rank, level, meta, parameter


class Context:
    """What of PyTorch's state a task needs as it was when the body called it."""

    __slots__ = ("autocast", "grad")

    def __init__(self, grad: bool, autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]) -> None:
        self.grad, self.autocast = grad, autocast

    @classmethod
    def current(cls) -> Context:
        """That of this moment."""
        devices = ("cpu", "cuda") if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else ()
        autocast = tuple(
            (
                device,
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
                torch.is_autocast_cache_enabled(),
            )
            for device in devices
        )
        return cls(torch.is_grad_enabled(), autocast)

    def key(self) -> Any:
        """Equal for equal contexts."""
        return (self.grad, self.autocast)

    def same(self, other: Context) -> bool:
        """Whether a task cannot tell them apart."""
        return self.grad is other.grad and self.autocast == other.autocast


class Task:
    """What is to be computed on one partition.

    Attributes:
        name: For messages: the module's path or the function's name.
        call: What is called.
        module: Of a task that is a call of a module, that.
        args, kwargs: With values instead of handles.
        inputs: Values among them, in the order of the structure.
        outputs: Values that come out, then new versions of what is changed in place.
        mutated: Of the latter, the values that they replace.
        outcome: What comes out, ``None`` until it is known.
        digest: The same on ranks that record the same.
    """

    __slots__ = (
        "args", "call", "context", "copies", "digest", "inputs", "kwargs", "level", "module", "mutated", "name",
        "outcome", "outputs", "rank", "simple",
    )  # fmt: skip

    def __init__(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Value]) -> None:
        self.name, self.call, self.args, self.kwargs, self.inputs = name, call, args, kwargs, inputs
        self.rank = self.level = self.digest = 0
        self.module: nn.Module | None = None
        self.outputs: list[Value] = []
        self.mutated: list[Value] = []
        #: Places among all leaves of the tensors that are changed and need a copy of their own for that.
        self.copies: frozenset[int] = frozenset()
        self.outcome: Outcome | None = None
        #: How the executor runs it, once it has looked.
        self.simple: Simple | Literal[False] | None = None
        self.context: Context = None  # type: ignore[assignment]

    def __str__(self) -> str:
        takes = ", ".join(f"{value.parameter or '%' + str(value.index)}: {value.meta}" for value in self.inputs)
        gives = ", ".join(f"%{value.index}: {value.meta}" for value in self.outputs)
        return f"`{self.name}` on partition {self.rank} ({takes}) -> ({gives})"
