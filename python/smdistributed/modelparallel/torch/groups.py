"""``smp.init``, ranks and process groups.

Three kinds of groups never share an order of operations: the groups of the pipeline and of the gradient reduction,
those of the communication API, and, with ``ddp``, the script's process groups of ``torch.distributed``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from smdistributed import _core
from smdistributed._common import errors, lifecycle
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel import config as configuration
from smdistributed.modelparallel.exceptions import CLASSES, SMPConfigError, SMPUsageError
from smdistributed.modelparallel.groups import Groups
from smdistributed.modelparallel.ranks import Ranks
from smdistributed.modelparallel.topology import GROUPS, Topology
from smdistributed.modelparallel.torch.partition.materialize import delay_parameters
from smdistributed.modelparallel.torch.state import state

ranks = Ranks(lambda: state.groups)


class TorchGroups(Groups[dist.ProcessGroup]):
    """With ``ddp``, also the process groups of ``torch.distributed``."""

    def __init__(self, cfg: configuration.Config) -> None:
        super().__init__(cfg)
        self._process_groups: dict[str, Any] = _process_groups(cfg, self.topology, self.rank) if cfg.ddp else {}

    def new_group(self, members: list[int]) -> dist.ProcessGroup:
        """Make a group of these ranks in the core."""
        return dist.new_group(members)

    def number(self, group: dist.ProcessGroup) -> int:
        """Return the core's number of a group."""
        return group.id

    def process_group(self, name: str) -> Any:
        """Return a process group of ``torch.distributed``.

        Raises:
            SMPUsageError: there are none without ``ddp``.
        """
        if name not in self._process_groups:
            raise SMPUsageError(f"`get_{name}_process_group()` needs the configuration's `ddp: true`")
        return self._process_groups[name]


def _init_torch_distributed(cfg: configuration.Config, topology: Topology, rank: int) -> None:
    """The default group: its backend is what `ddp_dist_backend` says, its store where `ddp_port` does."""
    # Registers the backend `smddp`.
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    nccl = "nccl" if torch.cuda.is_available() else "gloo"
    backend = nccl if cfg.ddp_dist_backend == "nccl" else "smddp"
    if not cfg.ddp_port:
        torch.distributed.init_process_group(backend)
        return
    # Not by an address: torchrun's processes would take its own store for the one there.
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], cfg.ddp_port, topology.size, rank == 0)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=topology.size)


def _process_groups(cfg: configuration.Config, topology: Topology, rank: int) -> dict[str, Any]:
    if not torch.distributed.is_initialized():
        _init_torch_distributed(cfg, topology, rank)
    elif (torch.distributed.get_rank(), torch.distributed.get_world_size()) != (rank, topology.size):
        raise SMPConfigError(
            f"`torch.distributed` was initialized as rank {torch.distributed.get_rank()} of "
            f"{torch.distributed.get_world_size()}, and this is rank {rank} of {topology.size}"
        )
    groups = {"world": torch.distributed.group.WORLD}
    for name in GROUPS:
        # Every rank makes all groups, as torch wants it.
        for members in topology.groups(name):
            group = torch.distributed.new_group(members)
            if rank in members:
                groups[name] = group
    return groups


def init(config: Mapping[str, Any] | None = None) -> None:
    """Joins the job; the first call of a script.

    Args:
        config: Keys of the configuration; those that the launcher gives win.

    Raises:
        SMPConfigError: a value is not acceptable, or the job's processes cannot be divided so.
        SMPUsageError: it was called before with another configuration.
    """
    cfg = configuration.read(config)
    if state.initialized:
        if config is not None and dict(cfg) != dict(state.cfg):
            raise SMPUsageError("`smp.init()` was called before, with another configuration")
        warnings.warn("`smp.init()` was called before; this call does nothing", stacklevel=2)
        return
    with errors.translated(CLASSES):
        if not _core.is_initialized():
            lifecycle.init()
        state.enter(cfg, TorchGroups(cfg))
    if cfg.delayed_parameter_initialization:
        state.delay = delay_parameters()


def shutdown() -> None:
    """Forgets the configuration, the model and the optimizer; ``init`` may be called again, on all ranks. The process
    stays in the job."""
    if state.initialized:
        state.groups.close()
        state.leave()


def is_initialized() -> bool:
    """Whether ``smp.init()`` has been called."""
    return state.initialized


def is_tracing() -> bool:
    """Whether the model is being looked at to divide it, in the first step."""
    return state.tracing


def get_world_process_group() -> Any:
    """The ``torch.distributed`` group of all ranks."""
    return state.groups.process_group("world")


def get_mp_process_group() -> Any:
    """The ``torch.distributed`` group of the ranks of ``smp.get_mp_group``."""
    return state.groups.process_group("mp")


def get_dp_process_group() -> Any:
    """The ``torch.distributed`` group of the ranks of ``smp.get_dp_group``."""
    return state.groups.process_group("dp")


def get_pp_process_group() -> Any:
    """The ``torch.distributed`` group of the ranks of ``smp.get_pp_group``."""
    return state.groups.process_group("pp")


def get_tp_process_group() -> Any:
    """The ``torch.distributed`` group of the ranks of ``smp.get_tp_group``."""
    return state.groups.process_group("tp")


def get_rdp_process_group() -> Any:
    """The ``torch.distributed`` group of the ranks of ``smp.get_rdp_group``."""
    return state.groups.process_group("rdp")
