"""States of models and optimizers: of one rank, gathered from all partitions, and back.

The state of an optimizer names parameters where torch's own counts them, so that it does not matter which rank has which.
torch's ``Optimizer.load_state_dict`` takes it as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.communication import allgather
from smdistributed.modelparallel.torch.handle import Absent
from smdistributed.modelparallel.torch.state import state

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer

#: Whether a dict is of one rank, or of the whole model.
PARTIAL = "_smp_is_partial"


def model_entries(model: DistributedModel) -> dict[str, torch.Tensor]:
    """Every name of ``state_dict`` with its tensor, :class:`Absent` on other ranks; shared ones under each of their names."""
    entries: dict[str, torch.Tensor] = {}
    for path, module in model.module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                entries[prefix + name] = tensor
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                entries[prefix + name] = tensor
    return entries


def local_model(model: DistributedModel) -> dict[str, Any]:
    """What this rank holds."""
    found: dict[str, Any] = {
        name: tensor.detach() for name, tensor in model_entries(model).items() if not isinstance(tensor, Absent)
    }
    return {**found, PARTIAL: True}


def full_model(model: DistributedModel, gather_to_rank0: bool) -> dict[str, torch.Tensor]:
    """What all ranks of a pipeline hold, on each of them, or on the first one only."""
    if not model.is_partitioned:
        return {name: tensor.detach() for name, tensor in model_entries(model).items()}
    merged: dict[str, torch.Tensor] = {}
    for part in allgather(local_model(model), CommGroup.PP_GROUP):
        part.pop(PARTIAL)
        merged.update(part)
    if gather_to_rank0 and state.groups.rank_in("pp"):
        return {}
    return {name: merged[name] for name in model_entries(model)}


@torch.no_grad()
def load_model(model: DistributedModel, found: Mapping[str, Any], strict: bool, same_partition_load: bool) -> None:
    """Takes what this rank holds from a full dict, or from the partial ones of all ranks."""
    found = dict(found)
    if found.pop(PARTIAL, False) and not same_partition_load:
        parts = allgather(found, CommGroup.PP_GROUP)
        found = {name: tensor for part in parts for name, tensor in part.items()}
    entries = model_entries(model)
    local = {name: tensor for name, tensor in entries.items() if not isinstance(tensor, Absent)}
    # All ranks come to the same verdict, if all have the whole state.
    wanted = local if same_partition_load else entries
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - entries.keys())
    if strict and (missing or unexpected):
        raise SMPCheckpointError(
            f"the state does not fit the model: missing {_some(missing)}; not in the model {_some(unexpected)}"
        )
    for name, tensor in local.items():
        if name in found:
            if found[name].shape != tensor.shape:
                raise SMPCheckpointError(
                    f"`{name}` has the shape {list(found[name].shape)} in the state and {list(tensor.shape)} in the model"
                )
            tensor.copy_(found[name])


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def parameter_names(model: DistributedModel) -> list[str]:
    """Names of all parameters, each once, in the model's order."""
    return [name for name, _ in model.module.named_parameters()]


def local_optimizer(model: DistributedModel, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """State and groups of this rank's parameters, by name."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    inner = optimizer.optimizer
    for group in inner.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise SMPCheckpointError("the optimizer has parameters that are not the model's")
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in inner.param_groups]
    entries = {names[id(parameter)]: dict(content) for parameter, content in inner.state.items()}
    return {"state": entries, "param_groups": groups, PARTIAL: True}


def merge_optimizers(model: DistributedModel, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole state of partial ones."""
    order = {name: at for at, name in enumerate(parameter_names(model))}
    entries = {name: content for part in parts for name, content in part["state"].items()}
    groups = []
    for index, group in enumerate(parts[0]["param_groups"]):
        names = {name for part in parts for name in part["param_groups"][index]["params"]}
        groups.append({**group, "params": sorted(names, key=lambda name: order.get(name, len(order)))})
    return {"state": dict(sorted(entries.items(), key=lambda item: order.get(item[0], 0))), "param_groups": groups}


def full_optimizer(model: DistributedModel, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """What all ranks of a pipeline have."""
    return merge_optimizers(model, allgather(local_optimizer(model, optimizer), CommGroup.PP_GROUP))


def load_optimizer(model: DistributedModel, optimizer: DistributedOptimizer, found: Mapping[str, Any]) -> None:
    """Takes what this rank's parameters have from a full state, or from the partial ones of all ranks."""
    if found.get(PARTIAL):
        found = merge_optimizers(model, allgather(dict(found), CommGroup.PP_GROUP))
    inner = optimizer.optimizer
    if len(found["param_groups"]) != len(inner.param_groups):
        raise SMPCheckpointError(
            f"the state has {len(found['param_groups'])} groups of parameters, and the optimizer {len(inner.param_groups)}"
        )
    ids = list(itertools.chain.from_iterable(group["params"] for group in found["param_groups"]))
    if ids and isinstance(ids[0], int):
        # One of torch's own, which counts parameters in the order of its groups.
        own = {**local_optimizer(model, optimizer), "state": {}}
        whole = merge_optimizers(model, allgather(own, CommGroup.PP_GROUP))["param_groups"]
        sizes = [len(group["params"]) for group in found["param_groups"]]
        if sizes != [len(group["params"]) for group in whole]:
            raise SMPCheckpointError(
                f"the state's groups have {sizes} parameters, and the optimizer's {[len(group['params']) for group in whole]}"
            )
        names = dict(zip(ids, (name for group in whole for name in group["params"]), strict=True))
    else:
        names = {name: name for name in ids}
    entries = {names[key]: content for key, content in found["state"].items()}
    local = local_optimizer(model, optimizer)
    groups = [
        {**theirs, "params": ours["params"]}
        for theirs, ours in zip(found["param_groups"], local["param_groups"], strict=True)
    ]
    here = list(itertools.chain.from_iterable(group["params"] for group in groups))
    inner.load_state_dict({"state": {name: entries[name] for name in here if name in entries}, "param_groups": groups})
