"""The communication API of ``smp``, objects between processes, for any framework."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES, SMPValidationError


class CommGroup(enum.Enum):
    """Groups of ranks."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """The group in which a rank is given."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


class Objects:
    """The communication functions of ``smp`` as methods.

    Args:
        groups: The coordinates of this process (``rank``, ``members``); raises before ``smp.init``.
        send_to: Sends a value to other global ranks; returns when they have received it.
        receive: Returns the next value from a global rank.
        gather: Returns the values of all ranks of a kind of group, in their order.
        wait_for_all: Barrier of a kind of group; returns when all its ranks have called it.
    """

    def __init__(
        self,
        groups: Callable[[], Any],
        send_to: Callable[[Any, list[int]], None],
        receive: Callable[[int], Any],
        gather: Callable[[Any, str], list[Any]],
        wait_for_all: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._send_to, self._receive = send_to, receive
        self._gather, self._wait_for_all = gather, wait_for_all

    def send(self, obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
        """Send an object to one rank, which calls :func:`recv_from`, and wait until it has received the object.

        Args:
            obj: The object; it is pickled.
            dest_rank: The receiver.
            rank_type: Group in which ``dest_rank`` is a rank.

        Raises:
            SMPPeerFailedError: The receiver has ended.
        """
        with errors.translated(CLASSES):
            self._send_to(obj, [self._global_rank(dest_rank, rank_type)])

    def recv_from(self, src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
        """Receive the object that a rank sends or broadcasts.

        Args:
            src_rank: The sender.
            rank_type: Group in which ``src_rank`` is a rank.

        Returns:
            The object.

        Raises:
            SMPPeerFailedError: The sender has ended.
        """
        with errors.translated(CLASSES):
            return self._receive(self._global_rank(src_rank, rank_type))

    def broadcast(self, obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
        """Send an object to all other ranks of a group, each of which calls :func:`recv_from`.

        The call returns when all of them have received the object.

        Args:
            obj: The object; it is pickled.
            group: The group, of which this rank is a member.

        Raises:
            SMPPeerFailedError: A receiver has ended.
        """
        with errors.translated(CLASSES):
            groups = self._groups()
            self._send_to(obj, [rank for rank in groups.members[_name(group)] if rank != groups.rank])

    def allgather(self, obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
        """Gather the objects of all ranks of a group. All of them call it.

        Args:
            obj: This rank's object; it is pickled.
            group: The group, of which this rank is a member.

        Returns:
            The objects, in the order of ranks inside the group.

        Raises:
            SMPPeerFailedError: A member has ended.
        """
        with errors.translated(CLASSES):
            return self._gather(obj, _name(group))

    def barrier(self, group: CommGroup = CommGroup.WORLD) -> None:
        """Wait until every rank of a group has called it.

        Args:
            group: The group, of which this rank is a member.

        Raises:
            SMPPeerFailedError: A member has ended.
        """
        with errors.translated(CLASSES):
            name = _name(group)
            if len(self._groups().members[name]) > 1:
                self._wait_for_all(name)

    def mp_barrier(self) -> None:
        """:func:`barrier` of the ranks that hold one model together."""
        self.barrier(CommGroup.MP_GROUP)

    def dp_barrier(self) -> None:
        """:func:`barrier` of the ranks that hold the same partition."""
        self.barrier(CommGroup.DP_GROUP)

    def pp_barrier(self) -> None:
        """:func:`barrier` of the ranks of one pipeline."""
        self.barrier(CommGroup.PP_GROUP)

    def tp_barrier(self) -> None:
        """:func:`barrier` of the ranks that share the layers of one partition."""
        self.barrier(CommGroup.TP_GROUP)

    def rdp_barrier(self) -> None:
        """:func:`barrier` of the ranks that hold the same parts of the same partition."""
        self.barrier(CommGroup.RDP_GROUP)

    def _global_rank(self, rank: int, rank_type: RankType) -> int:
        if not isinstance(rank_type, RankType):
            raise SMPValidationError(f"the kind of rank is {rank_type!r}: expected one of `smp.RankType`")
        groups = self._groups()
        members = groups.members[rank_type.value]
        if not 0 <= rank < len(members):
            raise SMPValidationError(f"{rank_type.name} {rank} does not exist: there are {len(members)}")
        if members[rank] == groups.rank:
            raise SMPValidationError(f"{rank_type.name} {rank} is this process itself")
        return members[rank]


def _name(group: CommGroup) -> str:
    if not isinstance(group, CommGroup):
        raise SMPValidationError(f"the group is {group!r}: expected one of `smp.CommGroup`")
    return group.value
