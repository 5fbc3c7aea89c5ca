"""An identifier of this host."""

from __future__ import annotations

import hashlib
import os
import socket


def _namespaces() -> str:
    """Return the namespaces of this process, by which containers on one host differ."""
    found = []
    for name in ("ipc", "mnt", "net", "pid", "user", "uts"):
        try:
            found.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            continue
    return "-".join(found)


def _hash(string: str) -> str:
    """Return the MD5 digest of a text in hexadecimal; used as an identifier, not for security."""
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def host_hash(salt: str | None = None) -> str:
    """Return an identifier of this host.

    Args:
        salt: Processes with another salt count as processes of another host.

    Returns:
        The identifier.
    """
    hostname = socket.gethostname()
    text = "-".join([hostname, _namespaces(), *([salt] if salt is not None else [])])
    return f"{hostname.split('.')[0]}-{_hash(text)}"
