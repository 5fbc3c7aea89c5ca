"""Process groups of a model-parallel PyTorch job.

Three kinds of groups never share an order of operations: the groups of the pipeline and of the gradient reduction,
those of the communication API, and, with ``ddp``, the script's process groups of ``torch.distributed``.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.config import Config, warn_once
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUsageError
from smdistributed.modelparallel.groups import GROUPS, Groups
from smdistributed.modelparallel.torch.sharding.sharding_groups import ShardingGroups, check_degree
from smdistributed.modelparallel.torch.state import state


class TorchGroups(Groups[dist.ProcessGroup]):
    """The groups of a PyTorch job; with ``ddp``, also the process groups of ``torch.distributed``."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        #: The groups of sharded data parallelism; ``None`` without it.
        self.sharding: ShardingGroups | None = None
        #: The ranks over which parameters are sharded that other ranks of a tensor-parallel group do not have, or
        #: whose gradients the group reduces itself. They are as many of the ranks with the same parameters as the
        #: degree allows.
        self.slice_sharding: ShardingGroups | None = None
        degree = cfg.sharded_data_parallel_degree
        if degree > 1:
            check_degree(self.members["dp"], degree)
            assert self.dp_group is not None
            self.sharding = self.slice_sharding = ShardingGroups(self.members["dp"], self.rank, degree, self.dp_group)
            if self.tp_group is not None:
                members = self.members["rdp"]
                self.slice_sharding = ShardingGroups(members, self.rank, math.gcd(degree, len(members)), self.rdp_group)
        self._process_groups: dict[str, Any] = _process_groups(cfg, self.topology, self.rank) if cfg.ddp else {}

    def new_group(self, members: list[int]) -> dist.ProcessGroup:
        """Create a group of these ranks in the core."""
        return dist.new_group(members)

    def number(self, group: dist.ProcessGroup) -> int:
        """Return the core's id of a group."""
        assert group.id is not None, "this rank is a member"
        return group.id

    def close(self) -> None:
        """Remove the groups from the core."""
        for sharding in {self.sharding, self.slice_sharding} - {None}:
            assert sharding is not None
            sharding.close()
        super().close()

    def process_group(self, name: str) -> Any:
        """Return a process group of ``torch.distributed``.

        Raises:
            SMPUsageError: The configuration does not have ``ddp``.
        """
        if name not in self._process_groups:
            raise SMPUsageError(f"`get_{name}_process_group()` needs the configuration's `ddp: true`")
        return self._process_groups[name]


def _init_torch_distributed(cfg: Config, topology: _core.ParallelTopology, rank: int) -> None:
    """Create the default group: its backend is ``ddp_dist_backend``, its store listens on ``ddp_port``."""
    # The import registers the backend `smddp`.
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    nccl = "nccl" if torch.cuda.is_available() else "gloo"
    backend = nccl if cfg.ddp_dist_backend == "nccl" else "smddp"
    if not cfg.ddp_port:
        torch.distributed.init_process_group(backend)
        return
    # Not with an address in `init_method`, for which torchrun's processes would use torchrun's own store.
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], cfg.ddp_port, topology.size, rank == 0)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=topology.size)


#: The default group of `torch.distributed` that this library created last.
_created: Any = None


def _process_groups(cfg: Config, topology: _core.ParallelTopology, rank: int) -> dict[str, Any]:
    global _created
    if not torch.distributed.is_initialized():
        _init_torch_distributed(cfg, topology, rank)
        _created = torch.distributed.group.WORLD
    elif (torch.distributed.get_rank(), torch.distributed.get_world_size()) != (rank, topology.size):
        raise SMPConfigError(
            f"`torch.distributed` was initialized as rank {torch.distributed.get_rank()} of "
            f"{torch.distributed.get_world_size()}, and this is rank {rank} of {topology.size}"
        )
    elif torch.distributed.group.WORLD is not _created:
        for key, default in (("ddp_dist_backend", "auto"), ("ddp_port", None)):
            if getattr(cfg, key) != default:
                warn_once(f"`{key}` changes nothing, because the script has initialized `torch.distributed` itself")
    groups = {"world": torch.distributed.group.WORLD}
    for name in GROUPS:
        # Every rank creates all groups, as torch requires.
        for members in topology.groups(name):
            group = torch.distributed.new_group(members)
            if rank in members:
                groups[name] = group
    if cfg.sharded_data_parallel_degree > 1:
        for members in topology.groups("dp"):
            for shards in check_degree(members, cfg.sharded_data_parallel_degree)[0]:
                group = torch.distributed.new_group(shards)
                if rank in shards:
                    groups["sharding"] = group
    return groups


def get_world_process_group() -> Any:
    """Return the ``torch.distributed`` group of all ranks.

    Returns:
        The process group.

    Raises:
        SMPUsageError: The configuration does not have ``ddp``, without which there are no such groups.
    """
    return state.groups.process_group("world")


def get_mp_process_group() -> Any:
    """Return the ``torch.distributed`` group of the ranks of ``smp.get_mp_group``.

    Returns:
        The process group.

    Raises:
        SMPUsageError: The configuration does not have ``ddp``, without which there are no such groups.
    """
    return state.groups.process_group("mp")


def get_dp_process_group() -> Any:
    """Return the ``torch.distributed`` group of the ranks of ``smp.get_dp_group``.

    Returns:
        The process group.

    Raises:
        SMPUsageError: The configuration does not have ``ddp``, without which there are no such groups.
    """
    return state.groups.process_group("dp")


def get_pp_process_group() -> Any:
    """Return the ``torch.distributed`` group of the ranks of ``smp.get_pp_group``.

    Returns:
        The process group.

    Raises:
        SMPUsageError: The configuration does not have ``ddp``, without which there are no such groups.
    """
    return state.groups.process_group("pp")


def get_tp_process_group() -> Any:
    """Return the ``torch.distributed`` group of the ranks of ``smp.get_tp_group``.

    Returns:
        The process group.

    Raises:
        SMPUsageError: The configuration does not have ``ddp``, without which there are no such groups.
    """
    return state.groups.process_group("tp")


def get_rdp_process_group() -> Any:
    """Return the ``torch.distributed`` group of the ranks of ``smp.get_rdp_group``.

    Returns:
        The process group.

    Raises:
        SMPUsageError: The configuration does not have ``ddp``, without which there are no such groups.
    """
    return state.groups.process_group("rdp")
