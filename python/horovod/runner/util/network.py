"""Addresses and interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator, Set

from smdistributed import _core

_SIOCGIFADDR = 0x8915


class Interfaces(Set):
    """Names of interfaces, in the order in which the user gave them; equal to a set of them.

    The order matters for settings of which the first interface that a host has is used.

    Args:
        names: The names; those of a set are sorted.
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
    """Return the interfaces that have an IPv4 address.

    Returns:
        Addresses by name.
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # The interface has no address.
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Return the names of this host's interfaces that have an IPv4 address.

    Args:
        nic: Only this interface; all by default.

    Returns:
        The names; none if ``nic`` does not exist.
    """
    return {name for name in get_local_host_intfs() if nic is None or name == nic}


def get_local_host_addresses() -> set[str]:
    """Return the IPv4 addresses of this host.

    Returns:
        The addresses.
    """
    return set(get_local_host_intfs().values())


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """Return the hosts that are not this one.

    Args:
        all_host_names: Names of hosts.

    Returns:
        The others' names.
    """
    return [name for name in all_host_names if not _core.is_this_host(name)]


def get_driver_ip(nics: Iterable[str] | None) -> str:
    """Return an address of this host at one of these interfaces, or at any that leaves the host.

    Args:
        nics: Names of interfaces, or ``None``.

    Returns:
        The address.

    Raises:
        RuntimeError: There is none.
    """
    interfaces = get_local_host_intfs()
    for name in nics or [name for name in interfaces if name != "lo"] or interfaces:
        if name in interfaces:
            return interfaces[name]
    raise RuntimeError(f"this host has none of the interfaces {sorted(nics or [])}: it has {sorted(interfaces)}")
