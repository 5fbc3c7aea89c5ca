"""How a task fills the arguments of its call, found once for all microbatches that repeat the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.tasks import Task, Value


class CallPlan:
    """The places of values among the arguments of a task that changes none of them and gets no containers.

    Most tasks are of this kind. Replicated tensors and constants are passed unchanged.
    """

    __slots__ = ("_named", "_named_structures", "_placed", "_placed_structures", "has_replicated", "is_single_output")

    def __init__(self, task: Task) -> None:
        named = dict(task.kwargs or {})
        self._placed = [place for place, item in enumerate(task.args) if type(item) is Value]
        self._placed_structures = [place for place, item in enumerate(task.args) if not _is_leaf(item)]
        self._named = [name for name, item in named.items() if type(item) is Value]
        self._named_structures = [name for name, item in named.items() if not _is_leaf(item)]
        #: Whether replicated tensors are among the arguments.
        self.has_replicated = any(isinstance(leaf, torch.Tensor) for leaf in task.leaves())
        #: Whether the result is one tensor, and not a structure.
        self.is_single_output = type(task.known_spec.template) is pytree.Slot

    @classmethod
    def of(cls, task: Task) -> CallPlan | Literal[False]:
        """Return the plan of a task; ``False`` if each microbatch has to look at its arguments."""
        spec = task.output_spec
        if spec is None or spec.mutated or spec.effects or task.has_containers or task.writes:
            return False
        return cls(task)

    def arguments(
        self, task: Task, env: Mapping[int, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a task.

        Args:
            task: The task, or one of another microbatch that repeats its call.
            env: Tensors by the indices of their values.
            parameters: Parameters and buffers by their paths.
        """

        def tensor(value: Value) -> torch.Tensor:
            return env[value.index] if value.parameter is None else parameters[value.parameter]

        args, kwargs = list(task.args), task.kwargs
        for place in self._placed:
            args[place] = tensor(args[place])
        for place in self._placed_structures:
            args[place] = _filled(args[place], tensor)
        if self._named or self._named_structures:
            kwargs = dict(kwargs)
            for name in self._named:
                kwargs[name] = tensor(kwargs[name])
            for name in self._named_structures:
                kwargs[name] = _filled(kwargs[name], tensor)
        return args, kwargs or {}


def _is_leaf(item: Any) -> bool:
    return type(item) in pytree.ATOMS or isinstance(item, torch.Tensor) or getattr(type(item), "_smp_leaf", False)


def _filled(structure: Any, tensor: Callable[[Value], torch.Tensor]) -> Any:
    return pytree.transform(structure, lambda leaf: tensor(leaf) if type(leaf) is Value else leaf)
