"""Jobs under ``jsrun``, the launcher of IBM's LSF."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from horovod.runner.common.util import hosts as hosts_util
from horovod.runner.common.util import safe_shell_exec
from horovod.runner.mpi_run import _MISSING_TEXT, _get_mpi_implementation_flags
from horovod.runner.util import lsf


def is_jsrun_installed() -> bool:
    """Return whether there is a ``jsrun``.

    Returns:
        ``True`` if there is one.
    """
    return shutil.which("jsrun") is not None


def js_run(
    settings: Any,
    nics: Any,
    env: dict[str, str],
    command: Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Start a job. From the command line, this process becomes ``jsrun``.

    Args:
        settings: Settings of the job.
        nics: Ignored: LSF knows the hosts.
        env: Environment of the processes.
        command: The command that each process runs.
        stdout: Receives ``jsrun``'s output.
        stderr: Receives ``jsrun``'s errors.

    Raises:
        Exception: There is no ``jsrun``, or no MPI.
        RuntimeError: ``jsrun`` failed.
    """
    if not is_jsrun_installed():
        raise Exception(
            "horovod does not find the jsrun command.\n\nIt is part of LSF's clusters: elsewhere, leave out --jsrun."
        )
    flags, _, _ = _get_mpi_implementation_flags(settings.tcp_flag, env=env)
    if flags is None:
        raise Exception(_MISSING_TEXT)
    mpi_flags = " ".join([*flags, *([settings.extra_mpi_args] if settings.extra_mpi_args else [])])
    folder = shlex.quote(settings.output_filename) if settings.output_filename else None
    words = [
        "jsrun",
        settings.binding_args or f"--erf_input {generate_jsrun_rankfile(settings)}",
        *([f"--stdio_stderr {folder} --stdio_stdout {folder}"] if folder else []),
        *([f"--smpiargs {shlex.quote(mpi_flags)}"] if mpi_flags else []),
        *map(shlex.quote, command),
    ]
    line = " ".join(words)
    if settings.verbose >= 2:
        print(line)
    sys.stdout.flush()
    sys.stderr.flush()
    if settings.run_func_mode:
        code = safe_shell_exec.execute(line, env=env, stdout=stdout, stderr=stderr)
        if code != 0:
            raise RuntimeError(f"jsrun failed with exit code {code}")
        return
    os.execve("/bin/sh", ["/bin/sh", "-c", line], env)


def generate_jsrun_rankfile(settings: Any, path: str | None = None) -> str:
    """Write the assignment of processes to processors.

    The processes of a host share its processors and its GPUs evenly.

    Args:
        settings: Settings of the job.
        path: The file; by default a new one.

    Returns:
        Name of the file.

    Raises:
        ValueError: A host has more slots than GPUs, or the hosts have too few slots.
    """
    gpus = lsf.LSFUtils.get_num_gpus()
    places = list(_places(hosts_util.parse_hosts(settings.hosts), gpus, settings.num_proc))
    if len(places) < settings.num_proc:
        raise ValueError(f"Not enough slots on the hosts to fulfill the {settings.num_proc} requested.")
    processors = lsf.LSFUtils.get_num_cores() * lsf.LSFUtils.get_num_threads() // gpus
    lines = ["overlapping_rs: allow", "cpu_index_using: logical"]
    for rank, (host, slot) in enumerate(places):
        # The processes of each host form a paragraph of the file.
        lines += [""] if slot == 0 else []
        first = slot * processors
        cpus = f"{{{first}-{first + processors - 1}}}"
        lines.append(f"rank: {rank}: {{ hostname: {host}; cpu: {cpus} ; gpu: * ; mem: * }}")
    if path is None:
        handle, path = tempfile.mkstemp(prefix="horovod-ranks-")
        os.close(handle)
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def _places(hosts: Sequence[hosts_util.HostInfo], gpus: int, most: int) -> Iterator[tuple[str, int]]:
    """Return as many hosts and slots as are needed."""
    for host in hosts:
        if host.slots > gpus:
            raise ValueError(
                f"Invalid host input, slot count for host '{host.hostname}:{host.slots}' is greater than number of "
                f"GPUs per host '{gpus}'."
            )
        for slot in range(min(host.slots, most)):
            yield host.hostname, slot
        most -= min(host.slots, most)
