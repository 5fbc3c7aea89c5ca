"""Hosts, slots, and the assignment of processes to them."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable


@dataclasses.dataclass
class HostInfo:
    """A host and its number of slots.

    Args:
        hostname: Name of the host.
        slots: Number of processes that may run on it.
    """

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse ``name:slots``.

        Args:
            host_string: The text.

        Returns:
            The host.

        Raises:
            ValueError: The text has another form.
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
    """The host of a process, and its ranks in the job."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """Return the ranks as text: rank and size in the job, on the host, and over hosts.

        Returns:
            Six numbers separated by commas.
        """
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(str(number) for number in numbers)

    @staticmethod
    def from_response_string(response_string: str) -> SlotInfo:
        """Parse what :meth:`to_response_string` returned.

        Args:
            response_string: The text.

        Returns:
            The ranks, without the name of the host.
        """
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, response_string.split(","))
        return SlotInfo("", rank, local_rank, cross_rank, size, local_size, cross_size)


INVALID_SLOT_INFO = SlotInfo(hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse ``name:slots,name:slots``.

    Args:
        hosts_string: The text.

    Returns:
        The hosts.
    """
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def parse_host_files(filename: str) -> str:
    """Read a file of lines ``name slots=n``.

    Args:
        filename: The file.

    Returns:
        The hosts as text for :func:`parse_hosts`.
    """
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
    """Parse hosts, and return names and slots separately.

    Args:
        hosts: Text for :func:`parse_hosts`.

    Returns:
        Names in order, and the slots of each.
    """
    parsed = parse_hosts(hosts)
    return [host.hostname for host in parsed], {host.hostname: host.slots for host in parsed}


def get_host_assignments(
    hosts: Iterable[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Assign ranks to hosts, host by host, in order.

    Args:
        hosts: All hosts.
        min_num_proc: Least number of slots.
        max_num_proc: Largest number of slots that are used; all by default.

    Returns:
        The host and ranks of each process.

    Raises:
        ValueError: There are too few slots.
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
