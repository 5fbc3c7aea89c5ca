"""A replacement for `ssh` and its server on the hosts of `support.hosts`.

    python sshd.py serve ADDRESS            runs commands on the host with this address
    python sshd.py run ADDRESS COMMAND      runs a command there and exits with its exit code

As with the real ones, only TCP connects the two sides: a command is neither a child of the caller nor in its session. A
command ends by itself or when its input ends. On a host that is cut off, it does not learn that the caller ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading

_PORT = 22
_LENGTH = struct.Struct("!I")
_PIECE = 1 << 16


def serve(address: str) -> None:
    """Runs commands until standard input ends. Prints a line when it is ready."""
    # Lets the kernel reap children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server((address, _PORT), backlog=16) as server:
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                _run_for(connection, address)
                os._exit(0)
            connection.close()


def _run_for(connection: socket.socket, address: str) -> None:
    """Runs one command. `connection` carries its input and returns its exit code; standard output and standard error
    have connections of their own.
    """
    with socket.create_server((address, 0)) as server:
        connection.sendall(_LENGTH.pack(server.getsockname()[1]))
        output, _ = server.accept()
        errors, _ = server.accept()
    command = _receive(connection, *_LENGTH.unpack(_receive(connection, _LENGTH.size))).decode()
    done = subprocess.run(["sh", "-c", command], stdin=connection, stdout=output, stderr=errors, check=False)
    output.close()
    errors.close()
    with contextlib.suppress(OSError):
        connection.sendall(bytes([done.returncode % 256]))


def run(address: str, command: str) -> int:
    """Runs a command on a host; returns its exit code, or 255 if the connection is lost."""
    connection = socket.create_connection((address, _PORT))
    (port,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    # The server accepts connections in the order in which they are made.
    output, errors = socket.create_connection((address, port)), socket.create_connection((address, port))
    text = command.encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)

    def send_input() -> None:
        with contextlib.suppress(OSError):
            while piece := os.read(0, _PIECE):
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=send_input, daemon=True).start()
    copies = [threading.Thread(target=_copy, args=pair) for pair in ((output, 1), (errors, 2))]
    for thread in copies:
        thread.start()
    for thread in copies:
        thread.join()
    try:
        return _receive(connection, 1)[0]
    except OSError:
        return 255


def _copy(source: socket.socket, to: int) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            while piece:
                piece = piece[os.write(to, piece) :]


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("the other side has closed the connection")
        received += piece
    return received


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
        sys.exit()
    code = run(sys.argv[2], sys.argv[3])
    # The thread that reads standard input may block for ever.
    sys.stdout.flush()
    os._exit(code)
