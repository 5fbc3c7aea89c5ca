"""Coordinates of ranks along the axes of parallelism, and the process groups that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smdistributed.modelparallel.exceptions import SMPConfigError

#: Axis of a letter of a placement strategy.
AXES = {"D": "rdp", "P": "pp", "T": "tp"}
#: Axes along which the members of a group differ.
GROUPS = {"pp": "P", "tp": "T", "rdp": "D", "mp": "PT", "dp": "DT"}


@dataclass(frozen=True)
class Topology:
    """A job of ``size`` ranks in the order of ``strategy``: the rightmost letter varies fastest."""

    size: int
    pp: int
    tp: int
    strategy: str

    @classmethod
    def of(cls, size: int, pp: int, tp: int, placement: str) -> Topology:
        """With the configuration's names.

        Raises:
            SMPConfigError: the ranks cannot be divided so.
        """
        if size % (pp * tp):
            what = f"{pp} partitions" + (f" times {tp} tensor-parallel ranks" if tp > 1 else "")
            raise SMPConfigError(f"{size} processes cannot be divided into {what}")
        strategy = {"cluster": "DPT", "spread": "TPD"}.get(placement, placement.upper())
        return cls(size, pp, tp, strategy)

    @property
    def rdp(self) -> int:
        """Ranks that hold the same part."""
        return self.size // (self.pp * self.tp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of ``rank`` on each axis, by letter."""
        sizes = {"D": self.rdp, "P": self.pp, "T": self.tp}
        place = {}
        for letter in reversed(self.strategy):
            rank, place[letter] = divmod(rank, sizes[letter])
        return place

    def group(self, name: str, rank: int) -> list[int]:
        """Global ranks, ascending, of the group of this kind that ``rank`` is in."""
        if name == "world":
            return list(range(self.size))
        mine = self.coordinates(rank)
        fixed = [letter for letter in AXES if letter not in GROUPS[name]]

        def belongs(other: int) -> bool:
            place = self.coordinates(other)
            return all(place[letter] == mine[letter] for letter in fixed)

        return [other for other in range(self.size) if belongs(other)]

    def groups(self, name: str) -> list[list[int]]:
        """All groups of this kind, by their first ranks."""
        groups = []
        for rank in range(self.size):
            group = self.group(name, rank)
            if group[0] == rank:
                groups.append(group)
        assert math.prod((len(groups), len(groups[0]))) == self.size or name == "world"
        return groups
