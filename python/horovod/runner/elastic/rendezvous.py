"""The store from which workers of an elastic job get their ranks."""

from __future__ import annotations

import json
from typing import Any

from horovod.runner.http.http_server import BAD_REQUEST, OK, RANK_AND_SIZE, RendezvousHandler

#: Scope of the addresses at which workers receive notices about hosts.
WORKER_ADDRESSES = "worker_addresses"


def create_rendezvous_handler(driver: Any) -> type[RendezvousHandler]:
    """Create the handler of a :class:`~horovod.runner.http.http_server.RendezvousServer` of a driver.

    ``GET rank_and_size/<host>:<slot>`` is answered when the next session begins. The answer is ``rank,size,local_rank,
    local_size,cross_rank,cross_size``; the rank is -1 if the worker is not part of the job any more. ``PUT
    worker_addresses/<host>:<slot>`` registers, as JSON, where a worker receives notices of hosts: by interface a list
    of addresses and ports.

    Args:
        driver: The driver.

    Returns:
        The handler's class.
    """

    class ElasticRendezvousHandler(RendezvousHandler):
        def _get(self, scope: str, key: str) -> tuple[int, bytes]:
            if scope != RANK_AND_SIZE:
                return super()._get(scope, key)
            slot = _slot_of(key)
            if slot is None:
                return BAD_REQUEST, b""
            driver.record_ready(*slot)
            return OK, driver.get_slot_info(*slot).to_response_string().encode()

        def _put(self, scope: str, key: str, value: bytes) -> tuple[int, bytes]:
            if scope != WORKER_ADDRESSES:
                return super()._put(scope, key, value)
            slot = _slot_of(key)
            if slot is None:
                return BAD_REQUEST, b""
            found = {name: [(ip, int(port)) for ip, port in addresses] for name, addresses in json.loads(value).items()}
            driver.register_worker_server(*slot, found, self.server.key)
            return OK, b""

    return ElasticRendezvousHandler


def _slot_of(key: str) -> tuple[str, int] | None:
    host, _, slot = key.rpartition(":")
    return (host, int(slot)) if host and slot.isdigit() else None
