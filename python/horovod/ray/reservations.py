"""Resources that an elastic job has reserved on the nodes of a Ray cluster.

- RSV-1: a slot that the job may use is a placement group of one bundle on the slot's node. So no other job can take its
  resources between the discovery of the slot and the start of its worker.
- RSV-2: before its first worker starts, a job keeps either all slots that it waits for, or none. So two jobs that wait
  for the same nodes do not hold parts of them forever.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ray._private.client_mode_hook import client_mode_wrap
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from horovod.runner.elastic.discovery import HostDiscovery

#: Longest wait for resources that Ray has just reported as available, in whole seconds: Ray drops fractions.
_RESERVE_SECONDS = 1
#: Time after which a job says why it waits, in seconds.
_PATIENCE_SECONDS = 20.0

#: Ray's label of a node with its id.
_NODE_ID = "ray.io/node-id"


@client_mode_wrap
def available_resources() -> dict[str, dict[str, float]]:
    """Return the resources that no task, actor or placement group has reserved, as Ray last reported them.

    Returns:
        Amounts by resource, by id of the node.
    """
    return dict(available_resources_per_node())


class Reservations(HostDiscovery):
    """The slots that an elastic job has reserved on the hosts of a discovery.

    Args:
        discovery: A :class:`horovod.ray.RayHostDiscovery`.
        least: Number of slots that the first session waits for.
        most: Largest number of slots that the job uses; ``None`` means all.
    """

    def __init__(self, discovery: Any, least: int, most: int | None) -> None:
        self._discovery = discovery
        self._least = least
        self._most = sys.maxsize if most is None else most
        self._lock = threading.Lock()
        #: By id of the node: the groups without a worker, and those with one.
        self._idle: dict[str, list[PlacementGroup]] = {}
        self._used: dict[str, list[PlacementGroup]] = {}
        self._has_begun = self._has_ended = False
        self._short_since = time.monotonic()
        self._has_explained = False
        #: Whether a host may not be used now.
        self.is_banned: Callable[[str], bool] = lambda _: False

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Reserve slots that have become available, and release those of lost and banned hosts.

        Returns:
            The reserved slots by host; for banned hosts, those that could be reserved.
        """
        with self._lock:
            if self._has_ended:
                return {}
            nodes = self._discovery.nodes.alive()
            ids = {name: node["NodeID"] for name, node in nodes.items()}
            for lost in {*self._idle, *self._used} - set(ids.values()):
                self._release(lost)
                # Ray would wait for another node with this label.
                for group in self._used.pop(lost, []):
                    remove_placement_group(group)
            self._discovery.held = {node: self._count(node) for node in ids.values()}
            found = self._discovery.find_available_hosts_and_slots()
            banned = {name: slots for name, slots in found.items() if self.is_banned(name)}
            wanted = {ids[name]: found.get(name, 0) if name not in banned else 0 for name in ids}
            for node, slots in wanted.items():
                self._release(node, keep=max(0, slots - len(self._used.get(node, []))))
            self._reserve(wanted)
            usable = {name: min(self._count(node), wanted[node]) for name, node in ids.items()}
            if not self._has_begun and sum(usable.values()) < self._least:
                for node in list(self._idle):
                    self._release(node)
                total = sum(self._discovery.slots_in(node["Resources"]) for node in nodes.values())
                self._explain(sum(usable.values()), total)
            return {name: slots for name, slots in {**usable, **banned}.items() if slots}

    def take(self, node: str) -> PlacementGroup:
        """Return a group for a worker. If none is reserved, the worker waits for its resources.

        Args:
            node: Id of the worker's node.

        Returns:
            The group.
        """
        with self._lock:
            self._has_begun = True
            idle = self._idle.get(node)
            group = idle.pop() if idle else self._create(node)
            self._used.setdefault(node, []).append(group)
            return group

    def give_back(self, node: str, group: PlacementGroup) -> None:
        """Keep a group whose worker has ended for the next worker of the node.

        Args:
            node: Id of the node.
            group: The group.
        """
        with self._lock:
            used = self._used.get(node, [])
            if group not in used:
                return
            used.remove(group)
            if group.wait(0):
                self._idle.setdefault(node, []).append(group)
            else:
                remove_placement_group(group)

    def release_all(self) -> None:
        """Release all resources. Ray ends the workers that still use them."""
        with self._lock:
            self._has_ended = True
            for groups in (self._idle, self._used):
                for group in (group for own in groups.values() for group in own):
                    remove_placement_group(group)
                groups.clear()
            self._discovery.held = {}

    def _count(self, node: str) -> int:
        return len(self._idle.get(node, [])) + len(self._used.get(node, []))

    def _create(self, node: str) -> PlacementGroup:
        bundle = self._discovery.resources_of_a_slot()
        return placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=[{_NODE_ID: node}])

    def _release(self, node: str, keep: int = 0) -> None:
        idle = self._idle.get(node, [])
        for group in idle[keep:]:
            remove_placement_group(group)
        del idle[keep:]

    def _reserve(self, wanted: dict[str, int]) -> None:
        """Reserve the slots of these nodes that are not reserved yet, as many as the job may use."""
        room = self._most - sum(min(self._count(node), slots) for node, slots in wanted.items())
        created = []
        for node, slots in wanted.items():
            number = min(slots - self._count(node), room)
            room -= max(0, number)
            created += [(node, self._create(node)) for _ in range(number)]
        deadline = time.monotonic() + _RESERVE_SECONDS
        for node, group in created:
            if group.wait(_RESERVE_SECONDS if time.monotonic() < deadline else 0):
                self._idle.setdefault(node, []).append(group)
            else:
                # Somebody else was faster.
                remove_placement_group(group)

    def _explain(self, count: int, total: int) -> None:
        """Say once why the job has not begun."""
        if self._has_explained or time.monotonic() < self._short_since + _PATIENCE_SECONDS:
            return
        self._has_explained = True
        need = " and ".join(f"{amount:g} {name}" for name, amount in self._discovery.resources_of_a_slot().items())
        rest = "; other jobs, actors or placement groups hold the rest" if count < total else ""
        print(
            f"horovod: the elastic job waits for {self._least} slots of {need}: the nodes have {total} such slots, and "
            f"{count} can be used{rest}",
            file=sys.stderr,
            flush=True,
        )
