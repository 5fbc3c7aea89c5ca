"""Finding hosts."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from typing import Any

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.elastic.constants import HostUpdateResult
from smdistributed import _core


class HostDiscovery:
    """Tells which hosts there are."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Names and slots."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Asks a script, whose output has lines ``name:slots``.

    Args:
        discovery_script: The script.
        slots: Of lines without a number.
    """

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self.script = discovery_script
        self.default_slots = slots

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
        host_slots: Names and slots.
    """

    def __init__(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self._host_slots

    def set(self, host_slots: dict[str, int]) -> None:
        """Replaces the hosts."""
        self._host_slots = host_slots


class DiscoveredHosts:
    """The hosts of a moment.

    Args:
        host_slots: Slots by name.
        host_assignment_order: Names, oldest first.
    """

    def __init__(self, host_slots: dict[str, int], host_assignment_order: list[str]) -> None:
        self.host_slots = host_slots
        self.host_assignment_order = host_assignment_order

    @property
    def available_hosts(self) -> set[str]:
        """Names."""
        return set(self.host_assignment_order)

    def get_slots(self, host: str) -> int:
        """Slots of a host; 0 if it is none of these."""
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Slots of all of them."""
        return sum(self.get_slots(host) for host in self.host_assignment_order)


class HostManager:
    """The hosts that may be used, as `discovery` finds them: the oldest first, without those where a worker failed.

    What is decided is the core's, as for ``smdrun elastic``.

    Args:
        discovery: A :class:`HostDiscovery`.
        cooldown_range: How long a host that is blacklisted is not used, the first time and at most, in seconds; for ever without it.

    Raises:
        ValueError: The range is none: both are 1 to 3600, the smaller first.
    """

    def __init__(self, discovery: HostDiscovery, cooldown_range: tuple[float, float] | None = None) -> None:
        if cooldown_range is not None:
            low, high = cooldown_range
            if not 1 <= low <= high <= 3600:
                raise ValueError(
                    f"cooldown_range is {cooldown_range}: expected two numbers of seconds, 1 to 3600, the smaller first"
                )
            cooldown_range = (float(low), float(high))
        self._discovery = discovery
        self._lock = threading.Lock()
        self._known = _core.ElasticHosts(cooldown_range)
        #: Who decides: the driver's core, once there is one, and these hosts before.
        self._hosts: Any = self._known
        self._current = DiscoveredHosts({}, [])

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """Those of the last look."""
        with self._lock:
            return self._current

    def update_available_hosts(self) -> HostUpdateResult:
        """Asks the discovery, and returns what is different since the last time: hosts or slots more, fewer, or both."""
        found = self._discovery.find_available_hosts_and_slots()
        with self._lock:
            self._hosts.discover(list(found.items()))
            return self._look()

    def blacklist(self, host: str) -> None:
        """A worker failed there: the host is not used any more, or for a while."""
        with self._lock:
            self._hosts.ban(host)
            self._look()

    def is_blacklisted(self, host: str) -> bool:
        """Whether it may not be used now."""
        with self._lock:
            return bool(self._hosts.is_banned(host))

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], ordered_hosts: Iterable[str]) -> list[str]:
        """Orders hosts by age: hosts that were there before keep their order, and new ones follow.

        Args:
            available_hosts: Names of the hosts that are there now.
            ordered_hosts: Names of the hosts that were there before, oldest first.

        Returns:
            The names of `available_hosts`, oldest first.
        """
        available = list(available_hosts)
        kept = [host for host in ordered_hosts if host in available]
        return [*kept, *(host for host in available if host not in kept)]

    def decided_by(self, make: Any) -> Any:
        """From now on, what `make` makes of the hosts so far decides; it is returned."""
        with self._lock:
            self._hosts = make(self._known)
            return self._hosts

    def look(self) -> HostUpdateResult:
        """What is different since the last look, without asking the discovery: bans begin and end."""
        with self._lock:
            return self._look()

    def _look(self) -> HostUpdateResult:
        before = self._current
        usable = self._hosts.usable()
        now = self._current = DiscoveredHosts(dict(usable), [name for name, _ in usable])
        change = HostUpdateResult.no_update
        for name in before.available_hosts | now.available_hosts:
            if now.get_slots(name) < before.get_slots(name):
                change |= HostUpdateResult.removed
            elif now.get_slots(name) > before.get_slots(name):
                change |= HostUpdateResult.added
        return change
