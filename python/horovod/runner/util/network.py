"""Addresses and interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator, Set

from smdistributed import _core

_SIOCGIFADDR = 0x8915


class Interfaces(Set):
    """Names of interfaces, equal to a set of them, in the order in which the user gave them: of some settings the first one counts
    that a host has.

    Args:
        names: A set has no order; its names come sorted.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = dict.fromkeys(sorted(names) if isinstance(names, (set, frozenset)) else names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Interfaces({list(self)})"


def get_local_host_intfs() -> dict[str, str]:
    """Names of the interfaces that have an address of IPv4, and these."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # It has none.
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def get_local_intfs(nic: str | None = None) -> set[str]:
    """The names of this host's interfaces that have an IPv4 address.

    Args:
        nic: Only this interface, if it is here; all by default.
    """
    return {name for name in get_local_host_intfs() if nic is None or name == nic}


def get_local_host_addresses() -> set[str]:
    """Addresses of IPv4 of this host."""
    return set(get_local_host_intfs().values())


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """Those of these hosts that are not this one."""
    return [name for name in all_host_names if not _core.is_this_host(name)]


def get_driver_ip(nics: Iterable[str] | None) -> str:
    """An address of this host at one of these interfaces, or at any that leaves the host.

    Raises:
        RuntimeError: There is none.
    """
    interfaces = get_local_host_intfs()
    for name in nics or [name for name in interfaces if name != "lo"] or interfaces:
        if name in interfaces:
            return interfaces[name]
    raise RuntimeError(f"none of the interfaces {sorted(nics or [])} is here: there are {sorted(interfaces)}")
