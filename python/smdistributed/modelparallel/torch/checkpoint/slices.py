"""States of parameters that tensor parallelism divides: merges the slices of ranks, and cuts them again.

Saved states contain whole tensors, so they do not depend on the degree. Optimizer states of the parameter's shape are
divided like the parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.torch.nn import collectives
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.shard import Shard


def named_shards(root: nn.Module, count: int | None = None) -> dict[str, Shard]:
    """Return how parameters are divided.

    Args:
        root: The model.
        count: The degree with which a state was saved; by default that of this job.

    Returns:
        The division by the parameter's name, for each name of a shared parameter; empty at degree 1.
    """
    count = count or collectives.tp_size()
    if count == 1:
        return {}
    return {
        f"{path}.{name}" if path else name: dataclasses.replace(shard, count=count)
        for path, module in root.named_modules(remove_duplicate=False)
        if isinstance(module, DistributedModule)
        for name, shard in module.shards.items()
    }


def local_shapes(root: nn.Module, shards: Mapping[str, Shard]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters as ranks hold them.

    Args:
        root: The model.
        shards: The result of :func:`named_shards`.

    Returns:
        The shapes by name.
    """
    # A shard of sharded data parallelism carries the shape of the slice that it belongs to.
    shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in root.named_parameters()}
    for name, shard in shards.items():
        if name in shapes:
            shape = list(shapes[name])
            shape[shard.dim] = shard.local_size
            shapes[name] = tuple(shape)
    return shapes


def merge(parts: Sequence[Mapping[str, Any]], shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Merge the parts of ranks.

    Args:
        parts: The tensors of each rank by name, in the order of the ranks of one model.
        shards: The result of :func:`named_shards`.

    Returns:
        The whole tensors by name.

    Raises:
        SMPCheckpointError: The slices of some ranks are missing.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merged(name, [part[name] for part in parts if name in part], shards.get(name)) for name in names}


def _merged(name: str, values: list[Any], shard: Shard | None) -> Any:
    if shard is None:
        # Tensors that all ranks of a group have are those of the last rank, as without tensor parallelism.
        return values[-1]
    if len(values) != shard.count:
        raise SMPCheckpointError(f"`{name}` is divided into {shard.count} slices, and the state has {len(values)}")
    return shard.merge(values)


def merge_optimizer(
    parts: Sequence[Mapping[str, Mapping[str, Any]]], shards: Mapping[str, Shard], shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """Merge the optimizer states of ranks.

    Args:
        parts: For each rank, the states by parameter name.
        shards: The result of :func:`named_shards`.
        shapes: The shapes of the ranks' parameters.

    Returns:
        The states of whole parameters by name.

    Raises:
        SMPCheckpointError: A divided parameter has a state of another shape.
    """
    result: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        contents = [part[name] for part in parts if name in part]
        shard = shards.get(name)
        result[name] = {
            key: _merged(f"{name}/{key}", [content[key] for content in contents], shard)
            if shard is not None and is_like(value, shapes[name], f"{name}/{key}")
            else value
            for key, value in contents[-1].items()
        }
    return result


def is_like(value: Any, shape: Sequence[int], name: str) -> bool:
    """Return whether an optimizer's state is divided like its parameter.

    Args:
        value: The state.
        shape: The shape of the parameter.
        name: The name of the state, for errors.

    Returns:
        Whether it has the parameter's shape; otherwise it is one number.

    Raises:
        SMPCheckpointError: It has another shape.
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return False
    if tuple(value.shape) != tuple(shape):
        raise SMPCheckpointError(
            f"the optimizer's `{name}` has the shape {list(value.shape)}, and its parameter, which is divided over "
            f"tensor-parallel ranks, {list(shape)}: states of other shapes cannot be merged"
        )
    return True


def cut(name: str, value: Any, shard: Shard | None, local: Iterable[int]) -> Any:
    """Cut the slice of this rank.

    Args:
        name: The name of the parameter or state.
        value: The whole tensor; numbers are returned unchanged.
        shard: How the parameter is divided; ``None`` if it is not.
        local: The shape of a slice.

    Returns:
        The slice; the value itself if it has another shape than the whole.
    """
    if shard is None or not isinstance(value, torch.Tensor):
        return value
    if tuple(value.shape) != shard.whole_shape(tuple(local)):
        return value
    return shard.take(value, collectives.tp_rank())
