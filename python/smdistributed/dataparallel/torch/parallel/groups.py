"""Which ranks a ``DistributedDataParallel`` belongs to, whoever made the group."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist


def resolve(process_group: Any, device_mesh: Any) -> Any:
    """The group that the arguments name: one of ours, or one of ``torch.distributed``.

    Args:
        process_group: Of either; ``None`` for all ranks.
        device_mesh: A ``torch.distributed.device_mesh.DeviceMesh`` of one dimension, instead.

    Raises:
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
    """Its members' ranks in the job; empty for all."""
    if not is_torch_group(group):
        dist._id(group)
        return list(group.ranks or ())
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {_core.rank()} is not a member of `process_group`")
    if not _torch_is_here():
        raise ValueError(
            "`process_group` is one of torch.distributed, whose ranks are not those of this job: rank "
            f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()} is rank {_core.rank()} of "
            f"{_core.size()}"
        )
    members = torch.distributed.get_process_group_ranks(group)
    return [] if members == list(range(_core.size())) else members


def backend_name(group: Any) -> str:
    """What moves the group's bytes where the script says so."""
    return torch.distributed.get_backend(group) if is_torch_group(group) else "smddp"


def is_torch_group(group: Any) -> bool:
    """Whether ``torch.distributed`` made it."""
    return isinstance(group, torch.distributed.ProcessGroup) or (
        group is not None and group is torch.distributed.GroupMember.NON_GROUP_MEMBER
    )


def is_default(group: Any) -> bool:
    """Whether it is the group of all ranks, which every process of every job has."""
    return group is dist.group.WORLD or (_torch_is_here() and group is torch.distributed.group.WORLD)


def _torch_is_here() -> bool:
    """Whether ``torch.distributed`` is initialized, with the ranks of this job."""
    if not torch.distributed.is_initialized():
        return False
    here = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return here == (_core.rank(), _core.size())
