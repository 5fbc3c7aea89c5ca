"""The groups of sharded data parallelism; the core decides which ranks are in which."""

from __future__ import annotations

from typing import Any

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPConfigError

_CLASSES: dict[str, Any] = {**CLASSES, "config": SMPConfigError}


class ShardingGroups:
    """The groups that this rank is in.

    Args:
        members: Global ranks of the data-parallel group.
        rank: This global rank.
        degree: Ranks of a sharding group.
        data: The data-parallel group.

    Attributes:
        degree: Ranks of a sharding group.
        rank: This rank's place in it.
        members: Global ranks of it.
        number: Which of the sharding groups it is.
        sharding: The ranks that hold the shards of one model.
        replication: The ranks that hold the same shard; ``None`` if there is one sharding group.
        data: All of them.

    Raises:
        SMPConfigError: The degree does not divide the group.
    """

    def __init__(self, members: list[int], rank: int, degree: int, data: dist.ProcessGroup) -> None:
        sharding, replication = check_degree(members, degree)
        self.degree, self.data = degree, data
        self.number = next(at for at, group in enumerate(sharding) if rank in group)
        self.members = sharding[self.number]
        self.rank = self.members.index(rank)
        self.sharding = data if len(sharding) == 1 else dist.new_group(self.members)
        self.replication = None if len(sharding) == 1 else dist.new_group(replication[self.rank])

    def close(self) -> None:
        """Removes the groups from the core."""
        if self.replication is not None:
            for group in (self.sharding, self.replication):
                assert group.id is not None
                _core.remove_group(group.id)


def check_degree(members: list[int], degree: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sharding groups of a data-parallel group, and the ranks with the same shards.

    Raises:
        SMPConfigError: The degree does not divide the group.
    """
    with errors.translated(_CLASSES):
        return _core.sharding_groups(members, degree)
