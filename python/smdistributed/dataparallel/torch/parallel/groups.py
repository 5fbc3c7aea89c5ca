"""The ranks of a ``DistributedDataParallel``, from a group of this library or of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist


def resolve(process_group: Any, device_mesh: Any) -> Any:
    """Return the group that the arguments name: one of this library, or one of ``torch.distributed``.

    Args:
        process_group: A group of either; ``None`` for all ranks.
        device_mesh: A ``torch.distributed.device_mesh.DeviceMesh`` of one dimension, instead.

    Returns:
        The group.

    Raises:
        RuntimeError: Both arguments are given, or the mesh has more than one dimension.
        ValueError: This rank is not in the group, or the group's ranks are not those of this job.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("`process_group` and `device_mesh` are both given: expected one of them")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"`device_mesh` is {device_mesh}: expected one dimension")
        process_group = device_mesh.get_group(mesh_dim=0)
    elif process_group is None:
        if not _torch_is_here():
            return dist.group.WORLD
        process_group = torch.distributed.group.WORLD
    ranks(process_group)
    return process_group


def ranks(group: Any) -> list[int]:
    """Return the global ranks of a group's members.

    Args:
        group: A group of this library or of ``torch.distributed``.

    Returns:
        The ranks; empty for a group of all ranks.

    Raises:
        ValueError: This rank is not in the group, or the group's ranks are not those of this job.
    """
    if not is_torch_group(group):
        dist._id(group)
        return list(group.ranks or ())
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {_core.rank()} is not a member of `process_group`")
    if not _torch_is_here():
        raise ValueError(
            "`process_group` belongs to torch.distributed, whose ranks are not those of this job: this process is rank "
            f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()} there and rank {_core.rank()} of "
            f"{_core.size()} here. Initialize both from the same launcher's environment"
        )
    members = torch.distributed.get_process_group_ranks(group)
    return [] if members == list(range(_core.size())) else members


def backend_name(group: Any) -> str:
    """Return the name of a group's backend.

    Args:
        group: A group of this library or of ``torch.distributed``.

    Returns:
        The name, such as ``smddp`` or ``nccl``.
    """
    return torch.distributed.get_backend(group) if is_torch_group(group) else "smddp"


def is_torch_group(group: Any) -> bool:
    """Return whether ``torch.distributed`` created a group.

    Args:
        group: Any object.

    Returns:
        ``True`` also for the placeholder that torch returns for a group of other ranks.
    """
    return isinstance(group, torch.distributed.ProcessGroup) or (
        group is not None and group is torch.distributed.GroupMember.NON_GROUP_MEMBER
    )


def is_default(group: Any) -> bool:
    """Return whether a group is the default group of all ranks.

    Args:
        group: A group of this library or of ``torch.distributed``.

    Returns:
        ``True`` for the default group of either.
    """
    return group is dist.group.WORLD or (_torch_is_here() and group is torch.distributed.group.WORLD)


def _torch_is_here() -> bool:
    """Return whether ``torch.distributed`` is initialized with the ranks of this job."""
    if not torch.distributed.is_initialized():
        return False
    here = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return here == (_core.rank(), _core.size())
