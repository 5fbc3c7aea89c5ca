"""The launchers that start ranks: their command lines, their variables, and whether they are installed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import shutil
import socket
import sys
import tempfile
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from support.forks import Forked
from support.hosts import ByHand, Hosts, Torchrun

LAUNCHERS = ("smdrun", "torchrun", "mpirun", "slurm", "raw")
#: Launchers without a command: the harness starts each rank with its variables.
COMMANDLESS = ("slurm", "raw")


#: Ports of `free_port`: a block for each worker of pytest-xdist. They lie below the ephemeral ports of Linux. Another
#: process of the job could be given an ephemeral port before the rank listens on it.
_FIRST_PORT, _BLOCK_PORTS, _NUM_BLOCKS = 12000, 1000, 16
#: Concurrent runs of the tests start at different ports.
_ports = itertools.count(os.getpid() * 37)

#: Types of the argument `launcher`.
Launcher = str | Forked | Hosts | ByHand | Torchrun


def missing(launcher: str) -> str | None:
    """Returns the reason why `launcher` cannot be used on this machine, or None if it can."""
    if launcher == "torchrun" and importlib.util.find_spec("torch") is None:
        return "torchrun comes with torch, which is not installed"
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        return "mpirun is not installed (package openmpi-bin)"
    if launcher not in LAUNCHERS:
        raise ValueError(f"`{launcher}` is not a launcher: expected one of {LAUNCHERS}")
    return None


def needs(launcher: str) -> pytest.MarkDecorator:
    """Skips a test where `launcher` is missing."""
    reason = missing(launcher)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def more(*values: Any, **options: Any) -> ParameterSet:
    """A case of `pytest.mark.parametrize` that `make test-more` runs and `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.more, **options)


def command(launcher: str | Hosts, n: int, options: list[str]) -> list[str]:
    """Returns the command that starts `n` ranks; the Python file is appended to it. Not for those in `COMMANDLESS`."""
    if isinstance(launcher, Hosts):
        return launcher.command(n, options)
    if launcher == "smdrun":
        return [sys.executable, "-m", "smdistributed", "-n", str(n), *options]
    if launcher == "torchrun":
        port = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), *port, *options]
    if launcher == "mpirun":
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        # Two jobs of mpirun must not share a session directory: while one removes it, the other's `mkdir` fails.
        sessions = ["--mca", "orte_tmpdir_base", tempfile.mkdtemp(prefix="smd-mpirun-", dir=_session_folders())]
        place = ["--oversubscribe", "--bind-to", "none", "-n", str(n)]
        # Open MPI 4 does not start without a way to start daemons on other hosts, unless it is told that there are none.
        place += [] if shutil.which("ssh") else ["--mca", "plm", "isolated"]
        return ["mpirun", *as_root, *sessions, *place, *options, sys.executable]
    raise ValueError(f"`{launcher}` has no command")


@functools.cache
def _session_folders() -> str:
    folder = tempfile.mkdtemp(prefix="smd-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environments(launcher: str, n: int) -> list[dict[str, str]]:
    """Returns the variables of each rank for a launcher in `COMMANDLESS`."""
    port = free_port()
    make = {"raw": raw_environment, "slurm": _slurm_environment}[launcher]
    return [make(rank, n, port) for rank in range(n)]


def _slurm_environment(rank: int, n: int, unique: int) -> dict[str, str]:
    """The variables that `srun --ntasks=n` sets for task `rank` of a step on this host."""
    # `SLURM_NTASKS` is the task count of the batch script; it differs from the step's, which counts.
    return {
        "SLURM_JOB_ID": str(unique),
        "SLURM_NTASKS": str(n + 1),
        "SLURM_JOB_NODELIST": socket.gethostname(),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(n),
        "SLURM_STEP_TASKS_PER_NODE": str(n),
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def raw_environment(rank: int, n: int, port: int) -> dict[str, str]:
    """The variables that a user would set by hand to start rank `rank`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def marks_of_a_launcher() -> dict[str, str]:
    """Returns the variables of this process that launchers set: ranks, addresses, and settings of jobs."""
    marks = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "SM_", "SMD_", "SMP_", "HOROVOD_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    keep = {"SMD_CACHE_DIR"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in keep and (name in names or name.startswith(marks))
    }


def clean_environment() -> dict[str, str]:
    """Returns the variables of this process without those of a launcher that may have started it."""
    marks = marks_of_a_launcher()
    return {name: value for name, value in os.environ.items() if name not in marks}


def free_port() -> int:
    """Returns a TCP port that is free now and that no other test uses before a rank listens on it."""
    _, _, worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").partition("gw")
    first = _FIRST_PORT + int(worker) % _NUM_BLOCKS * _BLOCK_PORTS
    for _ in range(_BLOCK_PORTS):
        port = first + next(_ports) % _BLOCK_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of the ports from {first} to {first + _BLOCK_PORTS - 1} is free")
