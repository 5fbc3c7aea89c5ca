"""Commands that can be ended with all processes that they have started."""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from horovod.runner.util.streams import Pipe

#: Time between SIGTERM and SIGKILL, in seconds.
GRACEFUL_TERMINATION_TIME_S = 5

_POLL_SECONDS = 0.05

#: Program of a watcher process: waits for the end of a pipe, then ends a process group. It ends with the group, whose
#: number other processes may get then.
_WATCH = """
import os, signal, sys, time
pipe, group, grace = map(int, sys.argv[1:])
os.read(pipe, 1)
try:
    os.killpg(group, signal.SIGTERM)
    end = time.monotonic() + grace
    while time.monotonic() < end:
        time.sleep(0.05)
        os.killpg(group, 0)
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def terminate_executor_shell_and_children(pid: int) -> None:
    """Send SIGTERM to a process group, and SIGKILL if it does not end in time.

    Args:
        pid: Number of the group.
    """
    _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    while time.monotonic() < deadline and _exists(pid):
        time.sleep(_POLL_SECONDS)
    _signal(pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        # The process is gone already.
        return


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def prefix_connection(
    src_connection: Any,
    dst_stream: TextIO | Pipe | _WatchedStream,
    prefix: str,
    index: int | None,
    prefix_output_with_timestamp: bool,
) -> None:
    """Copy text line by line until it ends, each line with the prefix ``[index]<prefix>:``.

    Args:
        src_connection: Source with ``fileno()``; bytes of UTF-8.
        dst_stream: Receives text, and is flushed after each line.
        prefix: Name of the stream.
        index: Number of the process; without it lines are unchanged.
        prefix_output_with_timestamp: Whether lines begin with the time.
    """

    def head() -> str:
        if index is None:
            return ""
        now = time.strftime("%a %b %d %H:%M:%S %Y") if prefix_output_with_timestamp else ""
        return f"{now}[{index}]<{prefix}>:"

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pending = ""
    while True:
        try:
            data = os.read(src_connection.fileno(), 65536)
        except OSError:
            data = b""
        pending += decoder.decode(data, final=not data)
        # A carriage return ends a line as well: progress bars write no newline.
        *lines, pending = re.split(r"(?<=[\r\n])", pending)
        if not data and pending:
            lines, pending = [*lines, pending], ""
        for line in lines:
            if line:
                dst_stream.write(head() + line)
                dst_stream.flush()
        if not data:
            return


class _WatchedStream:
    """Writes text to another stream, and records the time of the last write."""

    def __init__(self, target: TextIO | Pipe) -> None:
        self._target = target
        self.last_progress = time.monotonic()

    def write(self, text: str) -> None:
        self._target.write(text)
        self.last_progress = time.monotonic()

    def flush(self) -> None:
        self._target.flush()
        self.last_progress = time.monotonic()


def execute(
    command: str | list[str],
    env: dict[str, str] | None = None,
    stdout: TextIO | Pipe | None = None,
    stderr: TextIO | Pipe | None = None,
    index: int | None = None,
    events: Iterable[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run a command in a process group of its own, which ends when an event is set or this process ends.

    Args:
        command: Command of the shell, or words.
        env: Its whole environment; by default this process's.
        stdout: Receives its output; by default this process's.
        stderr: Receives its errors; by default this process's.
        index: See :func:`prefix_connection`.
        events: Events, each of which ends the command.
        prefix_output_with_timestamp: See :func:`prefix_connection`.

    Returns:
        The exit code; 128 plus the signal if one ended it.
    """
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    # A watcher process reads from this pipe, and gets its end when this process ends, for whatever reason.
    read_end, write_end = os.pipe()
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH, str(read_end), str(process.pid), str(GRACEFUL_TERMINATION_TIME_S)],
        pass_fds=[read_end],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_end)

    def copy(source: IO[bytes], target: _WatchedStream, name: str) -> None:
        with source:
            prefix_connection(source, target, name, index, prefix_output_with_timestamp)

    targets = [_WatchedStream(stdout or sys.stdout), _WatchedStream(stderr or sys.stderr)]
    copiers = [
        threading.Thread(target=copy, args=(source, target, name), daemon=True)
        for source, target, name in zip((process.stdout, process.stderr), targets, ("stdout", "stderr"), strict=True)
    ]
    for copier in copiers:
        copier.start()
    events = list(events or [])
    try:
        while process.poll() is None:
            if any(event.is_set() for event in events):
                _end(process)
            time.sleep(_POLL_SECONDS)
    finally:
        watcher.kill()
        watcher.wait()
        os.close(write_end)
        if process.poll() is None:
            _end(process)
        # Ends the background processes that the command has started.
        _signal(process.pid, signal.SIGKILL)
    ended = time.monotonic()
    for copier, target in zip(copiers, targets, strict=True):
        # A slow reader gets all output. A process that has left the group may keep the pipe open without writing.
        while copier.is_alive() and time.monotonic() < max(ended, target.last_progress) + GRACEFUL_TERMINATION_TIME_S:
            copier.join(_POLL_SECONDS)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end(process: subprocess.Popen) -> None:
    _signal(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACEFUL_TERMINATION_TIME_S)
    except subprocess.TimeoutExpired:
        _signal(process.pid, signal.SIGKILL)
        process.wait()
