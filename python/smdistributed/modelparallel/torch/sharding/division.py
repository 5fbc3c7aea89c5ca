"""Divides a model into units and shards them one after the other, so that delayed parameters never exist as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from smdistributed._common import errors
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.nn.module import reduced_over_rdp, shards
from smdistributed.modelparallel.torch.partitioning import materialize
from smdistributed.modelparallel.torch.sharding.pipeline_shards import PipelineShards
from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel
from smdistributed.modelparallel.torch.sharding.sharding_groups import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import ShardedParameter, Slot, Unit
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter

#: Replaced parameters and buffers by id: themselves and their replacements.
Replaced = dict[int, tuple[torch.Tensor, torch.Tensor]]


def shard_model(
    root: nn.Module, groups: ShardingGroups, slice_groups: ShardingGroups, cfg: Config, device: torch.device
) -> tuple[ShardedModel, Replaced]:
    """Shard the parameters of a model, with the values of the first rank that holds them.

    Args:
        root: The model, with the parameters of this rank's partition. Parameters that are smaller than
            ``sdp_param_persistence_threshold`` stay whole.
        groups: The groups of sharded data parallelism.
        slice_groups: The groups for parameters whose gradients are averaged over ``RDP_GROUP``.
        cfg: The configuration.
        device: Where this rank computes.

    Returns:
        The sharded model, and the replaced parameters and buffers.

    Raises:
        SMPPartitionError: The initial values of a delayed tensor are not known.
    """
    is_pipelined = cfg.pipeline_parallel_degree > 1
    sharded = (PipelineShards if is_pipelined else ShardedModel)(groups, slice_groups, cfg)
    roots = _unit_roots(root, cfg.sdp_max_live_parameters)
    slots: dict[int, list[Slot]] = {}
    rows: dict[nn.Module, list[int]] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, MetaParameter):
                if id(parameter) not in slots:
                    rows.setdefault(roots[module], []).append(id(parameter))
                slots.setdefault(id(parameter), []).append((module, name))
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    sliced, over_rdp = set(shards(root)), reduced_over_rdp(root)
    owner = {each: unit_root for unit_root, row in rows.items() for each in row}
    # Otherwise the partition is on its device already.
    replaced: Replaced = {} if is_pipelined else materialize.move_buffers(root, device)
    units: dict[int, Unit] = {}
    for row in rows.values():
        replaced |= materialize.materialize_parameters(root, {each: (names[each], slots[each]) for each in row}, device)
        kinds: dict[tuple[torch.dtype, bool], list[tuple[int, nn.Parameter]]] = {}
        for each in row:
            module, name = slots[each][0]
            parameter = module._parameters[name]
            assert parameter is not None
            holders = slice_groups if each in sliced else groups
            if holders.data is not None:
                with errors.translated(CLASSES):
                    materialize.broadcast([parameter], holders.data, holders.source)
            is_over_rdp = each in over_rdp
            degree = slice_groups.degree if is_over_rdp else groups.degree
            if degree == 1 or parameter.numel() < max(1, cfg.sdp_param_persistence_threshold):
                sharded.add_replicated(names[each], parameter, is_over_rdp)
            else:
                kinds.setdefault((parameter.dtype, is_over_rdp), []).append((each, parameter))
        for (_, is_over_rdp), kind in kinds.items():
            own = slice_groups if is_over_rdp else groups
            unit = sharded.add_unit(
                [ShardedParameter(names[key], each, slots[key], own.degree, own.rank) for key, each in kind], own
            )
            units |= {key: unit for key, _ in kind}
    needs: dict[nn.Module, list[Unit]] = {}
    for key, unit in units.items():
        for module, _ in slots[key]:
            # Another module with which a parameter is shared needs the unit only while it runs itself.
            place = owner[key] if roots[module] is owner[key] else module
            if unit not in needs.setdefault(place, []):
                needs[place].append(unit)
    sharded.attach(needs)
    return sharded, replaced


def _unit_roots(root: nn.Module, max_elems: int) -> dict[nn.Module, nn.Module]:
    """Return for each module the module with which its parameters are gathered.

    Args:
        root: The model.
        max_elems: A layer with more elements is divided further, if it contains layers.
    """
    found: dict[nn.Module, nn.Module] = {}
    for chosen in _layers(root, max_elems):
        for module in chosen.modules():
            found.setdefault(module, chosen)
    return {module: found.get(module, module) for module in root.modules()}


def _layers(module: nn.Module, max_elems: int) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential) and _elems(child) <= max_elems:
            yield child
        else:
            yield from _layers(child, max_elems)


def _elems(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
