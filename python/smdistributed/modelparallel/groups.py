"""The place of a process in a model-parallel job, for any framework."""

from __future__ import annotations

from typing import Generic, TypeVar

from smdistributed import _core
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.topology import GROUPS, Topology

#: What a framework has for a group of the core.
Group = TypeVar("Group")


class Groups(Generic[Group]):
    """The place of this process in the job, and the core's groups that it is in. A framework says what stands for one.

    Attributes:
        topology: Who has which part.
        rank: Global rank.
        members: For each kind of group, global ranks of ours.
        pipe: The core's group in which the pipeline moves tensors; ``None`` if it would have one member.
        data: That in which gradients are reduced; likewise.
    """

    def __init__(self, cfg: Config) -> None:
        self.rank = _core.rank()
        self.topology = Topology.of(
            _core.size(), cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
        )
        self.members = {name: self.topology.group(name, self.rank) for name in ("world", *GROUPS)}
        self.pipe = self._make("pp")
        self.data = self._make("dp")
        # Of the communication API: kinds with the same members share one.
        self._objects: dict[tuple[int, ...], Group | None] = {}
        for name in self.members:
            members = tuple(self.members[name])
            if members not in self._objects:
                self._objects[members] = self._make(name)

    def new_group(self, members: list[int]) -> Group:
        """The core's group of these ranks."""
        raise NotImplementedError

    def number(self, group: Group) -> int:
        """That of one of them in the core."""
        raise NotImplementedError

    def _make(self, name: str) -> Group | None:
        members = self.members[name]
        return self.new_group(members) if len(members) > 1 else None

    def objects(self, name: str) -> Group | None:
        """The core's group for objects of the script."""
        return self._objects[tuple(self.members[name])]

    def rank_in(self, name: str) -> int:
        """Our place in a group."""
        return self.members[name].index(self.rank)

    def close(self) -> None:
        """Forgets the core's groups."""
        for group in (self.pipe, self.data, *self._objects.values()):
            if group is not None:
                _core.remove_group(self.number(group))
