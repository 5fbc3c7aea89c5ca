"""Rendezvous of workers whose launcher has a key-value store.

In a job that a script's own ``ElasticDriver`` drives, workers get their ranks from the store before each session. In
other jobs the ranks are fixed.

In both cases, rank 0 writes its address to the store, and the other ranks connect to it. In an elastic job, the driver
removes this key before each session.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from typing import Any

from horovod.common.exceptions import may_pass
from smdistributed import _core
from smdistributed._common import lifecycle
from smdistributed._common.errors import RemovedError

_STORE = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_SLOT = ("HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK")
_PLACE = ("HOROVOD_RANK", "HOROVOD_SIZE")
# Key of rank 0's address, and the interval in seconds at which other ranks poll for it.
_SCOPE, _KEY = "global", "rendezvous"
_POLL_SECONDS = 0.05

# The driver's name for this worker: the host and the slot in which it was started. Its rank may change.
_slot: tuple[str, str] | None = None

# For fixed ranks: the number of sessions so far, which is equal on all of them.
_num_sessions = itertools.count()
_has_set_address = False


def is_driven() -> bool:
    """Return whether a script's own driver drives this process.

    Under `horovodrun`, the core assigns the ranks instead.

    Returns:
        ``True`` if the ranks come from that driver's store.
    """
    environ = os.environ
    is_set = all(environ.get(name) for name in (*_STORE, *_SLOT))
    return is_set and environ.get("HOROVOD_ELASTIC") == "1" and not environ.get("SMD_WORKER")


def is_elastic() -> bool:
    """Return whether workers of this process's job may join and leave, under `horovodrun` or a driver of the script.

    Returns:
        ``True`` if workers may join and leave.
    """
    return bool(os.environ.get("SMD_WORKER")) or is_driven()


def slot() -> tuple[str, str]:
    """Return the host and the number on it by which the driver knows this worker.

    Returns:
        The host and the number, as they were in the environment at the first call.
    """
    global _slot
    if _slot is None:
        _slot = os.environ[_SLOT[0]], os.environ[_SLOT[1]]
    return _slot


def set_rendezvous() -> None:
    """Set the address at which the ranks of a job with fixed ranks connect to rank 0.

    The address comes from the launcher's store. Nothing is set if there is no store, or if the environment already has
    an address.

    Raises:
        RuntimeError: The store does not answer, or its answer is invalid.
    """
    from horovod.runner.common.util import secret
    from horovod.runner.http import http_client

    global _has_set_address
    environ = os.environ
    has_store = all(environ.get(name) for name in (*_STORE, *_PLACE, secret.HOROVOD_SECRET_KEY))
    if not has_store or environ.get("SMD_RENDEZVOUS") or (environ.get("MASTER_ADDR") and not _has_set_address):
        return
    address, port = environ[_STORE[0]], int(environ[_STORE[1]])
    key = f"{_KEY}.{next(_num_sessions)}"
    try:
        if environ[_PLACE[0]] == "0":
            rendezvous = _own_address(address, port)
            http_client.request("PUT", address, port, _SCOPE, key, json.dumps(rendezvous).encode())
        else:
            timeout = float(_core.setting("SMD_INIT_TIMEOUT_SECONDS"))
            rendezvous = _fetch_rendezvous(http_client.request, address, port, key, timeout)
    except OSError as error:
        raise RuntimeError(f"the store at {address}:{port} does not answer: {error}") from None
    environ.update(_at(rendezvous))
    _has_set_address = True


def join(timeout: float) -> None:
    """Join the next session; try again if it fails because another worker has ended during the rendezvous.

    Args:
        timeout: Seconds for which the session is retried.

    Raises:
        RemovedError: This worker is not part of the job any more.
        RuntimeError: The store does not answer, its answer is not valid, or not all ranks join.
    """
    start = None
    while True:
        _enter(timeout)
        start = start or time.monotonic()
        try:
            return lifecycle.init()
        except RuntimeError as error:
            if not may_pass(error) or time.monotonic() - start > timeout:
                raise
            # Another worker ended before the session had begun.
            lifecycle.shutdown()


def _enter(timeout: float) -> None:
    """Wait for the next session, and set the variables with this process's rank in it and rank 0's address."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http import http_client, http_server

    host, number = slot()
    address, port = os.environ[_STORE[0]], int(os.environ[_STORE[1]])
    try:
        answer = http_client.request("GET", address, port, http_server.RANK_AND_SIZE, f"{host}:{number}")
        place = SlotInfo.from_response_string(answer.decode())
        if place.rank < 0:
            raise RemovedError(f"{host}[{number}] has no slot in the job any more")
        if place.rank == 0:
            rendezvous = _own_address(address, port)
            http_client.request("PUT", address, port, _SCOPE, _KEY, json.dumps(rendezvous).encode())
        else:
            rendezvous = _fetch_rendezvous(http_client.request, address, port, _KEY, timeout)
    except OSError as error:
        raise RuntimeError(f"the store at {address}:{port} does not answer: {error}") from None
    found = {
        "HOROVOD_RANK": place.rank,
        "HOROVOD_SIZE": place.size,
        "HOROVOD_LOCAL_RANK": place.local_rank,
        "HOROVOD_LOCAL_SIZE": place.local_size,
        "HOROVOD_CROSS_RANK": place.cross_rank,
        "HOROVOD_CROSS_SIZE": place.cross_size,
    }
    os.environ.update({name: str(value) for name, value in found.items()} | _at(rendezvous))


def find_address() -> list[Any]:
    """Find an address for the ranks of a session on this host, which is that of rank 0.

    Returns:
        The address as the store's host sees it, and a free port.
    """
    return _own_address(os.environ[_STORE[0]], int(os.environ[_STORE[1]]))


def offer_address(rendezvous: list[Any]) -> None:
    """Set the variables of torchrun, for functions that join the job without ``hvd.init()``.

    Nothing is set if the user has set an address. ``hvd.init()`` replaces the address.

    Args:
        rendezvous: The result of :func:`find_address` on rank 0.
    """
    global _has_set_address
    environ = os.environ
    if environ.get("SMD_RENDEZVOUS") or (environ.get("MASTER_ADDR") and not _has_set_address):
        return
    names = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    environ.update({name: environ[f"HOROVOD_{theirs}"] for theirs, name in names.items()} | _at(rendezvous))
    _has_set_address = True


def _at(rendezvous: list[Any]) -> dict[str, str]:
    """Return variables with rank 0's address and the secret by which the ranks authenticate each other."""
    from horovod.runner.common.util import secret

    host, port = rendezvous
    proof = secret.from_environment()
    found = {"MASTER_ADDR": str(host), "MASTER_PORT": str(port)}
    if proof is not None:
        found["SMD_SECRET"] = secret.compute_digest(proof, f"session at {host}:{port}").hex()
    return found


def _own_address(store: str, port: int) -> list[Any]:
    """Return this host's address as the store's host sees it, and a free port."""
    family = socket.getaddrinfo(store, port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe, socket.socket(family, socket.SOCK_STREAM) as server:
        # Connecting a UDP socket sends nothing.
        probe.connect((store, port))
        host = probe.getsockname()[0]
        server.bind((host, 0))
        return [host, server.getsockname()[1]]


def _fetch_rendezvous(request: Any, address: str, port: int, key: str, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return json.loads(request("GET", address, port, _SCOPE, key))
        except RuntimeError:
            # The key does not exist yet.
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def listen(manager: Any) -> None:
    """Register the address at which this worker receives notices about hosts, and pass the notices to `manager`.

    Args:
        manager: Receives the notices.

    Raises:
        RuntimeError: The environment has no secret, or the store does not answer.
    """
    from horovod.runner.common.util import secret
    from horovod.runner.elastic.rendezvous import WORKER_ADDRESSES
    from horovod.runner.elastic.worker import WorkerNotificationService
    from horovod.runner.http import http_client

    host, number = slot()
    key = secret.from_environment()
    if key is None:
        raise RuntimeError(
            f"`{secret.HOROVOD_SECRET_KEY}` is not set: the launcher must give each worker the job's secret"
        )
    service = WorkerNotificationService(key, None, manager)
    addresses = json.dumps(service.addresses()).encode()
    address, port = os.environ[_STORE[0]], int(os.environ[_STORE[1]])
    try:
        http_client.request("PUT", address, port, WORKER_ADDRESSES, f"{host}:{number}", addresses)
    except BaseException:
        service.shutdown()
        raise
