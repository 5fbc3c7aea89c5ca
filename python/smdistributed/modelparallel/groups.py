"""The place of a process in a model-parallel job, for any framework."""

from __future__ import annotations

from typing import Generic, TypeVar

from smdistributed import _core
from smdistributed.modelparallel.config import Config

#: Kinds of groups: the stages of a pipeline, the shards of a tensor, the replicas of a shard, the ranks of a model, and
#: the ranks that see different data for one stage.
GROUPS = ("pp", "tp", "rdp", "mp", "dp")

#: The framework's type for a group of the core.
Group = TypeVar("Group")


class Groups(Generic[Group]):
    """The coordinates of this process and the process groups of the core that it belongs to.

    Attributes:
        topology: The coordinates of all ranks.
        rank: Global rank.
        members: For each kind of group, the global ranks of this process's group.
        pp_group: The core's group in which the pipeline moves tensors; ``None`` if it would have one member.
        dp_group: The group in which gradients are reduced; ``None`` if it would have one member.
        tp_group: The group in which tensor-parallel layers exchange activations; ``None`` if it would have one
        member.
        rdp_group: The group in which gradients of tensor-parallel layers are reduced; ``dp_group`` without tensor
        parallelism.
        mp_group: All ranks that hold one model, for norms of its gradients; ``pp_group`` without tensor parallelism.
    """

    def __init__(self, cfg: Config) -> None:
        self.rank = _core.rank()
        self.topology = _core.ParallelTopology(
            _core.size(), cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
        )
        self.members = {"world": list(range(self.topology.size))}
        self.members |= {name: self.topology.group(name, self.rank) for name in GROUPS}
        self.pp_group = self._make("pp")
        self.dp_group = self._make("dp")
        self.tp_group = self._make("tp")
        has_slices = self.tp_group is not None
        self.rdp_group = self._make("rdp") if has_slices else self.dp_group
        self.mp_group = self._make("mp") if has_slices else self.pp_group
        # Groups of the communication API; kinds with the same members share one.
        self._objects: dict[tuple[int, ...], Group | None] = {}
        for name in self.members:
            members = tuple(self.members[name])
            if members not in self._objects:
                self._objects[members] = self._make(name)

    def new_group(self, members: list[int]) -> Group:
        """Create a group of these ranks in the core."""
        raise NotImplementedError

    def number(self, group: Group) -> int:
        """Return the core's id of a group."""
        raise NotImplementedError

    def _make(self, name: str) -> Group | None:
        members = self.members[name]
        return self.new_group(members) if len(members) > 1 else None

    def objects(self, name: str) -> Group | None:
        """Return the group that sends the script's objects."""
        return self._objects[tuple(self.members[name])]

    def rank_in(self, name: str) -> int:
        """Return the rank of this process in a group."""
        return self.members[name].index(self.rank)

    def close(self) -> None:
        """Remove the groups from the core."""
        groups = (self.pp_group, self.dp_group, self.tp_group, self.rdp_group, self.mp_group, *self._objects.values())
        numbers = [self.number(group) for group in groups if group is not None]
        for number in dict.fromkeys(numbers):
            _core.remove_group(number)
