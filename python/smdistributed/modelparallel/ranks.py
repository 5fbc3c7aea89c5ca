"""The rank and size calls of ``smp``, for any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smdistributed import _core


class Ranks:
    """The rank and size functions of ``smp`` as methods.

    Args:
        groups: What tells the place of this process in the job (``topology``, ``rank``, ``members``); refuses before
            ``smp.init``.
    """

    def __init__(self, groups: Callable[[], Any]) -> None:
        self._groups = groups

    def _members(self, name: str) -> list[int]:
        return list(self._groups().members[name])

    def _place(self, name: str) -> int:
        groups = self._groups()
        return groups.members[name].index(groups.rank)

    def rank(self) -> int:
        """Global rank."""
        return self._groups().rank

    def size(self) -> int:
        """Processes of the job."""
        return self._groups().topology.size

    def local_rank(self) -> int:
        """Rank on this host."""
        self._groups()
        return _core.local_rank()

    def local_size(self) -> int:
        """Processes on this host."""
        self._groups()
        return _core.local_size()

    def mp_rank(self) -> int:
        """Place among the ranks that hold one model together."""
        return self._place("mp")

    def mp_size(self) -> int:
        """Ranks that hold one model together."""
        return len(self._members("mp"))

    def dp_rank(self) -> int:
        """Place among the ranks that hold the same partition."""
        return self._place("dp")

    def dp_size(self) -> int:
        """Ranks that hold the same partition."""
        return len(self._members("dp"))

    def pp_rank(self) -> int:
        """The partition that this rank holds."""
        return self._place("pp")

    def pp_size(self) -> int:
        """Partitions."""
        return len(self._members("pp"))

    def tp_rank(self) -> int:
        """Place among the ranks that share the layers of one partition."""
        return self._place("tp")

    def tp_size(self) -> int:
        """Ranks that share the layers of one partition."""
        return len(self._members("tp"))

    def rdp_rank(self) -> int:
        """Place among the ranks that hold the same parts of the same partition."""
        return self._place("rdp")

    def rdp_size(self) -> int:
        """Ranks that hold the same parts of the same partition."""
        return len(self._members("rdp"))

    def get_mp_group(self) -> list[int]:
        """Global ranks that hold one model together."""
        return self._members("mp")

    def get_dp_group(self) -> list[int]:
        """Global ranks that hold the same partition."""
        return self._members("dp")

    def get_pp_group(self) -> list[int]:
        """Global ranks of the partitions, in their order."""
        return self._members("pp")

    def get_tp_group(self) -> list[int]:
        """Global ranks that share the layers of one partition."""
        return self._members("tp")

    def get_rdp_group(self) -> list[int]:
        """Global ranks that hold the same parts of the same partition."""
        return self._members("rdp")
