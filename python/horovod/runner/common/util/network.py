"""Services of a launcher, which answer requests of clients that know the job's secret.

A request is a pickled object. Nothing of a peer is unpickled before the peer has proved that it knows the secret. Each
message has a digest over a challenge of either side and the service's name. A message therefore cannot be repeated on
another connection, to another service or by the other side.
"""

from __future__ import annotations

import codecs
import itertools
import os
import pickle
import socket
import socketserver
import struct
import threading
from collections.abc import Iterable
from io import BufferedIOBase
from typing import Any, TextIO

from horovod.runner.common.util import secret
from horovod.runner.util.connections import Connections
from horovod.runner.util.network import get_local_host_intfs
from horovod.runner.util.network import get_local_intfs as get_local_intfs
from horovod.runner.util.peers import keep_alive, notice_lost_hosts
from horovod.runner.util.streams import Pipe
from horovod.runner.util.threads import execute_function_multithreaded, in_thread

try:
    import cloudpickle
except ImportError:
    cloudpickle = pickle

_CHALLENGE_BYTES = 16
_LENGTH = struct.Struct("!Q")
#: Seconds after which a client that has not authenticated its request is disconnected.
_GREETING_TIME = 20
#: Seconds between checks for a shutdown while a stream has no text.
_SHUTDOWN_POLL_SECONDS = 0.5

#: For each interface, the addresses and ports of a service.
Addresses = dict[str, list[tuple[str, int]]]


class PingRequest:
    """A request for the name of the service."""


class NoValidAddressesFound(Exception):  # noqa: N818 - the documented name
    """A service answers at none of its addresses."""


class PingResponse:
    """The name of the service that answers.

    Args:
        service_name: Name of the service.
        source_address: Address of the client as the service sees it.
    """

    def __init__(self, service_name: str, source_address: str) -> None:
        self.service_name = service_name
        self.source_address = source_address


class AckResponse:
    """The answer that the request is done."""


class AckStreamResponse(AckResponse):
    """The answer that the request is done, and that a stream of text follows. A handler returns both as a pair."""


class _Failure:
    """The exception that a handler of the service raised."""

    def __init__(self, text: str) -> None:
        self.text = text


class Wire:
    """Sends and receives objects on a stream, each after its length.

    Object and length have a digest each, so that an unauthenticated peer cannot make the reader wait for gigabytes.

    Args:
        key: The job's secret.
        challenge: First bytes of what digests are computed over.
    """

    def __init__(self, key: bytes, challenge: bytes = b"") -> None:
        self._key = key
        self._challenge = challenge

    def _digest(self, what: bytes, message: bytes) -> bytes:
        return secret.compute_digest(self._key, self._challenge + what + message)

    def write(self, obj: Any, wfile: BufferedIOBase, kind: bytes = b"") -> None:
        """Send an object.

        Args:
            obj: The object.
            wfile: The stream.
            kind: The reader expects the same kind: a request is not accepted as an answer.
        """
        self.write_pickled(cloudpickle.dumps(obj), wfile, kind)

    def write_pickled(self, message: bytes, wfile: BufferedIOBase, kind: bytes = b"") -> None:
        """Send an object that is pickled already.

        Args:
            message: The pickle.
            wfile: The stream.
            kind: See :meth:`write`.
        """
        length = _LENGTH.pack(len(message))
        head = self._digest(kind + b" length ", length) + length
        wfile.write(head + self._digest(kind + b" message ", message) + message)
        wfile.flush()

    def read(self, rfile: BufferedIOBase, kind: bytes = b"") -> Any:
        """Receive an object.

        Args:
            rfile: The stream.
            kind: See :meth:`write`.

        Returns:
            The object.

        Raises:
            EOFError: The peer is gone.
            RuntimeError: The peer does not know the secret.
        """
        return pickle.loads(self.read_authenticated(rfile, kind))

    def read_authenticated(self, rfile: BufferedIOBase, kind: bytes = b"") -> bytes:
        """Receive an object without unpickling it.

        Args:
            rfile: The stream.
            kind: See :meth:`write`.

        Returns:
            The pickle.

        Raises:
            EOFError: The peer is gone.
            RuntimeError: The peer does not know the secret.
        """
        (length,) = _LENGTH.unpack(self._read_checked(rfile, _LENGTH.size, kind + b" length "))
        return self._read_checked(rfile, length, kind + b" message ")

    def _read_checked(self, rfile: BufferedIOBase, count: int, what: bytes) -> bytes:
        """Read `count` bytes, and check the digest before them."""
        digest = _exactly(rfile, secret.DIGEST_LENGTH_BYTES)
        message = _exactly(rfile, count)
        if not secret.hmac.compare_digest(self._digest(what, message), digest):
            raise RuntimeError("Security error: digest did not match the message")
        return message


def _exactly(rfile: BufferedIOBase, count: int) -> bytes:
    data = rfile.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _piece(number: int) -> bytes:
    """Return the marker of a piece of a stream, by which reordered pieces are detected."""
    return b"text %d" % number


def _receive_text(wire: Wire, rfile: BufferedIOBase, stream: TextIO | None) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for number in itertools.count():
        piece = wire.read_authenticated(rfile, _piece(number))
        if stream is not None:
            stream.write(decoder.decode(piece, final=not piece))
            stream.flush()
        if not piece:
            return


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


class BasicService:
    """Answers requests until :meth:`shutdown`. Subclasses extend `_handle`.

    Args:
        service_name: Name of the service. Clients compare it, because another service may have got the address
            meanwhile.
        key: The job's secret.
        nics: Interfaces at which the service is reached; all by default.
    """

    def __init__(self, service_name: str, key: bytes, nics: Iterable[str] | None = None) -> None:
        service = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                service._talk(self)

        self._service_name = service_name
        self._key = key
        self._nics = set(nics or ())
        self._connections = Connections(service_name)
        self._server = _Server(("0.0.0.0", 0), Handler)
        self._port = self._server.server_address[1]
        self._thread = in_thread(self._server.serve_forever, (0.05,), name=service_name)

    def _talk(self, connection: socketserver.StreamRequestHandler) -> None:
        challenge = os.urandom(_CHALLENGE_BYTES)
        with self._connections.open(connection.connection):
            try:
                # While the service waits for text to stream, it reads nothing. The lost host of a client then shows at
                # the next write, instead of once the socket's buffer is full.
                keep_alive(connection.connection)
                connection.connection.settimeout(_GREETING_TIME)
                connection.wfile.write(challenge)
                theirs = _exactly(connection.rfile, _CHALLENGE_BYTES)
                wire = Wire(self._key, challenge + theirs + self._service_name.encode())
                message = wire.read_authenticated(connection.rfile, b"request")
                connection.connection.settimeout(None)
            except Exception:
                # The client could not authenticate itself or has disconnected; nothing that it sent was unpickled.
                return
            with self._connections.answering(connection.connection):
                self._reply(connection, wire, message)

    def _reply(self, connection: socketserver.StreamRequestHandler, wire: Wire, message: bytes) -> None:
        text: Pipe | None = None
        try:
            answer = self._handle(pickle.loads(message), connection.client_address)
            if isinstance(answer, tuple) and isinstance(answer[0], AckStreamResponse):
                answer, text = answer
            pickled = cloudpickle.dumps(answer)
        except Exception as error:
            pickled = cloudpickle.dumps(_Failure(f"{type(error).__name__}: {error}"))
        try:
            wire.write_pickled(pickled, connection.wfile, b"answer")
            if text is not None:
                self._stream(text, connection.wfile, wire)
        except OSError:
            # The client has disconnected or timed out. Close the stream, so that its writer does not block.
            while text is not None and (text.read() is not None):
                continue

    def _stream(self, text: Pipe, wfile: BufferedIOBase, wire: Wire) -> None:
        """Send text in pieces until it ends or the service is shut down. An empty piece marks the end."""
        for number in itertools.count():
            piece = None
            while piece is None and not text.at_end() and not self._connections.closing:
                piece = text.read(timeout=_SHUTDOWN_POLL_SECONDS)
            wire.write_pickled((piece or "").encode(), wfile, _piece(number))
            if not piece:
                return

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        """Return the answer to a request.

        Raises:
            NotImplementedError: There is none.
        """
        if isinstance(req, PingRequest):
            return PingResponse(self._service_name, client_address[0])
        raise NotImplementedError(f"{self._service_name} does not support {type(req).__name__}")

    def addresses(self) -> Addresses:
        """Return the addresses for clients.

        Returns:
            Addresses and ports, by interface.
        """
        found = get_local_host_intfs()
        return {name: [(ip, self._port)] for name, ip in found.items() if not self._nics or name in self._nics}

    def get_port(self) -> int:
        """Return the port.

        Returns:
            The port, the same at all interfaces.
        """
        return self._port

    def _wake(self) -> None:
        """End the waits of handlers because of the shutdown. Services whose handlers wait extend it."""

    def shutdown(self) -> None:
        """Stop accepting requests, and return when the pending ones are answered."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._connections.mark_closing()
        self._wake()
        self._connections.close()


class BasicClient:
    """A client of a service.

    Args:
        service_name: Name of the service.
        addresses: Addresses to try, by interface.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: Whether to leave out addresses that are reached from an interface of another name.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: Number of attempts for each address.

    Raises:
        NoValidAddressesFound: The service answers at none of the addresses.
    """

    def __init__(
        self,
        service_name: str,
        addresses: Addresses,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        self._service_name = service_name
        self._key = key
        self._match_intf = match_intf
        self._probe_timeout = probe_timeout
        self._attempts = attempts
        self._addresses = self._probe(addresses)
        if not self._addresses:
            raise NoValidAddressesFound(
                f"{service_name} was not found at any of the addresses {addresses}: "
                "is there a firewall between the hosts?"
            )

    def addresses(self) -> Addresses:
        """Return the addresses at which the service answers.

        Returns:
            Addresses and ports, by interface.
        """
        return self._addresses

    def local_address(self) -> str:
        """Return this host's address as the service sees it.

        Returns:
            The address.
        """
        address = next(iter(self._addresses.values()))[0]
        return str(self._send_request(address, PingRequest(), self._probe_timeout).source_address)

    def _probe(self, addresses: Addresses) -> Addresses:
        # The loopback comes last: addresses that other hosts can reach are preferred, and determine `local_address`.
        names = sorted(addresses, key=lambda name: name == "lo")
        rows = [(name, (ip, port)) for name in names for ip, port in addresses[name]]
        answers = execute_function_multithreaded(self._answers, rows)
        found: Addresses = {}
        for index, (name, address) in enumerate(rows):
            if answers[index]:
                found.setdefault(name, []).append(address)
        return found

    def _answers(self, name: str, address: tuple[str, int]) -> bool:
        for _ in range(self._attempts):
            try:
                answer = self._send_request(address, PingRequest(), self._probe_timeout)
            except (OSError, EOFError, RuntimeError):
                continue
            if not isinstance(answer, PingResponse) or answer.service_name != self._service_name:
                return False
            return not self._match_intf or get_local_host_intfs().get(name) == answer.source_address
        return False

    def _send_request(
        self, address: tuple[str, int], request: Any, timeout: float | None, stream: TextIO | None = None
    ) -> Any:
        with socket.create_connection(address, timeout=self._probe_timeout) as connection:
            # The answer may take long, but the connection must notice a host that has failed.
            notice_lost_hosts(connection)
            with connection.makefile("rwb") as file:
                challenge = os.urandom(_CHALLENGE_BYTES)
                wire = Wire(self._key, _exactly(file, _CHALLENGE_BYTES) + challenge + self._service_name.encode())
                file.write(challenge)
                connection.settimeout(timeout)
                wire.write(request, file, b"request")
                answer = wire.read(file, b"answer")
                if isinstance(answer, AckStreamResponse):
                    _receive_text(wire, file, stream)
                return answer

    def _send(self, req: Any, stream: TextIO | None = None, timeout: float | None = None) -> Any:
        """Send a request, and return the answer.

        Args:
            req: The request.
            stream: Gets the text that follows the answer, if there is any.
            timeout: Longest wait for the answer, in seconds.

        Raises:
            RuntimeError: The service could not do it.
            OSError, EOFError: It is gone.
        """
        address = next(iter(self._addresses.values()))[0]
        answer = self._send_request(address, req, timeout, stream)
        if isinstance(answer, _Failure):
            raise RuntimeError(f"{self._service_name}: {answer.text}")
        return answer


class Registrations:
    """The registrations of a job's members, by their numbers. Callers can wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[Any, Any] = {}
        self._closed = False

    def __getitem__(self, number: Any) -> Any:
        with self._changed:
            return self._values[number]

    def __len__(self) -> int:
        with self._changed:
            return len(self._values)

    def items(self) -> list[tuple[Any, Any]]:
        """Return all registrations.

        Returns:
            Pairs of a number and what was registered, in order.
        """
        with self._changed:
            return sorted(self._values.items())

    def put(self, number: Any, value: Any) -> None:
        """Register a member.

        Args:
            number: Number of the member.
            value: The registered value.
        """
        with self._changed:
            self._values[number] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, as if their time were over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, numbers: Iterable[Any], seconds: float | None, what: str) -> None:
        """Wait until all these members have registered.

        Args:
            numbers: Numbers of the members.
            seconds: Longest wait; ``None`` means no limit.
            what: Description of the wait, for the error.

        Raises:
            TimeoutError: The wait took longer; names the missing members.
        """
        wanted = set(numbers)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or wanted <= set(self._values), seconds)
            missing = sorted(wanted - set(self._values))
            if missing:
                ended = "the service was shut down while" if self._closed else f"timed out after {seconds:.0f} s"
                raise TimeoutError(f"{ended} waiting for {what}: {missing} are missing")
