"""Optimizer state sharding: each of the ranks that hold the same parameters updates a part of them.

Parameters of one type are concatenated into a flat tensor (a row), and the core divides it evenly
(``rust-core/src/sharding.rs``).

- OSH-1: a parameter is a view of its row, and a virtual parameter, which the wrapped optimizer updates, is a view of
  this rank's shard of the row. So an update of the shard changes the parameters, and an all-gather of the row
  completes the update.
- OSH-2: after the reduction, ``grad`` of a parameter holds the reduced gradient in the elements of this rank's shard
  and zeros elsewhere. Sums over the ranks' gradients, as of a norm, count each element once.
- OSH-3: with tensor parallelism, a row contains parameters of one reduction group only, because the ranks that
  average a parameter's gradients are the ranks that share its state. A parameter that no other rank holds is not
  sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.module import shards
from smdistributed.modelparallel.torch.optimizers import WHOLE_PARAMETER
from smdistributed.modelparallel.torch.sharding.piece import Piece

#: Alignment of shards in elements, for fast kernels.
_ALIGNMENT = 16


class ReplicaGroup(NamedTuple):
    """The ranks that hold the same parameters.

    Attributes:
        group: The core's group of them; ``None`` if this rank is the only one.
        ranks: Their number.
        rank: This rank's index among them.
    """

    group: dist.ProcessGroup | None
    ranks: int
    rank: int


class _Row:
    """The concatenated parameters of one type, and their gradients.

    Args:
        named: Parameters with their names.
        replicas: The ranks that hold the parameters; two or more.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], replicas: ReplicaGroup) -> None:
        ranks, rank = replicas.ranks, replicas.rank
        self._group = replicas.group
        self._parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._elems, pieces = _core.shard_parameters(sizes, ranks, _ALIGNMENT)
        self._begin = rank * self._elems
        first = self._parameters[0]
        self._flat = torch.zeros(self._elems * ranks, dtype=first.dtype, device=first.device)
        self._gradients: torch.Tensor | None = None
        self._starts = [0]
        for parameter in self._parameters:
            view = self._view(self._flat, len(self._starts) - 1)
            view.copy_(parameter.detach())
            parameter.data = view
            self._starts.append(self._starts[-1] + parameter.numel())
        #: For each parameter by id, the part of it that is in this rank's shard.
        self.virtual: dict[int, tuple[Piece, nn.Parameter, int]] = {}
        shard = self.shard(self._flat)
        for at, start, end, offset in pieces[rank]:
            name, parameter = named[at]
            virtual = nn.Parameter(shard[offset : offset + end - start])
            self.virtual[id(parameter)] = Piece(name, start, end, tuple(parameter.shape), True), virtual, offset
        #: The sum of earlier reductions, to which gradients are added.
        self._carried: torch.Tensor | None = None
        self._has_carried = [False] * len(self._parameters)
        self._is_reduced = False

    @property
    def ids(self) -> set[int]:
        """Return the ids of the parameters."""
        return {id(parameter) for parameter in self._parameters}

    def _view(self, flat: torch.Tensor, at: int) -> torch.Tensor:
        parameter, start = self._parameters[at], self._starts[at]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a row."""
        return flat[self._begin : self._begin + self._elems]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to accumulate: reduced gradients that the script has kept are added again later."""
        if not self._is_reduced:
            return
        self._is_reduced, self._carried = False, None
        assert self._gradients is not None
        self._has_carried = [parameter.grad is not None for parameter in self._parameters]
        if any(self._has_carried):
            self._carried = self.shard(self._gradients).clone()
            for at, parameter in enumerate(self._parameters):
                if parameter.grad is None:
                    # The script has dropped the gradient, so its earlier value is not carried over.
                    low, high = self._starts[at] - self._begin, self._starts[at + 1] - self._begin
                    self._carried[max(low, 0) : max(high, 0)].zero_()
                parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages gradients over the ranks, each of its own shard."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self._flat)
        has = torch.zeros(len(self._parameters), dtype=torch.int32, device=self._flat.device)
        flags = [
            parameter.grad is not None or carried
            for parameter, carried in zip(self._parameters, self._has_carried, strict=True)
        ]
        has.copy_(torch.tensor(flags, dtype=torch.int32, device="cpu"))
        dist.all_reduce(has, ReduceOp.MAX, self._group)
        for at, parameter in enumerate(self._parameters):
            view = self._view(self._gradients, at)
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            # The memory of each gradient is freed as soon as its values are copied.
            parameter.grad = None
        shard = torch.empty(self._elems, dtype=self._flat.dtype, device=self._flat.device)
        dist.reduce_scatter_tensor(shard, self._gradients, ReduceOp.AVERAGE, self._group)
        if self._carried is not None:
            shard.add_(self._carried)
        self._gradients.zero_()
        own = self.shard(self._gradients)
        own.copy_(shard)
        for at, (parameter, one) in enumerate(zip(self._parameters, has.tolist(), strict=True)):
            parameter.grad = self._view(self._gradients, at) if one else None
            if id(parameter) in self.virtual:
                _, virtual, offset = self.virtual[id(parameter)]
                virtual.grad = own[offset : offset + virtual.numel()] if one else None
        self._is_reduced, self._carried = True, None
        self._has_carried = [False] * len(self._parameters)

    @torch.no_grad()
    def gather(self) -> None:
        """Collects the updated shards of all ranks."""
        dist.all_gather_into_tensor(self._flat, self.shard(self._flat).clone(), self._group)

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradients of the model's parameters."""
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


class OptimizerShards:
    """The virtual parameters of an optimizer, which replace its parameters.

    Args:
        optimizer: The wrapped optimizer.
        parts: Trainable parameters that this rank holds, with their names, grouped by the ranks that hold the same
        ones.

    Raises:
        SMPUnsupportedError: The optimizer needs whole parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Iterable[tuple[ReplicaGroup, Iterable[tuple[str, nn.Parameter]]]],
    ) -> None:
        check_elementwise(optimizer)
        self._optimizer = optimizer
        self._rows: list[_Row] = []
        #: For each parameter with a sharded state, by name: the ranks that hold the shards.
        self.replicas: dict[str, ReplicaGroup] = {}
        #: Parameters that only this rank holds, with their names.
        self._alone: list[tuple[str, nn.Parameter]] = []
        for replicas, named in parts:
            kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
            for name, parameter in named:
                kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
            if replicas.group is None:
                self._alone += [each for row in kinds.values() for each in row]
                continue
            self.replicas |= {name: replicas for row in kinds.values() for name, _ in row}
            with torch.no_grad():
                self._rows += [_Row(row, replicas) for row in kinds.values()]
        self.adopt()

    def adopt(self) -> None:
        """Replace parameters of the model in the optimizer's groups by virtual ones."""
        known = {each for row in self._rows for each in row.ids}
        virtual = {key: found for row in self._rows for key, found in row.virtual.items()}
        own = {id(each) for _, each, _ in virtual.values()} | {id(each) for _, each in self._alone}
        for group in self._optimizer.param_groups:
            params: list[torch.Tensor] = []
            names: list[str] = []
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in virtual:
                    params.append(virtual[id(parameter)][1])
                elif id(parameter) in own:
                    params.append(parameter)
                elif id(parameter) not in known:
                    raise SMPUnsupportedError(
                        "`shard_optimizer_state`: the optimizer has a parameter that was not trainable, or not the "
                        "model's, when the optimizer was wrapped"
                    )
                else:
                    continue
                names += group["param_names"][place : place + 1] if "param_names" in group else []
            group["params"] = params
            if "param_names" in group:
                group["param_names"] = names

    @property
    def pieces(self) -> dict[int, Piece]:
        """Return for each virtual parameter by id the part of a parameter that it represents."""
        return {id(virtual): piece for row in self._rows for piece, virtual, _ in row.virtual.values()}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Virtual parameters with the names of the parameters that they are parts of."""
        found = [(piece.name, virtual) for row in self._rows for piece, virtual, _ in row.virtual.values()]
        return found + self._alone

    def parts_of(self, parameters: set[int]) -> list[nn.Parameter]:
        """Return what the optimizer updates instead of these parameters of the model, which are given by id."""
        found = [each for row in self._rows for key, (_, each, _) in row.virtual.items() if key in parameters]
        return found + [each for _, each in self._alone if id(each) in parameters]

    def begin_step(self) -> None:
        """Begin to accumulate gradients after a reduction."""
        for row in self._rows:
            row.begin()

    def reduce_gradients(self) -> None:
        """Reduce gradients, each to the rank that updates its part. All ranks of the group call it."""
        with errors.translated(CLASSES):
            for row in self._rows:
                row.reduce()

    def gather(self) -> None:
        """Gather updated parameters from all ranks of the group, which call it."""
        with errors.translated(CLASSES):
            for row in self._rows:
                row.gather()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradients of the model's parameters; the optimizer resets those of its own."""
        for row in self._rows:
            row.zero_grad(set_to_none)


#: Optimizers whose update of an element depends on other elements, by the names of their classes. Transformers has an
#: Adafactor of its own.
_WHOLE_NAMES = frozenset({"Adafactor", "LBFGS", "Muon"})


def _updates_whole(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.__name__ in _WHOLE_NAMES for each in type(optimizer).__mro__)


def check_slices(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Reject optimizers that need whole parameters, if tensor parallelism has divided some of the model's.

    Raises:
        SMPUnsupportedError: The optimizer is of this kind.
    """
    if _updates_whole(optimizer) and shards(model):
        raise SMPUnsupportedError(
            f"`{type(optimizer).__name__}` updates a parameter as a whole, and tensor parallelism divides parameters: "
            "elementwise optimizers, as AdamW and SGD, give the results of one process"
        )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Reject optimizers whose update of an element depends on other elements.

    Raises:
        SMPUnsupportedError: The optimizer is of this kind.
    """
    if isinstance(optimizer, WHOLE_PARAMETER) or _updates_whole(optimizer):
        raise SMPUnsupportedError(
            f"`{type(optimizer).__name__}` updates a parameter as a whole: its state cannot be sharded; elementwise "
            "optimizers, as AdamW and SGD, can be"
        )
