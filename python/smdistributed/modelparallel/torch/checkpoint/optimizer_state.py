"""States of optimizers: those of one rank, gathered from all partitions and shards, and loaded back.

A state identifies parameters by their names in the model, and a whole state has tensors of the parameters' shapes. So
it depends neither on the partition nor on the sharding.

- ``shards`` of a partial state give the elements of a flattened parameter that its tensors hold: start, end, shape.
  With tensor parallelism, they are elements of the slice of the rank ``_smp_tensor_parallel_rank``.
- ``master_weights`` and ``loss_scale`` are those of 16-bit training.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.checkpoint import slices
from smdistributed.modelparallel.torch.checkpoint.state_dicts import PARTIAL, TENSOR_PARALLEL_RANK, parameter_names
from smdistributed.modelparallel.torch.communication import gather_on_host, raise_on_all_ranks
from smdistributed.modelparallel.torch.nn.shard import Shard as TensorShard
from smdistributed.modelparallel.torch.state import state

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer

MASTER_WEIGHTS, LOSS_SCALE, SHARDS = "master_weights", "loss_scale", "shards"
_Shard = tuple[int, int, tuple[int, ...]]


def group_of(optimizer: DistributedOptimizer) -> CommGroup:
    """Return the group whose ranks together hold the whole state."""
    return CommGroup.WORLD if optimizer.is_sharded else CommGroup.MP_GROUP


def local_optimizer(model: DistributedModel, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Return state and groups of this rank's parameters, by name."""
    del model
    pieces, inner, masters = optimizer._pieces(), optimizer.optimizer, optimizer._masters
    parameters = list(itertools.chain.from_iterable(group["params"] for group in inner.param_groups))
    if any(id(parameter) not in pieces for parameter in parameters):
        raise SMPCheckpointError("the optimizer has parameters that are not the model's")
    groups = [{**group, "params": [pieces[id(p)].name for p in group["params"]]} for group in inner.param_groups]
    entries = {}
    for parameter, content in inner.state.items():
        piece, elems = pieces[id(parameter)], parameter.numel()
        entries[piece.name] = {
            key: piece.trimmed(value, elems) if isinstance(value, torch.Tensor) else value
            for key, value in content.items()
        }
    found: dict[str, Any] = {"state": entries, "param_groups": groups, PARTIAL: True}
    if optimizer.is_sharded:
        own = [pieces[id(parameter)] for parameter in parameters]
        found[SHARDS] = {piece.name: (piece.start, piece.end, piece.shape) for piece in own if piece.is_shard}
        if state.groups.tp_group is not None:
            found[TENSOR_PARALLEL_RANK] = state.groups.rank_in("tp")
    if masters is not None:
        found[MASTER_WEIGHTS] = {
            pieces[id(each)].name: pieces[id(each)].trimmed(each.detach(), each.numel())
            for each in parameters
            if id(each) in masters.sources
        }
        found[LOSS_SCALE] = masters.scale_state()
    return found


def merge_optimizers(
    model: DistributedModel, parts: Sequence[Mapping[str, Any]], degree: int | None = None
) -> dict[str, Any]:
    """Merge partial states, saved with tensor-parallel ``degree`` (by default this job's), into the whole state.

    Raises:
        SMPCheckpointError: Parts of a parameter's state are missing.
    """
    order = {name: at for at, name in enumerate(parameter_names(model))}
    entries, groups = _joined(model, parts, "state", degree), _joined_groups(parts, order)
    found = {"state": dict(sorted(entries.items(), key=lambda item: order.get(item[0], 0))), "param_groups": groups}
    if any(MASTER_WEIGHTS in part for part in parts):
        joined = _joined(model, _wrapped_masters(parts), MASTER_WEIGHTS, degree)
        found[MASTER_WEIGHTS] = {name: content[""] for name, content in joined.items()}
        found[LOSS_SCALE] = next(part[LOSS_SCALE] for part in parts if LOSS_SCALE in part)
    return found


def _wrapped_masters(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts with each master weight as a state of one entry."""
    return [
        {**part, MASTER_WEIGHTS: {name: {"": value} for name, value in part.get(MASTER_WEIGHTS, {}).items()}}
        for part in parts
    ]


def _joined_groups(parts: Sequence[Mapping[str, Any]], order: Mapping[str, int]) -> list[dict[str, Any]]:
    groups = []
    for index, group in enumerate(parts[0]["param_groups"]):
        # Under the names of this optimizer, if the script has named its parameters.
        given: dict[str, str] = {}
        for part in parts:
            theirs = part["param_groups"][index]
            given.update(zip(theirs["params"], theirs.get("param_names", theirs["params"]), strict=True))
        names = sorted(given, key=lambda name: order.get(name, len(order)))
        script_names = {"param_names": [given[name] for name in names]} if "param_names" in group else {}
        groups.append({**group, "params": names, **script_names})
    return groups


def gather_shards(model: DistributedModel, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Gather the shards of the parameters that this rank holds, in host memory of the first replica.

    All ranks of the data-parallel group call it.

    Returns:
        On ranks of the first replica, the state of all parameters of the partition or, under tensor parallelism, of
        this rank's slices. On other ranks, a state without tensors.
    """
    groups = state.groups
    is_first, tp_rank = groups.rank_in("rdp") == 0, groups.rank_in("tp")
    # Under tensor parallelism, several ranks of the group belong to the first replica.
    parts = gather_on_host(
        lambda: local_optimizer(model, optimizer), CommGroup.DP_GROUP, first_only=groups.tp_group is None
    )
    found = _without_tensors(local_optimizer(model, optimizer))
    if not is_first:
        return found
    divided = slices.named_shards(model.module)

    def whole(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[str, Any]]:
        plain = _without_shards(parts, key, divided)
        if groups.tp_group is None:
            return {name: content for each in plain.values() for name, content in each.items()}
        others = {name: content for each in plain.values() for name, content in each.items() if name not in divided}
        return others | plain.get(tp_rank, {})

    order = {name: at for at, name in enumerate(parameter_names(model))}
    found |= {"state": whole(parts, "state"), "param_groups": _joined_groups(parts, order)}
    if groups.tp_group is not None:
        found[TENSOR_PARALLEL_RANK] = tp_rank
    if any(MASTER_WEIGHTS in part for part in parts):
        masters = whole(_wrapped_masters(parts), MASTER_WEIGHTS)
        found[MASTER_WEIGHTS] = {name: content[""] for name, content in masters.items()}
        found[LOSS_SCALE] = next(part[LOSS_SCALE] for part in parts if LOSS_SCALE in part)
    return found


def _joined(
    model: DistributedModel, parts: Sequence[Mapping[str, Any]], key: str, degree: int | None
) -> dict[str, dict[str, Any]]:
    """Return the entries of all parts by parameter.

    Shards are concatenated and get the parameter's shape; tensor-parallel slices are merged.
    """
    divided = slices.named_shards(model.module, degree)
    plain = _without_shards(parts, key, divided)
    ordered = [plain[tp_rank] for tp_rank in sorted(plain)]
    return slices.merge_optimizer(ordered, divided, slices.local_shapes(model.module, divided))


def _without_shards(
    parts: Sequence[Mapping[str, Any]], key: str, divided: Mapping[str, TensorShard]
) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the entries by tensor-parallel rank, or by the number of the part, with shards concatenated."""
    plain: dict[int, dict[str, dict[str, Any]]] = {}
    shards: dict[tuple[int, str], dict[int, tuple[_Shard, dict[str, Any]]]] = {}
    for place, part in enumerate(parts):
        ranges = part.get(SHARDS, {})
        own = plain.setdefault(part.get(TENSOR_PARALLEL_RANK, place), {})
        own.update({name: content for name, content in part[key].items() if name not in ranges})
        for name, content in part[key].items():
            if name in ranges:
                # Shards of parameters that tensor parallelism does not divide may come from any rank of its group.
                tp_rank = part.get(TENSOR_PARALLEL_RANK, 0) if name in divided else 0
                shards.setdefault((tp_rank, name), {})[ranges[name][0]] = ranges[name], content
    for (tp_rank, name), found in shards.items():
        row = [found[start] for start in sorted(found)]
        ends = [0, *(shard[1] for shard, _ in row)]
        shape = row[0][0][2]
        if any(shard[0] != end for (shard, _), end in zip(row, ends, strict=False)) or ends[-1] != _elems(shape):
            raise SMPCheckpointError(f"the state of `{name}` is incomplete: files of other shards are missing")
        plain.setdefault(tp_rank, {})[name] = {
            key: _concatenated([(shard[1] - shard[0], content[key]) for shard, content in row], value, shape)
            for key, value in row[0][1].items()
        }
    return plain


def _concatenated(row: Sequence[tuple[int, Any]], first: Any, shape: tuple[int, ...]) -> Any:
    if not all(isinstance(value, torch.Tensor) and value.shape == (elems,) for elems, value in row):
        # A single number for the parameter, such as its step count.
        return first
    return torch.cat([value for _, value in row]).view(shape)


def _elems(shape: tuple[int, ...]) -> int:
    elems = 1
    for size in shape:
        elems *= size
    return elems


def full_optimizer(model: DistributedModel, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Gather the whole optimizer's state in host memory.

    It comes from all ranks of a pipeline, or of the job if the state is sharded.
    """
    return merge_optimizers(model, gather_on_host(lambda: local_optimizer(model, optimizer), group_of(optimizer)))


def load_optimizer(
    model: DistributedModel, optimizer: DistributedOptimizer, found: Mapping[str, Any], precision_only: bool = False
) -> None:
    """Load the state of this rank's parameters from a full state, or from the partial states of all ranks.

    All ranks of a pipeline call it, or of the job if the state is sharded, and reach the same result.

    Raises:
        SMPCheckpointError: The state does not fit the optimizer on some rank; raised on all of them.
    """
    what, group = "the state of the optimizer could not be loaded", group_of(optimizer)
    if found.get(PARTIAL):
        theirs = found
        found = merge_optimizers(model, gather_on_host(lambda: dict(theirs), group, what=what))
    whole, inner = found, optimizer.optimizer

    def are_counted() -> bool:
        if len(whole["param_groups"]) != len(inner.param_groups):
            raise SMPCheckpointError(
                f"the state has {len(whole['param_groups'])} groups of parameters, and the optimizer "
                f"{len(inner.param_groups)}"
            )
        ids = [each for group in whole["param_groups"] for each in group["params"]]
        return bool(ids) and isinstance(ids[0], int)

    counted = None
    if raise_on_all_ranks(are_counted, group, what, lambda result: result):
        # A state of torch's own format, which numbers parameters in the order of its groups.
        parts = gather_on_host(lambda: _without_tensors(local_optimizer(model, optimizer)), group)
        counted = merge_optimizers(model, parts)["param_groups"]
    raise_on_all_ranks(lambda: _load_optimizer(model, optimizer, whole, counted, precision_only), group, what)
    optimizer._publish()


def load_own_part(
    model: DistributedModel, optimizer: DistributedOptimizer, found: Mapping[str, Any], precision_only: bool = False
) -> None:
    """Load a state that contains all of this rank's parameters, without communication.

    When all ranks have done so, the caller lets the optimizer publish its master weights.
    """
    _load_optimizer(model, optimizer, found, None, precision_only)


def _laid_out(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a state with memory of its own and, if it has the parameter's shape, with the parameter's strides.

    The kernels of fused optimizers read states in the memory layout of the parameter, and do not check it. A slice of a
    larger tensor would also keep the whole one in memory.
    """
    model = parameter.detach() if value.shape == parameter.shape else value
    strides = torch.empty_like(model, device="meta").stride()
    if value.stride() == strides and value.untyped_storage().nbytes() == value.nbytes:
        return value
    return torch.empty_like(model, dtype=value.dtype).copy_(value)


def _without_tensors(found: dict[str, Any]) -> dict[str, Any]:
    return {"state": {}, "param_groups": found["param_groups"], PARTIAL: True}


def _load_optimizer(
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    found: Mapping[str, Any],
    counted: list[dict[str, Any]] | None,
    precision_only: bool,
) -> None:
    """Load the state of this rank's parameters; with ``precision_only``, only master weights and loss scale.

    ``counted`` are the parameter groups of all ranks, if the state identifies parameters by index.
    """
    ids = list(itertools.chain.from_iterable(group["params"] for group in found["param_groups"]))
    names = {name: name for name in ids}
    if counted is not None:
        sizes = [len(group["params"]) for group in found["param_groups"]]
        if sizes != [len(group["params"]) for group in counted]:
            raise SMPCheckpointError(
                f"the state's groups have {sizes} parameters, and the optimizer's "
                f"{[len(group['params']) for group in counted]}"
            )
        names = dict(zip(ids, (name for group in counted for name in group["params"]), strict=True))
    entries = {names[key]: content for key, content in found["state"].items()}
    local = local_optimizer(model, optimizer)
    groups = [
        {key: value for key, value in theirs.items() if key != "param_names"}
        | {key: ours[key] for key in ("params", "param_names") if key in ours}
        for theirs, ours in zip(found["param_groups"], local["param_groups"], strict=True)
    ]
    inner, pieces = optimizer.optimizer, optimizer._pieces()
    own = {pieces[id(each)].name: (pieces[id(each)], each) for group in inner.param_groups for each in group["params"]}
    shards, divided = found.get(SHARDS, {}), slices.named_shards(model.module)

    def fitted(name: str, key: str, value: Any) -> Any:
        piece, parameter = own[name]
        if not isinstance(value, torch.Tensor):
            return value
        value = slices.cut(name, value, divided.get(name), piece.shape)
        # Compared by name: the step count is a number, and a parameter may have one element, too.
        if name not in shards and tuple(value.shape) == piece.shape and not (value.dim() == 0 and key == "step"):
            value = piece.cut(value)
        return _laid_out(piece.padded(value, parameter.numel()), parameter)

    state_here = {
        name: {key: fitted(name, key, value) for key, value in entries[name].items()} for name in own if name in entries
    }
    if not precision_only:
        inner.load_state_dict({"state": state_here, "param_groups": groups})
    masters = optimizer._masters
    if masters is None:
        return
    if MASTER_WEIGHTS in found:
        with torch.no_grad():
            for name, value in found[MASTER_WEIGHTS].items():
                name = names.get(name, name)
                if name in own and id(own[name][1]) in masters.sources:
                    own[name][1].copy_(fitted(name, "", value))
    if LOSS_SCALE in found:
        masters.load_scale(found[LOSS_SCALE], optimizer._has_scaled_loss)
