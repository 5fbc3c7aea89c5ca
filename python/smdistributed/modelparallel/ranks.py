"""The rank and size calls of ``smp``, for any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smdistributed import _core


class Ranks:
    """The rank and size functions of ``smp`` as methods.

    Args:
        groups: The coordinates of this process (``topology``, ``rank``, ``members``); raises before ``smp.init``.
    """

    def __init__(self, groups: Callable[[], Any]) -> None:
        self._groups = groups

    def _members(self, name: str) -> list[int]:
        return list(self._groups().members[name])

    def _place(self, name: str) -> int:
        groups = self._groups()
        return groups.members[name].index(groups.rank)

    def rank(self) -> int:
        """Return the global rank of this process.

        Returns:
            The rank, from 0 to ``size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._groups().rank

    def size(self) -> int:
        """Return the number of processes of the job.

        Returns:
            The number.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._groups().topology.size

    def local_rank(self) -> int:
        """Return the rank of this process on its host.

        Returns:
            The rank, from 0 to ``local_size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        self._groups()
        return _core.local_rank()

    def local_size(self) -> int:
        """Return the number of processes on this host.

        Returns:
            The number.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        self._groups()
        return _core.local_size()

    def mp_rank(self) -> int:
        """Return the rank of this process in its model-parallel group, whose ranks hold one model together.

        Returns:
            The rank, from 0 to ``mp_size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._place("mp")

    def mp_size(self) -> int:
        """Return the size of the model-parallel group, whose ranks hold one model together.

        Returns:
            The number of ranks.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return len(self._members("mp"))

    def dp_rank(self) -> int:
        """Return the rank of this process in its data-parallel group, whose ranks hold the same partition.

        Returns:
            The rank, from 0 to ``dp_size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._place("dp")

    def dp_size(self) -> int:
        """Return the size of the data-parallel group, whose ranks hold the same partition.

        Returns:
            The number of ranks.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return len(self._members("dp"))

    def pp_rank(self) -> int:
        """Return the partition that this rank holds.

        Returns:
            The partition, from 0 to ``pp_size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._place("pp")

    def pp_size(self) -> int:
        """Return the number of partitions of the model.

        Returns:
            The number.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return len(self._members("pp"))

    def tp_rank(self) -> int:
        """Return the rank of this process in its tensor-parallel group, whose ranks share the layers of a partition.

        Returns:
            The rank, from 0 to ``tp_size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._place("tp")

    def tp_size(self) -> int:
        """Return the size of the tensor-parallel group, whose ranks share the layers of a partition.

        Returns:
            The number of ranks.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return len(self._members("tp"))

    def rdp_rank(self) -> int:
        """Return the rank of this process among those that hold the same parts of the same partition.

        Returns:
            The rank, from 0 to ``rdp_size() - 1``.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._place("rdp")

    def rdp_size(self) -> int:
        """Return the number of ranks that hold the same parts of the same partition.

        Returns:
            The number of ranks.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return len(self._members("rdp"))

    def get_mp_group(self) -> list[int]:
        """Return the ranks that hold one model together with this rank.

        Returns:
            Global ranks, in order.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._members("mp")

    def get_dp_group(self) -> list[int]:
        """Return the ranks that hold the same partition as this rank.

        Returns:
            Global ranks, in order.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._members("dp")

    def get_pp_group(self) -> list[int]:
        """Return the ranks of this rank's pipeline.

        Returns:
            Global ranks, in the order of their partitions.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._members("pp")

    def get_tp_group(self) -> list[int]:
        """Return the ranks that share the layers of one partition with this rank.

        Returns:
            Global ranks, in order.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._members("tp")

    def get_rdp_group(self) -> list[int]:
        """Return the ranks that hold the same parts of the same partition as this rank.

        Returns:
            Global ranks, in order.

        Raises:
            SMPNotInitializedError: ``smp.init()`` was not called.
        """
        return self._members("rdp")
