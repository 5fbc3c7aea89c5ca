"""A server of connections whose two ends prove that they know one secret before anything is unpickled."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from horovod.runner.common.util import secret

#: A peer that has not proved the secret within this many seconds is disconnected.
GREETING_TIME_S = 10
#: Seconds without an answer after which the system asks whether the peer's host is still there, and between questions.
_KEEPALIVE_S = 5
#: Questions without an answer after which the connection counts as lost.
_KEEPALIVES = 3


class PeerServer:
    """Serves each authenticated connection in a thread of its own.

    Args:
        handle: Called with each connection; the connection is closed when it returns.
        name: Name of the thread that accepts connections.
        key: The secret; a new one by default.
    """

    def __init__(self, handle: Callable[[Connection], None], name: str, key: bytes | None = None) -> None:
        self.key = key or secret.make_secret_key()
        self._handle = handle
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._peers: dict[threading.Thread, socket.socket] = {}
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._server = threading.Thread(target=self._serve, name=name, daemon=True)
        self._server.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                # The socket is closed, the peer has left, or the process is out of file descriptors for the moment.
                self._closed.wait(0.1)
                continue
            thread = threading.Thread(target=self._talk, args=(peer,), daemon=True)
            with self._lock:
                self._peers[thread] = peer
            thread.start()

    def _talk(self, peer: socket.socket) -> None:
        try:
            with peer, Connection(os.dup(peer.fileno())) as connection:
                if self._is_ours(peer, connection):
                    self._handle(connection)
        finally:
            with self._lock:
                del self._peers[threading.current_thread()]

    def _is_ours(self, peer: socket.socket, connection: Connection) -> bool:
        try:
            notice_lost_hosts(peer)
            limit_waits(peer, GREETING_TIME_S)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            limit_waits(peer, 0)
        except Exception:
            # The client did not prove the secret. Nothing that it sent was unpickled.
            return False
        return True

    def close(self) -> None:
        """Accept no more connections, and end those that are open."""
        self._closed.set()
        _end(self._listener)
        self._server.join()
        self._listener.close()
        with self._lock:
            peers = dict(self._peers)
            for peer in peers.values():
                _end(peer)
        for thread in peers:
            thread.join()


def connect(address: str, port: int, key: bytes) -> tuple[Connection, str]:
    """Connect to a :class:`PeerServer`.

    Args:
        address: Its host.
        port: Its port.
        key: The secret.

    Returns:
        The connection, and the address of this host from which it comes.

    Raises:
        multiprocessing.AuthenticationError: The server does not know the secret.
        OSError: There is no server.
    """
    with socket.create_connection((address, port), GREETING_TIME_S) as peer:
        # Reads of a `Connection` need a blocking socket.
        peer.settimeout(None)
        notice_lost_hosts(peer)
        limit_waits(peer, GREETING_TIME_S)
        connection = Connection(os.dup(peer.fileno()))
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        except BaseException:
            connection.close()
            raise
        limit_waits(peer, 0)
        return connection, peer.getsockname()[0]


def notice_lost_hosts(peer: socket.socket) -> None:
    """Let reads of a connection fail when the peer's host does not answer any more.

    Keepalive asks the host while the connection is idle. While sent data is not acknowledged, no questions are sent
    (tcp(7)), and the user timeout limits the wait.

    Args:
        peer: The connection's socket.
    """
    keep_alive(peer)
    limit_ms = 1000 * _KEEPALIVE_S * (1 + _KEEPALIVES)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def keep_alive(peer: socket.socket) -> None:
    """Let an idle connection fail when the peer's host does not answer any more.

    The user timeout of :func:`notice_lost_hosts` would also end a connection whose peer is alive and does not read for
    that long, such as a paused launcher that receives the output of a command. This function sets keepalive only. If
    the host vanishes while sent data is not acknowledged, TCP's own limit applies, about 15 minutes.

    Args:
        peer: The connection's socket.
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def limit_waits(peer: socket.socket, seconds: int) -> None:
    """Limit the time of one read. Unlike ``settimeout`` this also holds for a ``Connection`` of the socket.

    Args:
        peer: The socket.
        seconds: The limit; 0 means none.
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))


def _end(one: socket.socket) -> None:
    """Wake threads that wait at a socket."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
