"""Sharded data parallelism: parameters, gradients and optimizer states are divided over a sharding group.

They are replicated over such groups (MiCS: Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on
Public Cloud").

A unit is an element of the outermost ``nn.ModuleList`` or ``nn.Sequential``, such as a layer of a transformer, or the
own parameters of a module outside of them. Its parameters are gathered before its modules run and freed afterwards.

- SDP-1: autograd saves no whole parameter. It saves a description instead, and the backward gathers the unit again
  when it needs the first of them.
- SDP-2: each microbatch expects the gathers of the previous one, including those of its backward: the unit that came
  next there is gathered while the current one computes. All ranks have the same order.
- SDP-3: gradients of a unit are reduced to their shards when the last of them is complete, at most
  ``sdp_reduce_bucket_size`` elements at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.runtime.fallbacks import script_level
from smdistributed.modelparallel.torch.sharding.piece import Piece
from smdistributed.modelparallel.torch.sharding.sharding_groups import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import ShardedParameter, Unit


class _Saved(NamedTuple):
    """The description of a gathered parameter that autograd saves: a view of the unit's memory."""

    unit: Unit
    at: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Gathered(torch.autograd.Function):
    """Computes the whole parameters of a unit from their shards."""

    @staticmethod
    def forward(ctx: Any, model: ShardedModel, unit: Unit, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.model, ctx.unit = model, unit
        ctx.set_materialize_grads(False)
        assert unit.full is not None
        outputs = tuple(each.detach() for each in unit.full)
        frozen = [out for out, shard in zip(outputs, shards, strict=True) if not shard.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.model._reduce(ctx.unit, gradients)
        # The shards get their gradients when the reduction is complete.
        return (None,) * (2 + len(gradients))


class _Table(dict[str, Any]):
    """A module's parameters; a parameter that is read outside of the module's own forward is gathered then."""

    def __init__(self, content: dict[str, Any], model: ShardedModel) -> None:
        super().__init__(content)
        self._model = model

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        unit = self._model.owners.get(id(value))
        if unit is None:
            return value
        if self._model.is_running:
            self._model._enter_for_the_forward(unit)
            return super().__getitem__(name)
        if torch._C._current_graph_task_id() != -1:
            # Activation checkpointing runs a forward again, without the hooks around it.
            return self._model._recomputed(unit, value)
        return value

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


class ShardedModel:
    """The sharded parameters of a model, with their gathers and reductions.

    Args:
        groups: The ranks that together hold all shards, and the ranks with the same shard.
        slice_groups: The same for parameters whose gradients are averaged over ``RDP_GROUP``, such as those of which
            tensor parallelism gives this rank a slice.
        cfg: The configuration.

    Attributes:
        groups: As above.
        slice_groups: As above.
        units: Parameters that are gathered together.
        replicated: Parameters below ``sdp_param_persistence_threshold``, which every rank keeps whole.
        owners: For each parameter's shard by id, its unit.
        is_running: Whether modules are running.
    """

    def __init__(self, groups: ShardingGroups, slice_groups: ShardingGroups, cfg: Config) -> None:
        self.groups, self.slice_groups = groups, slice_groups
        self._bucket_elems, self._max_live = cfg.sdp_reduce_bucket_size, cfg.sdp_max_live_parameters
        self.units: list[Unit] = []
        self.replicated: list[tuple[str, nn.Parameter]] = []
        #: The ids of replicated parameters whose gradients are averaged over `RDP_GROUP`.
        self._replicated_slices: set[int] = set()
        self.owners: dict[int, Unit] = {}
        self.is_running = False
        self._live = 0
        #: The largest number of gathered elements for which the step's prefetches had no space; 0 if all had.
        self._missing_live = 0
        self._has_warned = False
        self._order: list[Unit] = []
        self._previous: dict[bool, list[Unit]] = {}
        self._is_training = False
        #: Gathered units; those that are not in use are freed in this order.
        self._present: list[Unit] = []
        self._for_the_forward: list[Unit] = []
        self._saved: dict[int, tuple[Unit, int]] = {}
        # Compiled modules run these as they are. Not decorators: those would import the compiler with this module.
        self._hooks = torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        self._reductions: deque[tuple[dist.Work, torch.Tensor, torch.Tensor, Unit, list[int], int]] = deque()
        self._reducing = 0
        #: Whether gradients were averaged over replicas, and none was computed since.
        self._is_reduced = False

    def add_replicated(self, name: str, parameter: nn.Parameter, is_slice: bool) -> None:
        """Keep a parameter whole; ``is_slice`` if its gradients are averaged over ``RDP_GROUP``."""
        self.replicated.append((name, parameter))
        if is_slice:
            self._replicated_slices.add(id(parameter))

    def groups_of(self, parameter: torch.Tensor) -> ShardingGroups:
        """Return the ranks that average the gradients of a shard, or of a parameter that is not sharded."""
        unit = self.owners.get(id(parameter))
        if unit is not None:
            return unit.groups
        return self.slice_groups if id(parameter) in self._replicated_slices else self.groups

    def add_unit(self, parameters: Sequence[ShardedParameter], groups: ShardingGroups) -> Unit:
        """Shard parameters of one type whose gradients are averaged by the same ranks."""
        unit = Unit(parameters, groups)
        self.units.append(unit)
        for each in parameters:
            self.owners[id(each.parameter)] = unit
        return unit

    def attach(self, needs: dict[nn.Module, list[Unit]]) -> None:
        """Gather units before modules run and free them afterwards.

        Args:
            needs: For each module, the units that it and its submodules need.
        """
        for module, units in needs.items():
            # A compiled module runs them as they are, and compiles what lies between them.
            @torch.compiler.disable
            def enter(module: nn.Module, args: Any, units: list[Unit] = units) -> None:
                del module, args
                for unit in units:
                    self._enter(unit)

            @torch.compiler.disable
            def leave(module: nn.Module, args: Any, output: Any, units: list[Unit] = units) -> None:
                del module, args, output
                for unit in units:
                    self._leave(unit)

            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)
        for unit in self.units:
            for module in {module for each in unit.parameters for module, _ in each.slots}:
                if type(module._parameters) is not _Table:
                    module.__dict__["_parameters"] = _Table(module._parameters, self)
                unit.tables[module] = module._parameters

    @property
    def pieces(self) -> dict[int, Piece]:
        """Return for each shard by id the part of a parameter that it represents."""
        return {id(each.parameter): each.piece for each in self.parameters()}

    def parameters(self) -> Iterator[ShardedParameter]:
        """Yield all sharded parameters."""
        for unit in self.units:
            yield from unit.parameters

    # Forward.

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for a forward of the model."""
        if self.is_running:
            yield
            return
        self.end_microbatch()
        self._is_training, self.is_running = torch.is_grad_enabled(), True
        try:
            with errors.translated(CLASSES), torch.autograd.graph.saved_tensors_hooks(*self._hooks):
                yield
        finally:
            self.is_running = False
            while self._for_the_forward:
                self._leave(self._for_the_forward.pop())
            if not self._is_training:
                self.end_microbatch()

    def end_microbatch(self) -> None:
        """Free units that remain after a failed forward, or after a backward that did not reach all of them."""
        if self._order:
            self._previous[self._is_training] = self._order
        self._order = []
        for unit in self.units:
            if unit.users:
                unit.uninstall()
                unit.users = 0
        for unit in list(self._present):
            self._free(unit)
        self._saved.clear()

    def _enter(self, unit: Unit) -> None:
        unit.users += 1
        if unit.users > 1:
            return
        full = self._gather(unit)
        if torch.is_grad_enabled() and unit.is_trained:
            full = _Gathered.apply(self, unit, *(each.parameter for each in unit.parameters))
        unit.install(full)

    def _leave(self, unit: Unit) -> None:
        if unit.users == 0:
            return
        unit.users -= 1
        if unit.users == 0:
            unit.uninstall()
            self._free(unit)

    def _enter_for_the_forward(self, unit: Unit) -> None:
        self._for_the_forward.append(unit)
        self._enter(unit)

    def _gather(self, unit: Unit) -> tuple[torch.Tensor, ...]:
        """Return the whole parameters of a unit, and begin to gather the next one."""
        if unit.full is not None:
            return unit.full
        self._begin_gather(unit, needed=True)
        full = unit.finish_gather()
        for at, tensor in enumerate(full):
            if tensor.numel():
                self._saved[tensor.untyped_storage().data_ptr()] = unit, at
        place = len(self._order)
        self._order.append(unit)
        row = self._previous.get(self._is_training, ())
        if place + 1 < len(row) and row[place] is unit:
            self._begin_gather(row[place + 1], needed=False)
        return full

    def _begin_gather(self, unit: Unit, needed: bool) -> None:
        if unit.is_present:
            return
        for other in list(self._present):
            if self._live + unit.elems <= self._max_live:
                break
            if other.users == 0 and other is not unit and needed:
                self._free(other)
        if not needed and self._live + unit.elems > self._max_live:
            self._missing_live = max(self._missing_live, self._live + unit.elems)
            return
        unit.begin_gather()
        self._present.append(unit)
        self._live += unit.elems

    def _free(self, unit: Unit) -> None:
        if not unit.is_present:
            return
        unit.free()
        self._present.remove(unit)
        self._live -= unit.elems
        self._saved = {key: value for key, value in self._saved.items() if value[0] is not unit}

    # Backward.

    def _pack(self, tensor: torch.Tensor) -> Any:
        found = self._saved.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if found is None:
            return tensor
        return _Saved(*found, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        with errors.translated(CLASSES), torch.no_grad():
            return self._gather(saved.unit)[saved.at].as_strided(saved.shape, saved.stride, saved.offset)

    def _recomputed(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter for a forward that runs again in the backward."""
        at = next(at for at, each in enumerate(unit.parameters) if each.parameter is shard)
        with errors.translated(CLASSES):
            return self._gather(unit)[at].detach().requires_grad_(shard.requires_grad)

    def _reduce(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to reduce the gradients of a unit, and free its whole parameters."""
        if unit.users == 0:
            self._free(unit)
        members: list[int] = []
        elems = 0
        for at, each in enumerate(unit.parameters):
            if not each.parameter.requires_grad:
                continue
            if members and elems + each.elems * unit.groups.degree > self._bucket_elems:
                self._begin_reduction(unit, members, gradients)
                members, elems = [], 0
            members.append(at)
            elems += each.elems * unit.groups.degree
        self._begin_reduction(unit, members, gradients)

    @torch.no_grad()
    def _begin_reduction(self, unit: Unit, members: list[int], gradients: Sequence[torch.Tensor | None]) -> None:
        for at in members:
            if gradients[at] is not None:
                unit.parameters[at].has_gradient = True
        rows = unit.rows_of(members, gradients)
        # One reduction beside this one, so that few gradients wait in memory. The one before it has had the time of a
        # unit's backward.
        while len(self._reductions) > 1 or (self._reductions and self._reducing + rows.numel() > self._bucket_elems):
            self._finish_reduction()
        shard = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
        with errors.translated(CLASSES):
            work = dist.reduce_scatter_tensor(
                shard, rows.view(-1), ReduceOp.AVERAGE, unit.groups.sharding, async_op=True
            )
        assert work is not None
        self._reductions.append((work, rows, shard, unit, members, rows.numel()))
        self._reducing += rows.numel()

    @torch.no_grad()
    def _finish_reduction(self) -> None:
        work, _, shard, unit, members, elems = self._reductions.popleft()
        with errors.translated(CLASSES):
            work.wait()
        self._reducing -= elems
        begin = 0
        for at in members:
            each = unit.parameters[at]
            each.add_gradient(shard[begin : begin + each.elems])
            begin += each.elems

    def enter_step(self) -> None:
        """Do nothing: units are gathered when their modules run."""

    def leave_step(self) -> None:
        """Count a step in which units were gathered when they were needed, not ahead (SDP-2)."""
        wanted, self._missing_live = self._missing_live, 0
        if not wanted:
            return
        _core.note_fallback("without_prefetch")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`sdp_max_live_parameters` {self._max_live} is too small to gather the parameters of the next layer "
                f"while one computes, so computation waits for all-gathers: prefetching needs {wanted} or more",
                stacklevel=script_level(),
            )

    def begin_step(self) -> None:
        """Begin a step: gradients that the script has kept after a reduction are included."""
        if self._is_reduced:
            self._is_reduced = False
            for each in self.parameters():
                each.has_gradient = each.parameter.grad is not None

    def finish_backward(self) -> None:
        """Wait until the gradients of all shards are reduced within the sharding group."""
        while self._reductions:
            self._finish_reduction()

    def cancel(self) -> None:
        """End a failed step, without waiting for other ranks."""
        self._reductions.clear()
        self._reducing = self._live = 0
        self._order, self._present = [], []
        self._saved.clear()
        for unit in self.units:
            unit.forget()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average gradients over replicas: of shards over the ranks with the same shard, of whole ones over all.

        A parameter without a gradient on any rank keeps none. All ranks of the data-parallel group call it.
        """
        self.finish_backward()
        self._is_reduced = True
        sharded = [each for each in self.parameters() if each.parameter.requires_grad]
        whole = [each for _, each in self.replicated if each.requires_grad]
        flags = [each.has_gradient for each in sharded] + [each.grad is not None for each in whole]
        # On the host: ranks wait for each other, but not for their GPUs.
        has = torch.tensor(flags, dtype=torch.int32, device="cpu")
        with errors.translated(CLASSES):
            dist.all_reduce(has, ReduceOp.MAX, self.groups.data)
            for each, one in zip(sharded, has.tolist(), strict=False):
                each.has_gradient = False
                if not one:
                    each.parameter.grad = None
                elif each.parameter.grad is None:
                    each.parameter.grad = torch.zeros_like(each.parameter)
            for parameter, one in zip(whole, has.tolist()[len(sharded) :], strict=True):
                if one and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for groups in dict.fromkeys((self.groups, self.slice_groups)):
                if groups.replication is not None:
                    shards = [each.parameter for each in sharded if self.groups_of(each.parameter) is groups]
                    self._average(shards, groups.replication)
                if groups.data is not None:
                    self._average([each for each in whole if self.groups_of(each) is groups], groups.data)

    def _average(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        begin = 0
        while begin < len(gradients):
            end, elems = begin, 0
            while end < len(gradients) and (end == begin or elems + gradients[end].numel() <= self._bucket_elems):
                if gradients[end].dtype != gradients[begin].dtype:
                    break
                elems += gradients[end].numel()
                end += 1
            row = torch.cat([each.reshape(-1) for each in gradients[begin:end]])
            dist.all_reduce(row, ReduceOp.AVERAGE, group)
            for each, part in zip(
                gradients[begin:end], row.split([each.numel() for each in gradients[begin:end]]), strict=True
            ):
                each.copy_(part.view(each.shape))
            begin = end

    # Values.

    def gather_memory(self) -> torch.Tensor:
        """Return memory for the largest unit, for :meth:`whole_parameters`."""
        device = next((each.parameter.device for each in self.parameters()), None)
        return torch.empty(max((unit.nbytes for unit in self.units), default=0), dtype=torch.uint8, device=device)

    @torch.no_grad()
    def whole_parameters(self, memory: torch.Tensor, take: Callable[[str, torch.Tensor], None]) -> None:
        """Gather one unit after the other; all ranks of the sharding group call it.

        Args:
            memory: The result of :meth:`gather_memory`; all ranks must have it before one of them calls this.
            take: Called with the name and the whole value of each parameter, which is valid during the call only.

        Raises:
            Exception: ``take`` failed. This rank has taken part in all gathers nevertheless, so that the other ranks do
            not wait for it.
        """
        failure: Exception | None = None
        for unit in self.units:
            was_present = unit.is_present
            if not was_present:
                with errors.translated(CLASSES):
                    unit.gather_into(memory)
            if failure is not None:
                continue
            try:
                full = unit.finish_gather() if was_present else unit.split(memory)
                for each, tensor in zip(unit.parameters, full, strict=True):
                    take(each.piece.name, tensor)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
