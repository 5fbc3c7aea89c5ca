"""The parameters of one layer, sharded over the ranks of a group.

- UNI-1: each parameter is divided separately into equal one-dimensional shards, the last ones padded with zeros
  (``rust-core/src/sharding.rs``). The shards of a unit are concatenated, so one all-gather collects the unit.
- UNI-2: between forwards, a module's parameter is the shard. While a unit is installed, it is the whole tensor of the
  last gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.torch.sharding.piece import Piece
from smdistributed.modelparallel.torch.sharding.sharding_groups import ShardingGroups

#: A module, and the name of a parameter in it.
Slot = tuple[nn.Module, str]


class ShardedParameter:
    """A parameter of a unit.

    Args:
        name: Its name in the model.
        parameter: The parameter with its whole value; it becomes this rank's shard.
        slots: The modules that contain it, with its names in them.
        ranks: The number of shards.
        rank: This rank's shard.

    Attributes:
        piece: The elements that this rank holds.
        elems: Number of elements of a shard, with padding.
        offset: Offset of the shard among those of its unit.
        has_gradient: Whether a backward has reached it since the last reduction over replicas.
    """

    def __init__(self, name: str, parameter: nn.Parameter, slots: Sequence[Slot], ranks: int, rank: int) -> None:
        self.parameter, self.slots = parameter, list(slots)
        self.shape, self.numel = tuple(parameter.shape), parameter.numel()
        self.elems = _core.shard_elems(self.numel, ranks)
        start = min(rank * self.elems, self.numel)
        self.piece = Piece(name, start, min(start + self.elems, self.numel), self.shape, True)
        self.offset = 0
        self.has_gradient = False
        # Attributes with which scripts for DeepSpeed count parameters.
        parameter.ds_shape, parameter.ds_numel = torch.Size(self.shape), self.numel  # type: ignore[attr-defined]

    def copy_from(self, value: torch.Tensor) -> None:
        """Copy this rank's elements of a tensor like the whole parameter."""
        own = self.piece.cut(value)
        self.parameter.data[: own.numel()].copy_(own)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add to the gradient of the shard; takes over the tensor's memory if there is no gradient yet."""
        if self.parameter.grad is None:
            self.parameter.grad = gradient
        else:
            self.parameter.grad.add_(gradient)


class Unit:
    """Parameters that are gathered and freed together.

    Args:
        parameters: Those of one type.
        groups: The ranks that hold the shards.

    Attributes:
        parameters: The unit's.
        groups: As above.
        elems: Elements of the whole unit, padding included.
        users: Modules that run with it now.
        full: The whole parameters while they are gathered.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], groups: ShardingGroups) -> None:
        self.parameters, self.groups, self._ranks = list(parameters), groups, groups.degree
        ranks = groups.degree
        shard = sum(each.elems for each in self.parameters)
        self.elems = shard * ranks
        first = self.parameters[0].parameter
        self._flat = torch.zeros(shard, dtype=first.dtype, device=first.device)
        offset = 0
        for each in self.parameters:
            each.offset = offset
            own = each.piece.cut(each.parameter.detach())
            view = self._flat[offset : offset + each.elems]
            view[: own.numel()].copy_(own)
            # The whole values are freed here, one parameter after the other.
            each.parameter.data = view
            offset += each.elems
        #: Of the modules with these parameters, the tables that gather a parameter when it is read.
        self.tables: dict[nn.Module, dict[str, Any]] = {}
        self.users = 0
        self.full: tuple[torch.Tensor, ...] | None = None
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None

    @property
    def is_present(self) -> bool:
        """Whether the unit takes memory in addition to its shards."""
        return self.full is not None or self._pending is not None

    @property
    def is_trained(self) -> bool:
        """Whether the unit requires gradients."""
        return any(each.parameter.requires_grad for each in self.parameters)

    def begin_gather(self) -> None:
        """Start the all-gather, unless it was started."""
        if not self.is_present:
            whole = torch.empty(self.elems, dtype=self._flat.dtype, device=self._flat.device)
            self._pending = dist.all_gather_into_tensor(whole, self._flat, self.groups.sharding, async_op=True), whole

    @torch.no_grad()
    def finish_gather(self) -> tuple[torch.Tensor, ...]:
        """Wait for the all-gather and return the whole parameters."""
        if self.full is None:
            assert self._pending is not None
            (work, whole), self._pending = self._pending, None
            if work is not None:
                work.wait()
            if len(self.parameters) == 1:
                wholes = [whole]
            else:
                # One kernel on a GPU, for all parameters.
                wholes = [whole.new_empty(self._ranks, each.elems) for each in self.parameters]
                sizes = [each.elems for each in self.parameters]
                torch.split_with_sizes_copy(whole.view(self._ranks, -1), sizes, 1, out=wholes)
            self.full = tuple(
                (tensor if tensor.numel() == each.numel else tensor.view(-1)[: each.numel]).view(each.shape)
                for each, tensor in zip(self.parameters, wholes, strict=True)
            )
        return self.full

    @property
    def nbytes(self) -> int:
        """The bytes of the whole unit, padding included."""
        return self.elems * self._flat.element_size()

    def gather_into(self, memory: torch.Tensor) -> None:
        """Gather the unit into the first of these bytes; neither allocates memory nor makes the unit present."""
        dist.all_gather_into_tensor(self._view(memory), self._flat, self.groups.sharding)

    def split(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the whole parameters from the result of :meth:`gather_into`, each a copy or a view of it."""
        rows = self._view(memory).view(self._ranks, -1)
        for each in self.parameters:
            whole = rows[:, each.offset : each.offset + each.elems].reshape(-1)
            yield whole[: each.numel].view(each.shape)

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[: self.nbytes].view(self._flat.dtype)

    def free(self) -> None:
        """Free the whole parameters, once no operation needs them any more."""
        if self._pending is not None:
            self.finish_gather()
        self.full = None

    def forget(self) -> None:
        """Drop a gather without waiting for it, after a failed step."""
        self._pending = self.full = None
        self.users = 0
        self.uninstall()

    def install(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the modules' parameters to these tensors."""
        for each, tensor in zip(self.parameters, tensors, strict=True):
            _set(each.slots, tensor)
        for module, table in self.tables.items():
            # A module without shards has an ordinary dictionary, which compiled modules expect, and which is faster.
            if module._parameters is table and not any(is_shard(each) for each in dict.values(table)):
                module.__dict__["_parameters"] = dict(dict.items(table))

    def uninstall(self) -> None:
        """Set the modules' parameters to the shards."""
        for module, table in self.tables.items():
            if module._parameters is not table:
                # The forward may have added and removed parameters.
                table.clear()
                table.update(module._parameters)
                module.__dict__["_parameters"] = table
        for each in self.parameters:
            _set(each.slots, each.parameter)

    def rows_of(self, members: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Concatenate gradients of some parameters by shards: one row for each rank."""
        parts = [self._rows_of_one(self.parameters[at], gradients[at]) for at in members]
        # One kernel on a GPU, for all gradients.
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def _rows_of_one(self, each: ShardedParameter, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is None:
            return self._flat.new_zeros(self._ranks, each.elems)
        padding = each.elems * self._ranks - each.numel
        flat = gradient.reshape(-1)
        return (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(self._ranks, each.elems)


def is_shard(parameter: Any) -> bool:
    """Return whether an entry of a module's parameters is a shard, not the whole parameter."""
    return hasattr(parameter, "ds_shape")


def _set(slots: Sequence[Slot], tensor: Any) -> None:
    for module, name in slots:
        module._parameters[name] = tensor
        if isinstance(module, nn.RNNBase):
            # Recurrent modules also keep a list of their parameters.
            module._flat_weights = [module._parameters.get(each) for each in module._flat_weights_names]
