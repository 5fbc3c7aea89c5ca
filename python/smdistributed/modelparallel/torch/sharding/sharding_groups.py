"""The groups of sharded data parallelism; the core determines their ranks."""

from __future__ import annotations

from typing import Any

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPConfigError

_CLASSES: dict[str, Any] = {**CLASSES, "config": SMPConfigError}


class ShardingGroups:
    """The groups of this rank.

    Args:
        members: Global ranks that hold the same parameters.
        rank: This global rank.
        degree: Ranks of a sharding group.
        data: The group of all members; ``None`` if there is only one.

    Attributes:
        degree: Ranks of a sharding group.
        rank: This rank's index in the sharding group.
        members: Global ranks of the sharding group.
        number: Index of the sharding group.
        source: The first of all members, whose values all of them start with.
        sharding: The ranks that together hold the shards of one model; ``None`` if the degree is 1.
        replication: The ranks with the same shard; ``None`` if there is only one sharding group.
        data: As above.

    Raises:
        SMPConfigError: The degree does not divide the group.
    """

    def __init__(self, members: list[int], rank: int, degree: int, data: dist.ProcessGroup | None) -> None:
        sharding, replication = check_degree(members, degree)
        self.degree, self.data, self.source = degree, data, members[0]
        self.number = next(at for at, group in enumerate(sharding) if rank in group)
        self.members = sharding[self.number]
        self.rank = self.members.index(rank)
        self.sharding: dist.ProcessGroup | None = data
        self.replication: dist.ProcessGroup | None = None
        if degree == 1:
            self.sharding, self.replication = None, data
        elif len(sharding) > 1:
            self.sharding, self.replication = dist.new_group(self.members), dist.new_group(replication[self.rank])

    def close(self) -> None:
        """Remove the groups from the core."""
        for group in (self.sharding, self.replication):
            if group is not None and group is not self.data:
                assert group.id is not None
                _core.remove_group(group.id)


def check_degree(members: list[int], degree: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sharding groups of a data-parallel group, and the ranks with the same shards.

    Raises:
        SMPConfigError: The degree does not divide the group.
    """
    with errors.translated(_CLASSES):
        return _core.sharding_groups(members, degree)
