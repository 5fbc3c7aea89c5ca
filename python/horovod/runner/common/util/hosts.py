"""Hosts, slots, and which process gets which."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable


@dataclasses.dataclass
class HostInfo:
    """A host and how many processes it takes.

    Args:
        hostname: Its name.
        slots: Number of processes.
    """

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Reads ``name:slots``.

        Raises:
            ValueError: It is something else.
        """
        hostname, _, slots = host_string.strip().rpartition(":")
        if not hostname or not slots.isdigit():
            raise ValueError(
                "Invalid host input, please make sure it has format as : worker-0:2,worker-1:2. It is "
                + repr(host_string)
            )
        return HostInfo(hostname, int(slots))


@dataclasses.dataclass
class SlotInfo:
    """A process's place in the job."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """Rank and size in the job, on the host, and over hosts."""
        places = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(str(place) for place in places)

    @staticmethod
    def from_response_string(response_string: str) -> SlotInfo:
        """The inverse of :meth:`to_response_string`, of a host without a name."""
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, response_string.split(","))
        return SlotInfo("", rank, local_rank, cross_rank, size, local_size, cross_size)


INVALID_SLOT_INFO = SlotInfo(hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Reads ``name:slots,name:slots``."""
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def parse_host_files(filename: str) -> str:
    """Reads lines ``name slots=n``, and returns them as :func:`parse_hosts` takes them."""
    hosts = []
    with open(filename) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            slots = re.search(r"\bslots\s*=\s*(\d+)", line)
            hosts.append(f"{line.split()[0]}:{slots[1] if slots else 1}")
    return ",".join(hosts)


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Names in order, and the slots of each."""
    parsed = parse_hosts(hosts)
    return [host.hostname for host in parsed], {host.hostname: host.slots for host in parsed}


def get_host_assignments(
    hosts: Iterable[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Gives out ranks host by host, in order.

    Args:
        hosts: All hosts.
        min_num_proc: Slots that must be there.
        max_num_proc: Slots that are used at most; all by default.

    Raises:
        ValueError: There are too few.
    """
    local_sizes: dict[int, int] = defaultdict(int)
    cross_sizes: dict[int, int] = defaultdict(int)
    slots: list[tuple[int, SlotInfo]] = []
    for index, host in enumerate(hosts):
        for local_rank in range(host.slots):
            if len(slots) == max_num_proc:
                break
            slots.append((index, SlotInfo(host.hostname, len(slots), local_rank, cross_sizes[local_rank])))
            local_sizes[index] += 1
            cross_sizes[local_rank] += 1
    if len(slots) < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available slots ({len(slots)})")
    for index, slot in slots:
        slot.size = len(slots)
        slot.local_size = local_sizes[index]
        slot.cross_size = cross_sizes[slot.local_rank]
    return [slot for _, slot in slots]
