"""Discovery of hosts."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from typing import Any

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.elastic.constants import HostUpdateResult
from smdistributed import _core

#: Seconds after which a script is ended. Without a limit, a service that does not answer would stop the discovery.
_LONGEST_RUN_S = 60


class HostDiscovery:
    """The interface of a discovery of hosts."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the available hosts.

        Returns:
            Slots by name.
        """
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Runs a script that prints lines ``name:slots``.

    Args:
        discovery_script: The script.
        slots: Slots of lines without a number.
    """

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self.script = discovery_script
        self.default_slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script.

        Returns:
            Slots by name.

        Raises:
            RuntimeError: The script failed, or took longer than 60 seconds.
            ValueError: A line has no number of slots, and there is no default.
        """
        output, is_late = io.StringIO(), threading.Event()
        timer = threading.Timer(_LONGEST_RUN_S, is_late.set)
        timer.daemon = True
        timer.start()
        try:
            code = safe_shell_exec.execute(self.script, stdout=output, events=[is_late])
        finally:
            timer.cancel()
        if is_late.is_set():
            raise RuntimeError(f"the discovery script {self.script} took longer than {_LONGEST_RUN_S} s")
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
    """Hosts that the caller sets.

    Args:
        host_slots: Slots by name.
    """

    def __init__(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts.

        Returns:
            Slots by name.
        """
        return self._host_slots

    def set(self, host_slots: dict[str, int]) -> None:
        """Replace the hosts.

        Args:
            host_slots: Slots by name.
        """
        self._host_slots = host_slots


class DiscoveredHosts:
    """The hosts at one moment.

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
        """Return the slots of a host.

        Args:
            host: Name of the host.

        Returns:
            The number; 0 for an unknown host.
        """
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Return the slots of all hosts.

        Returns:
            The number.
        """
        return sum(self.get_slots(host) for host in self.host_assignment_order)


class HostManager:
    """The hosts that a job may use: the oldest first, without hosts where a worker failed.

    The core decides, as for ``smdrun elastic``.

    Args:
        discovery: A :class:`HostDiscovery`.
        cooldown_range: Least and largest time that a blacklisted host is not used, in seconds, each 1 to 3600. Without
            it, a blacklisted host is never used again.

    Raises:
        ValueError: ``cooldown_range`` is not such a range.
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
        #: The driver's core, once it exists; before that, this object keeps the list of hosts itself.
        self._hosts: Any = self._known
        self._current = DiscoveredHosts({}, [])

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts of the last discovery."""
        with self._lock:
            return self._current

    def update_available_hosts(self) -> HostUpdateResult:
        """Run the discovery.

        Returns:
            The change since the last call: more hosts or slots, fewer, or both.
        """
        found = self._discovery.find_available_hosts_and_slots()
        with self._lock:
            self._hosts.discover(list(found.items()))
            return self._refresh()

    def blacklist(self, host: str) -> None:
        """Stop using a host where a worker failed, for a while or for the rest of the job.

        Args:
            host: Name of the host.
        """
        with self._lock:
            self._hosts.ban(host)
            self._refresh()

    def is_blacklisted(self, host: str) -> bool:
        """Return whether a host may not be used now.

        Args:
            host: Name of the host.

        Returns:
            Whether the host is blacklisted.
        """
        with self._lock:
            return bool(self._hosts.is_banned(host))

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], ordered_hosts: Iterable[str]) -> list[str]:
        """Order hosts by age: known hosts keep their order, and new ones follow.

        Args:
            available_hosts: Names of the current hosts.
            ordered_hosts: Names of the earlier hosts, oldest first.

        Returns:
            The names of ``available_hosts``, oldest first.
        """
        available = list(available_hosts)
        kept = [host for host in ordered_hosts if host in available]
        return [*kept, *(host for host in available if host not in kept)]

    def replace_core(self, make: Any) -> Any:
        """Replace the object of the core that decides which hosts are used.

        Args:
            make: Creates the object from the hosts so far.

        Returns:
            The object.
        """
        with self._lock:
            self._hosts = make(self._known)
            return self._hosts

    def refresh(self) -> HostUpdateResult:
        """Check for hosts whose time on the blacklist has begun or ended, without running the discovery.

        Returns:
            The change since the last call.
        """
        with self._lock:
            return self._refresh()

    def _refresh(self) -> HostUpdateResult:
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
