"""Ranks that are forked from server processes that have already imported a framework.

Imports take most of the time of a short job: 3 to 7 s of processor time for each rank. Each rank of a job has a server
of its own, so that ranks differ where separate processes differ: in memory addresses and in the iteration order of
sets.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

#: Variables that may differ between the ranks of a server: they are set after the fork, because no import reads them.
#: Any other variable may be read while the framework is imported, so its value selects the server.
_OF_THE_JOB = (
    "SMD_",
    "SMP_",
    "SM_",
    "HOROVOD_",
    "MASTER_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "PYTEST_",
    "CUDA_",
    "TF_NUM_",
    "TF_CPP_",
)
#: Most servers that may be idle at a time; each takes half a gigabyte. The least recently used server ends for a new
#: one.
_MOST_SERVERS = 12
_IMPORT_SECONDS = 120.0
#: Factor for all time limits, which are chosen for an idle machine: the option `--patience` of pytest.
patience = 1.0
_MAIN = Path(__file__).with_name("fork_main.py")


@dataclass(frozen=True)
class Forked:
    """A launcher: `Forked("torch")` forks ranks that have imported `torch`, and sets the variables that `torchrun`
    would set. Use `Forked("transformers")` for ranks that make models of Hugging Face.

    It is for bodies that neither set variables that the framework reads on import nor need `smdrun` around them.
    """

    module: str


class ForkedProcess:
    """A rank that a server has forked, with the methods of `subprocess.Popen` that a job uses."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        #: As in `subprocess`: None while the process runs, negative if a signal ended it.
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits up to `timeout` seconds and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return self.returncode


class _Server:
    """A process that has imported a framework and forks ranks."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the server lives)
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_MAIN), str(theirs.fileno()), module],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._codes: dict[int, int] = {}

    def start(self, folder: Path, output: Path, environment: Mapping[str, str]) -> ForkedProcess:
        """Forks a rank of the job in `folder`."""
        try:
            self._connection.send((str(folder), str(output), os.getcwd(), dict(environment)))
            deadline = time.monotonic() + _IMPORT_SECONDS * patience
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                kind, pid, *code = self._connection.recv()
                if kind == "started":
                    return ForkedProcess(self, pid)
                self._codes[pid] = code[0]
        except (EOFError, OSError):
            pass
        self.end()
        self._errors.seek(0)
        raise RuntimeError(f"no rank could be forked:\n{self._errors.read().decode(errors='replace')}")

    def has_ended(self) -> bool:
        """Whether the server can no longer fork ranks."""
        return self._connection.closed or self._process.poll() is not None

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a rank, or None while it runs."""
        with contextlib.suppress(EOFError, OSError):
            while pid not in self._codes and self._connection.poll():
                _, ended, code = self._connection.recv()
                self._codes[ended] = code
        if pid not in self._codes and self._process.poll() is not None:
            return -signal.SIGKILL  # ranks do not outlive their server
        return self._codes.pop(pid, None)

    def end(self) -> None:
        """Ends the server, which then kills the ranks that it has forked."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()


_servers: dict[tuple, _Server] = {}


@atexit.register
def _end_servers() -> None:
    for server in _servers.values():
        server.end()


def fork_ranks(
    module: str, folder: Path, outputs: Sequence[Path], environments: Sequence[Mapping[str, str]]
) -> list[ForkedProcess]:
    """Forks the ranks of the job in `folder`: each runs `rank_main` with its variables and writes to its output."""
    # Starts missing servers first, so that all of them import at the same time.
    servers = [_server(module, rank, environment) for rank, environment in enumerate(environments)]
    try:
        return [
            server.start(folder, output, environment)
            for server, output, environment in zip(servers, outputs, environments, strict=True)
        ]
    except BaseException:
        # The caller does not know of the ranks that are already forked; they end with their servers.
        for server in servers:
            server.end()
        raise


def _server(module: str, rank: int, environment: Mapping[str, str]) -> _Server:
    shared = {name: value for name, value in environment.items() if not name.startswith(_OF_THE_JOB)}
    shared["TF_CPP_MIN_LOG_LEVEL"] = "2"
    # Frameworks import pyarrow where it is installed, and its allocator starts a thread.
    shared["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    key = (os.getpid(), module, rank, *sorted(shared.items()))
    server = _servers.pop(key, None)
    if server is None or server.has_ended():
        server = _Server(module, shared)
    _servers[key] = server
    while len(_servers) > _MOST_SERVERS:
        _servers.pop(next(iter(_servers))).end()
    return server
