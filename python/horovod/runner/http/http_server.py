"""The servers of the store.

    GET, PUT, DELETE /scope/key

Each request proves that its sender knows the job's secret before its body is read. Its digest is over the method, the
path, a number that is used once, and the body's length and hash. The digest of an answer is over that number and the
answer, so a client accepts only the answer to its own request.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from horovod.runner.common.util import secret
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.util.connections import Connections
from horovod.runner.util.threads import in_thread

OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, FAILED = 200, 400, 403, 404, 500
#: HTTP headers of the request's number, the body's hash and the digest, in hexadecimal.
NONCE, HASH, DIGEST = "X-Horovod-Nonce", "X-Horovod-Hash", "X-Horovod-Digest"
#: Seconds after which a client that has not authenticated its request is disconnected.
_GREETING_TIME = 20
#: Scope of the ranks that workers request.
RANK_AND_SIZE = "rank_and_size"


def headers_of_request(key: bytes, method: str, path: str, nonce: str, body: bytes) -> dict[str, str]:
    """Return the headers that authenticate a request.

    Args:
        key: The secret.
        method: The method.
        path: The path.
        nonce: A number that is used once.
        body: The body.

    Returns:
        Values by name.
    """
    body_hash = hashlib.sha256(body).hexdigest()
    digest = _digest_of_request(key, method, path, nonce, str(len(body)), body_hash)
    return {NONCE: nonce, HASH: body_hash, DIGEST: digest, "Content-Length": str(len(body))}


def _digest_of_request(key: bytes, *words: str) -> str:
    return secret.compute_digest(key, " ".join(words)).hex()


def digest_of_answer(key: bytes, status: int, nonce: str, body: bytes) -> str:
    """Return the digest that authenticates an answer.

    Args:
        key: The secret.
        status: Status of the answer.
        nonce: The request's number.
        body: Body of the answer.

    Returns:
        The digest in hexadecimal digits.
    """
    return secret.compute_digest(key, f"{status} {nonce} ".encode() + body).hex()


class KVStoreHandler(BaseHTTPRequestHandler):
    """Handles one connection. Subclasses extend `_get`, `_put` and `_delete`."""

    protocol_version = "HTTP/1.1"
    timeout = _GREETING_TIME
    server: KVStoreHTTPServer

    def handle(self) -> None:
        """Answer requests until the client leaves or the server is stopped."""
        with self.server.connections.open(self.connection):
            super().handle()

    def do_GET(self) -> None:
        """Answer with a value."""
        self._answer("GET")

    def do_PUT(self) -> None:
        """Store a value."""
        self._answer("PUT")

    def do_DELETE(self) -> None:
        """Delete a value."""
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        with self.server.connections.answering(self.connection):
            self._reply(method)

    def _reply(self, method: str) -> None:
        nonce = self.headers.get(NONCE, "")
        status, body = self._done(method, nonce)
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(DIGEST, digest_of_answer(self.server.key, status, nonce, body))
        self.end_headers()
        self.wfile.write(body)

    def _done(self, method: str, nonce: str) -> tuple[int, bytes]:
        length, body_hash = self.headers.get("Content-Length", "0"), self.headers.get(HASH, "")
        expected = _digest_of_request(self.server.key, method, self.path, nonce, length, body_hash)
        is_ours = secret.hmac.compare_digest(
            expected.encode(), self.headers.get(DIGEST, "").encode()
        ) and self.server.is_new(nonce)
        body = self.rfile.read(int(length)) if is_ours else b""
        if not is_ours or hashlib.sha256(body).hexdigest() != body_hash:
            # The client is not authenticated, so the rest of its request is ignored.
            self.close_connection = True
            return FORBIDDEN, b""
        words = self.path.lstrip("/").split("/", 1)
        if len(words) != 2 or not all(words):
            return BAD_REQUEST, b""
        act: Any = {"GET": self._get, "PUT": self._put, "DELETE": self._delete}[method]
        try:
            return act(*words, body) if method == "PUT" else act(*words)
        except Exception as error:
            # The client belongs to the job, so it gets the reason.
            return FAILED, f"{type(error).__name__}: {error}".encode()

    def _get(self, scope: str, key: str) -> tuple[int, bytes]:
        value = self.server.get(scope, key)
        return (NOT_FOUND, b"") if value is None else (OK, value)

    def _put(self, scope: str, key: str, value: bytes) -> tuple[int, bytes]:
        self.server.put(scope, key, value)
        return OK, b""

    def _delete(self, scope: str, key: str) -> tuple[int, bytes]:
        return (OK if self.server.delete(scope, key) else NOT_FOUND), b""

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request, if the server is verbose.

        Args:
            format: The text, with ``%``.
            *args: Its values.
        """
        if self.server.verbose >= 2:
            super().log_message(format, *args)


class KVStoreHTTPServer(ThreadingHTTPServer):
    """The server of the values, by scope and key.

    Args:
        handler: Class that answers requests.
        key: The secret.
        verbose: 2 logs requests.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[KVStoreHandler], key: bytes, verbose: int = 0) -> None:
        self.key = key
        self.verbose = verbose
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self._nonces: set[str] = set()
        self.connections = Connections("the store")
        super().__init__(("0.0.0.0", 0), handler)

    def is_new(self, nonce: str) -> bool:
        """Record a request's number, and return whether it was not used before.

        Args:
            nonce: The number.

        Returns:
            ``True`` if it was not used before.
        """
        with self._lock:
            if not nonce or nonce in self._nonces:
                return False
            self._nonces.add(nonce)
            return True

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value.

        Args:
            scope: Scope of the value.
            key: Key of the value.

        Returns:
            The value, or ``None``.
        """
        with self._lock:
            return self._values.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store a value.

        Args:
            scope: Scope of the value.
            key: Key of the value.
            value: The value.
        """
        with self._lock:
            self._values[scope][key] = value

    def delete(self, scope: str, key: str) -> bool:
        """Delete a value.

        Args:
            scope: Scope of the value.
            key: Key of the value.

        Returns:
            Whether there was one.
        """
        with self._lock:
            return self._values.get(scope, {}).pop(key, None) is not None

    def forget(self, scope: str) -> None:
        """Delete all values of a scope.

        Args:
            scope: The scope.
        """
        with self._lock:
            self._values.pop(scope, None)


class RendezvousHandler(KVStoreHandler):
    """Handles requests to a :class:`RendezvousServer`.

    A member that has finished with a scope deletes its own key there.
    """

    server: RendezvousHTTPServer

    def _delete(self, scope: str, key: str) -> tuple[int, bytes]:
        self.server.finish(scope, key)
        return OK, b""


class RendezvousHTTPServer(KVStoreHTTPServer):
    """The server of scopes with known members. When all members have left a scope, its values are deleted.

    Args:
        handler: Class that answers requests.
        key: The secret.
        verbose: 2 logs requests.
    """

    def __init__(self, handler: type[KVStoreHandler], key: bytes, verbose: int = 0) -> None:
        super().__init__(handler, key, verbose)
        self._sizes: dict[str, int] = {}
        self._left: dict[str, set[str]] = collections.defaultdict(set)

    def init(self, host_alloc_plan: Iterable[SlotInfo]) -> None:
        """Replace the ranks of processes, and delete values for the processes before.

        Args:
            host_alloc_plan: The places.
        """
        sizes: dict[str, int] = collections.Counter()
        places = {}
        for slot in host_alloc_plan:
            for scope in ("global", f"local{slot.cross_rank}", f"cross{slot.local_rank}"):
                sizes[scope] += 1
            places[f"{slot.hostname}:{slot.local_rank}"] = slot.to_response_string().encode()
        with self._lock:
            for scope in self._sizes:
                self._values.pop(scope, None)
            self._sizes = dict(sizes)
            self._left.clear()
            self._values[RANK_AND_SIZE] = places

    def finish(self, scope: str, key: str) -> None:
        """Record that a member has left a scope.

        Args:
            scope: The scope.
            key: The member's key.
        """
        with self._lock:
            self._left[scope].add(key)
            if len(self._left[scope]) >= self._sizes.get(scope, 1):
                self._values.pop(scope, None)
                del self._left[scope]


class _Service:
    """A server that runs in a thread."""

    def __init__(self, key: bytes | None) -> None:
        #: The secret, from the environment or new.
        self.key = key or secret.from_environment() or secret.make_secret_key()
        self.httpd: Any = None
        self._thread: threading.Thread | None = None

    def _run(self, httpd: KVStoreHTTPServer) -> int:
        self.httpd = httpd
        self._thread = in_thread(httpd.serve_forever, (0.05,), name="horovod-http")
        return int(httpd.server_address[1])

    def _end(self) -> None:
        if self._thread is not None:
            self.httpd.shutdown()
            self.httpd.server_close()
            self._thread.join()
            self.httpd.connections.close()
            self._thread = None


class KVStoreServer(_Service):
    """A key-value store.

    Args:
        verbose: 2 logs requests.
        key: The secret, which clients need; by default that of ``_HOROVOD_SECRET_KEY``, or a new one.
    """

    def __init__(self, verbose: int = 0, key: bytes | None = None) -> None:
        super().__init__(key)
        self._verbose = verbose

    def start_server(self, handler_cls: type[KVStoreHandler] = KVStoreHandler) -> int:
        """Start the server.

        Args:
            handler_cls: Class that answers requests.

        Returns:
            The port.
        """
        return self._run(KVStoreHTTPServer(handler_cls, self.key, self._verbose))

    def shutdown_server(self) -> None:
        """Stop accepting requests, and return when the pending ones are answered."""
        self._end()


class RendezvousServer(_Service):
    """A key-value store that contains the ranks of processes.

    Args:
        verbose: 2 logs requests.
        key: See :class:`KVStoreServer`.
    """

    def __init__(self, verbose: int = 0, key: bytes | None = None) -> None:
        super().__init__(key)
        self._verbose = verbose

    def start(self, handler_cls: type[KVStoreHandler] = RendezvousHandler) -> int:
        """Start the server.

        Args:
            handler_cls: Class that answers requests.

        Returns:
            The port.
        """
        return self._run(RendezvousHTTPServer(handler_cls, self.key, self._verbose))

    def init(self, host_alloc_plan: Iterable[SlotInfo]) -> None:
        """Publish the ranks of processes, each at ``rank_and_size/<host>:<local rank>``.

        Args:
            host_alloc_plan: The places.
        """
        self.httpd.init(host_alloc_plan)

    def stop(self) -> None:
        """Stop accepting requests, and return when the pending ones are answered."""
        self._end()
