"""Finding hosts."""

from __future__ import annotations

import io
from typing import Any

from horovod.runner.common.util import safe_shell_exec


class HostDiscovery:
    """Tells which hosts there are."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Names and slots."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Asks a script, whose output has lines ``name:slots``.

    Args:
        discovery_script: The script.
        default_slots: Of lines without a number.
    """

    def __init__(self, discovery_script: str, default_slots: int | None) -> None:
        self.script = discovery_script
        self.default_slots = default_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        output = io.StringIO()
        code = safe_shell_exec.execute(self.script, stdout=output)
        if code != 0:
            raise RuntimeError(f"Failed to execute discovery script: {self.script}. Exit code: {code}")
        found: dict[str, int] = {}
        for line in output.getvalue().split():
            name, colon, slots = line.partition(":")
            if not colon and self.default_slots is None:
                raise ValueError(f"`{line}` has no slots: expected `name:slots`, or `--slots-per-host`")
            found[name] = int(slots) if colon else int(self.default_slots or 0)
        return found


class FixedHosts(HostDiscovery):
    """Hosts that are set.

    Args:
        available_hosts: Names and slots.
    """

    def __init__(self, available_hosts: dict[str, int]) -> None:
        self._available_hosts = available_hosts

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self._available_hosts

    def set(self, available_hosts: dict[str, Any]) -> None:
        """Other ones."""
        self._available_hosts = available_hosts
