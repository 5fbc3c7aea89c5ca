"""What `ssh` and its server are to the hosts of `support.hosts`.

    python sshd.py serve ADDRESS            runs commands on the host whose address it is
    python sshd.py run ADDRESS COMMAND      runs a command there, and ends with its exit code

As with the real ones, only TCP joins the two: a command is neither a child of the caller nor in its session. It ends
by itself or notices the end of its input, and on a host that is cut off it hears nothing.
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
    """Runs commands until its input ends. Writes a line when it is ready."""
    # Children that end are removed by the kernel.
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
    """Input comes by `connection`, which gets the exit code; standard output and errors get connections of their own."""
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
    """Returns the exit code, 255 if the connection is lost."""
    connection = socket.create_connection((address, _PORT))
    (port,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    # The server accepts them in the order in which they were made.
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
    # The thread that waits for input does not end.
    sys.stdout.flush()
    os._exit(code)
