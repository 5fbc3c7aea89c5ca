"""State dicts of models: those of one rank, gathered from all partitions, and loaded back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUnsupportedError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.checkpoint import deferred, slices
from smdistributed.modelparallel.torch.communication import gather_on_host, raise_on_all_ranks
from smdistributed.modelparallel.torch.nn.shard import Shard
from smdistributed.modelparallel.torch.partitioning.materialize import inside_first
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel

#: Marks a dict of one rank, in contrast to one of the whole model.
PARTIAL = "_smp_is_partial"
#: In a dict of one rank under sharded data parallelism: start, end and shape of flattened parameters' elements.
SHARDS = "_smp_shards"
#: In a dict with shards: the tensor-parallel rank whose slices the shards belong to.
TENSOR_PARALLEL_RANK = "_smp_tensor_parallel_rank"
MARKS = (PARTIAL, SHARDS, TENSOR_PARALLEL_RANK)


def _entries(model: DistributedModel) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """Yield every name of ``state_dict`` with its tensor, or with the module that has extra state."""
    for path, module in model.module.named_modules(remove_duplicate=False):
        _refuse_own_ways(path, module)
        prefix = f"{path}." if path else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, tensor
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}_extra_state", module


def _refuse_own_ways(path: str, module: nn.Module) -> None:
    """Reject modules that override the hooks of ``state_dict``: the override would not run."""
    ways = [
        way
        for way in ("state_dict", "_save_to_state_dict")
        if getattr(type(module), way) is not getattr(nn.Module, way)
    ]
    # PyTorch's own overrides only store versions.
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    ways += ["a hook" for hook in hooks if not getattr(hook, "__module__", "").startswith("torch.")]
    if ways:
        raise SMPUnsupportedError(
            f"`{path or type(module).__name__}` overrides how its state is made ({ways[0]}). The states of a "
            "`smp.DistributedModel` contain parameters, buffers and results of `get_extra_state` only: return "
            "other state there"
        )


def model_entries(model: DistributedModel) -> dict[str, torch.Tensor]:
    """Return every tensor of ``state_dict`` by its name.

    Tensors of other ranks are represented by a :class:`MetaParameter`. Shared tensors appear under each of their
    names.
    """
    return {name: entry for name, entry in _entries(model) if isinstance(entry, torch.Tensor)}


def extra_entries(model: DistributedModel) -> dict[str, nn.Module]:
    """Return every module with extra state, by that state's name in ``state_dict``."""
    return {name: entry for name, entry in _entries(model) if isinstance(entry, nn.Module)}


def local_extras(model: DistributedModel) -> dict[str, nn.Module]:
    """Return the modules of this rank with extra state."""
    here = state.groups.rank_in("pp")
    return {name: module for name, module in extra_entries(model).items() if model.placement.of(module) == here}


def local_model(model: DistributedModel) -> dict[str, Any]:
    """Return the part of the model that this rank holds."""
    if not model.is_partitioned:
        return {**_own(model), PARTIAL: True}
    found: dict[str, Any] = {
        name: tensor.detach() for name, tensor in model_entries(model).items() if not isinstance(tensor, MetaParameter)
    }
    extras = {name: module.get_extra_state() for name, module in local_extras(model).items()}
    return {**found, **extras, **_shards(model), PARTIAL: True}


def _shards(model: DistributedModel) -> dict[str, Any]:
    if model.sharded is None:
        return {}
    pieces = model.sharded.pieces
    found = {name: pieces[id(tensor)] for name, tensor in model_entries(model).items() if id(tensor) in pieces}
    marks: dict[str, Any] = {SHARDS: {name: (piece.start, piece.end, piece.shape) for name, piece in found.items()}}
    if state.groups.tp_group is not None:
        marks[TENSOR_PARALLEL_RANK] = state.groups.rank_in("tp")
    return marks


def join_models(parts: Sequence[Mapping[str, Any]], divided: Mapping[str, Shard]) -> dict[str, Any]:
    """Merge the parts of all ranks that hold shards to the whole model.

    Args:
        parts: State dicts of ranks, with ``SHARDS``.
        divided: How tensor parallelism divides parameters, by name.

    Raises:
        SMPCheckpointError: Parts of a parameter are missing.
    """
    plain: dict[int, dict[str, Any]] = {}
    rows: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shards, tp_rank = part.get(SHARDS, {}), part.get(TENSOR_PARALLEL_RANK, 0)
        for name, value in part.items():
            if name in shards:
                start, end, shapes[name] = shards[name]
                if end > start:
                    # Shards of parameters that tensor parallelism does not divide may come from any rank of its
                    # group.
                    rows.setdefault((tp_rank if name in divided else 0, name), {})[start] = value[: end - start]
            elif name not in MARKS:
                plain.setdefault(tp_rank, {})[name] = value
    for (tp_rank, name), row in rows.items():
        whole = torch.cat([row[start] for start in sorted(row)])
        if whole.numel() != torch.Size(shapes[name]).numel():
            raise SMPCheckpointError(f"`{name}` is incomplete: shards are missing")
        plain.setdefault(tp_rank, {})[name] = whole.view(shapes[name])
    return slices.merge([plain[tp_rank] for tp_rank in sorted(plain)], divided)


def _own(model: DistributedModel) -> dict[str, Any]:
    """Return the state before the partition, when every rank has the whole model."""
    return {
        name: entry.detach() if isinstance(entry, torch.Tensor) else entry.get_extra_state()
        for name, entry in _entries(model)
    }


def full_model(model: DistributedModel, gather_to_rank0: bool) -> dict[str, Any]:
    """Gather the whole model in host memory, on all ranks of the pipeline or on the first one only.

    All ranks of the pipeline call it; if parameters are sharded, all ranks of the job.
    """
    shards = slices.named_shards(model.module)
    if not model.is_partitioned and not shards:
        return _own(model)
    if model.sharded is not None:
        return _gathered(model, model.sharded, shards, gather_to_rank0)
    # Before the partition, every rank of a pipeline has the whole model.
    group = CommGroup.MP_GROUP if model.is_partitioned else CommGroup.TP_GROUP
    parts = gather_on_host(lambda: local_model(model), group, first_only=gather_to_rank0)
    merged = slices.merge(parts, shards)
    return {name: merged[name] for name, _ in _entries(model)} if parts else {}


def _gathered(
    model: DistributedModel, sharded: ShardedModel, divided: Mapping[str, Shard], first_only: bool
) -> dict[str, Any]:
    """Gather the whole model in host memory unit by unit, so that no rank holds it on its device."""
    wanted = not first_only or state.groups.rank_in("rdp") == 0
    found = _with_whole_parameters(model, sharded, wanted)
    if not wanted or state.groups.mp_group is None:
        return found
    parts = gather_on_host(lambda: found, CommGroup.MP_GROUP, first_only=first_only)
    merged = slices.merge(parts, divided)
    return {name: merged[name] for name, _ in _entries(model)} if parts else {}


def _with_whole_parameters(model: DistributedModel, sharded: ShardedModel, wanted: bool) -> dict[str, Any]:
    """Return this rank's part of the state in host memory, with whole parameters; empty unless ``wanted``.

    All ranks of the job call it. They exchange their errors twice for the whole model. A rank without memory on its
    device cannot take part in an all-gather, so the first exchange follows the allocation. After another error, a rank
    takes part in the remaining all-gathers, for which the other ranks wait, and reports the error afterwards.
    """
    what = "the state could not be gathered"
    memory = raise_on_all_ranks(sharded.gather_memory, CommGroup.WORLD, what)

    def gather() -> dict[str, Any]:
        whole: dict[str, torch.Tensor] = {}

        def take(name: str, tensor: torch.Tensor) -> None:
            if wanted:
                whole[name] = tensor.detach().to("cpu", copy=True)

        sharded.whole_parameters(memory, take)
        if not wanted:
            return {}
        pieces, extras = sharded.pieces, local_extras(model)
        found: dict[str, Any] = {}
        for name, entry in _entries(model):
            if isinstance(entry, nn.Module):
                if name in extras:
                    found[name] = entry.get_extra_state()
            elif id(entry) in pieces:
                found[name] = whole[pieces[id(entry)].name]
            elif not isinstance(entry, MetaParameter):
                found[name] = entry.detach().cpu()
        return found

    return raise_on_all_ranks(gather, CommGroup.WORLD, what)


class _Report(NamedTuple):
    """The result of a load on one rank.

    It contains the missing and the unexpected names, each before and after hooks have changed them, and other errors.
    """

    missing_before: list[str]
    missing: list[str]
    unexpected_before: list[str]
    unexpected: list[str]
    troubles: list[str]


def load_model(model: DistributedModel, found: Mapping[str, Any], strict: bool, same_partition_load: bool) -> None:
    """Load this rank's part from a full state dict, or from the partial ones of all ranks.

    All ranks of a pipeline call it, and reach the same result.

    Raises:
        SMPCheckpointError: On some rank, a shape does not fit, a name is missing or unknown and ``strict``, or a hook
        or ``set_extra_state`` failed; raised on all ranks.
    """
    found = dict(found)
    what = "the state could not be loaded"
    if SHARDS in found:
        part = found
        found = dict(raise_on_all_ranks(lambda: _own_shards(model, part), CommGroup.WORLD, what))
        # Every rank has its part already.
        same_partition_load = True
    if not same_partition_load and PARTIAL not in found and found.keys() - model_entries(model).keys():
        # The names may be those of the original modules, which tensor parallelism has replaced.
        found = from_own_names(found)
    if found.pop(PARTIAL, False) and not same_partition_load:
        parts = gather_on_host(lambda: found, CommGroup.MP_GROUP, what=what)
        found = slices.merge(parts, slices.named_shards(model.module))
    reports: list[_Report] = gather_on_host(
        lambda: _load_local(model, found, strict, same_partition_load), CommGroup.MP_GROUP, what=what
    )
    if model.pipeline is not None:
        model.pipeline.attribute_views.send_values()
    missing = _left([(report.missing_before, report.missing) for report in reports])
    unexpected = _left([(report.unexpected_before, report.unexpected) for report in reports])
    troubles = list(dict.fromkeys(trouble for report in reports for trouble in report.troubles))
    if strict and (missing or unexpected):
        troubles.append(f"missing {_some(missing)}; not in the model {_some(unexpected)}")
    if troubles:
        raise SMPCheckpointError(f"the state does not fit the model: {'; '.join(troubles)}")


def from_own_names(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a whole state with the names of the original modules; this rank computes only the tensors it holds."""
    return state.module_manager.from_own_names(deferred.defer_all(found))


def _own_shards(model: DistributedModel, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's shards from a dict of one rank, which must contain exactly these."""
    if found[SHARDS] != _shards(model).get(SHARDS):
        raise SMPCheckpointError(
            "the state holds other shards than this rank does: load a whole state, or a checkpoint by "
            "`smp.resume_from_checkpoint`"
        )
    return {name: value for name, value in found.items() if name not in (SHARDS, TENSOR_PARALLEL_RANK)}


def _left(reports: list[tuple[list[str], list[str]]]) -> list[str]:
    """Return the names that remain after hooks on all ranks.

    A module's hooks run on the rank that holds it, so that rank's result counts.
    """
    excused = {name for before, after in reports for name in set(before) - set(after)}
    return sorted({name for _, after in reports for name in after} - excused)


@torch.no_grad()
def _load_local(model: DistributedModel, found: dict[str, Any], strict: bool, same_partition_load: bool) -> _Report:
    """Load in torch's order: pre-hooks, values, post-hooks, which may change the list of missing names."""
    entries, extras = model_entries(model), local_extras(model)
    local = {name: tensor for name, tensor in entries.items() if not isinstance(tensor, MetaParameter)}
    here = state.groups.rank_in("pp")
    pieces = {} if model.sharded is None else model.sharded.pieces
    missing: list[str] = []
    unexpected: list[str] = []
    troubles: list[str] = []
    # Pre-hooks may rename entries of older versions.
    for path, module in model.module.named_modules(remove_duplicate=False):
        if model.placement.of(module) == here or not same_partition_load:
            for hook in module._load_state_dict_pre_hooks.values():
                hook(found, f"{path}." if path else "", {}, strict, missing, unexpected, troubles)
    known = entries.keys() | extra_entries(model).keys()
    wanted = local.keys() | extras.keys() if same_partition_load else known
    missing += sorted(wanted - found.keys() - set(missing))
    unexpected += sorted(found.keys() - known - set(unexpected))
    before = list(missing), list(unexpected)
    shards = slices.named_shards(model.module)
    for name, tensor in local.items():
        if name not in found:
            continue
        shape = pieces[id(tensor)].shape if id(tensor) in pieces else tensor.shape
        value = slices.cut(name, found[name], shards.get(name), shape)
        if value.shape == tensor.shape:
            tensor.copy_(deferred.resolve(value))
        elif id(tensor) in pieces and tuple(value.shape) == pieces[id(tensor)].shape:
            own = deferred.resolve(pieces[id(tensor)].cut(value))
            tensor[: own.numel()].copy_(own)
        else:
            troubles.append(
                f"`{name}` has the shape {list(found[name].shape)} in the state and "
                f"{list(shards[name].whole_shape(shape) if name in shards else shape)} in the model"
            )
    for name, module in extras.items():
        if name in found:
            module.set_extra_state(deferred.resolve(found[name]))
    for module in inside_first(model.module):
        if model.placement.of(module) == here:
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys(missing, unexpected))
    if state.optimizer is not None:
        state.optimizer._parameters_changed()
    return _Report(before[0], missing, before[1], unexpected, troubles)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def parameter_names(model: DistributedModel) -> list[str]:
    """Return the names of all parameters, each once, in the model's order."""
    return [name for name, _ in model.module.named_parameters()]
