"""Requests to the store."""

from __future__ import annotations

import hmac
import http.client
import pickle
import secrets
from typing import Any

from horovod.runner.common.util import secret
from horovod.runner.http import http_server
from horovod.runner.util.peers import GREETING_TIME_S, notice_lost_hosts

try:
    import cloudpickle
except ImportError:
    cloudpickle = pickle

#: Seconds to wait for an answer, except for a rank in an elastic job, which takes until the next session.
_TIMEOUT_S = 600


def request(
    method: str, addr: str, port: int, scope: str, key: str, body: bytes = b"", secret_key: bytes | None = None
) -> bytes:
    """Send a request to the store.

    Args:
        method: ``GET``, ``PUT`` or ``DELETE``.
        addr: Host of the server.
        port: Port of the server.
        scope: Scope of the value.
        key: Key of the value.
        body: The value to put.
        secret_key: The job's secret; by default that of ``_HOROVOD_SECRET_KEY``.

    Returns:
        The answer.

    Raises:
        RuntimeError: There is no such value, or the server has another secret.
        OSError: The server is gone.
    """
    proof = secret_key or secret.from_environment()
    if proof is None:
        raise RuntimeError(f"the store needs the job's secret: pass `secret_key`, or set `{secret.HOROVOD_SECRET_KEY}`")
    path, nonce = f"/{scope}/{key}", secrets.token_hex(16)
    headers = http_server.headers_of_request(proof, method, path, nonce, body)
    connection = http.client.HTTPConnection(addr, port, timeout=GREETING_TIME_S)
    try:
        connection.connect()
        notice_lost_hosts(connection.sock)
        connection.sock.settimeout(None if scope == http_server.RANK_AND_SIZE else _TIMEOUT_S)
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        value = answer.read()
    finally:
        connection.close()
    expected = http_server.digest_of_answer(proof, answer.status, nonce, value)
    if not hmac.compare_digest(expected.encode(), answer.headers.get(http_server.DIGEST, "").encode()):
        raise RuntimeError(f"the server at {addr}:{port} does not know this job's secret")
    if answer.status == http_server.NOT_FOUND:
        raise RuntimeError(f"the store at {addr}:{port} has no value {scope}/{key}")
    if answer.status != http_server.OK:
        why = f": {value.decode(errors='replace')}" if value else ""
        raise RuntimeError(f"the store at {addr}:{port} refuses {method} {path}: status {answer.status}{why}")
    return value


def read_data_from_kvstore(addr: str, port: int, scope: str, key: str, secret_key: bytes | None = None) -> Any:
    """Read an object from the store.

    Args:
        addr: Host of the server.
        port: Port of the server.
        scope: Scope of the value.
        key: Key of the value.
        secret_key: See :func:`request`.

    Returns:
        The object.

    Raises:
        RuntimeError: There is no such value, or the server has another secret.
    """
    # The digest of the answer proves that a process of the job sent it.
    return pickle.loads(request("GET", addr, port, scope, key, secret_key=secret_key))


def put_data_into_kvstore(
    addr: str, port: int, scope: str, key: str, value: Any, secret_key: bytes | None = None
) -> None:
    """Put an object into the store.

    Args:
        addr: Host of the server.
        port: Port of the server.
        scope: Scope of the value.
        key: Key of the value.
        value: The object.
        secret_key: See :func:`request`.

    Raises:
        RuntimeError: The server has another secret.
    """
    request("PUT", addr, port, scope, key, cloudpickle.dumps(value), secret_key)
