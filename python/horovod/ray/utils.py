"""Network interfaces of the workers of a job on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def detect_nics(
    settings: Any, all_host_names: Sequence[str] | None = None, node_workers: Sequence[Any] | None = None
) -> set[str] | None:
    """Return the interfaces that workers use. The core chooses them by the addresses at which ranks reach each other.

    Args:
        settings: An object with ``nics``.
        all_host_names: Accepted for compatibility, without effect.
        node_workers: Accepted for compatibility, without effect.

    Returns:
        ``settings.nics``; ``None`` leaves the choice to the core.
    """
    return settings.nics


def nics_to_env_var(nics: Iterable[str] | None) -> dict[str, str]:
    """Return the variables that select interfaces.

    Args:
        nics: Names of interfaces, the first one for the connections of the core; ``None`` selects none.

    Returns:
        Values by name.
    """
    names = list(nics or ())
    return {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)} if names else {}
