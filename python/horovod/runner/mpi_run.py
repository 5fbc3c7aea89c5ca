"""Jobs under ``mpirun``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from horovod.runner.common.util import hosts as hosts_util
from horovod.runner.common.util import safe_shell_exec, tiny_shell_exec
from horovod.runner.common.util.env import is_exportable
from horovod.runner.util.network import Interfaces

_OMPI_IMPL = "OpenMPI"
_SMPI_IMPL = "SpectrumMPI"
_MPICH_IMPL = "MPICH"
_IMPI_IMPL = "IntelMPI"
_UNKNOWN_IMPL = "Unknown"
_MISSING_IMPL = "Missing"

_OMPI_FLAGS = ["-mca pml ob1", "-mca btl ^openib"]
_SMPI_FLAGS: list[str] = []
_SMPI_FLAGS_TCP = ["-tcp"]
_NO_BINDING_ARGS = ["-bind-to none", "-map-by slot"]
_SOCKET_BINDING_ARGS = ["-bind-to socket", "-map-by socket", "-rank-by core"]
#: Number of hosts from which on mpirun gets options for large clusters.
_LARGE_CLUSTER_THRESHOLD = 64

_MISSING_TEXT = (
    "horovod does not find an installed MPI.\n\nInstall one, or leave out --mpi: horovodrun needs none of its own."
)


def mpi_available(env: dict[str, str] | None = None) -> bool:
    """Return whether there is an ``mpirun`` of a known kind.

    Args:
        env: The environment; by default this process's.

    Returns:
        ``True`` if there is one.
    """
    return _get_mpi_implementation(env) not in (_UNKNOWN_IMPL, _MISSING_IMPL)


def is_open_mpi(env: dict[str, str] | None = None) -> bool:
    """Return whether ``mpirun`` is that of Open MPI.

    Args:
        env: The environment; by default this process's.

    Returns:
        ``True`` if ``mpirun`` is that of Open MPI.
    """
    return _get_mpi_implementation(env) == _OMPI_IMPL


def is_spectrum_mpi(env: dict[str, str] | None = None) -> bool:
    """Return whether ``mpirun`` is that of IBM's Spectrum MPI.

    Args:
        env: The environment; by default this process's.

    Returns:
        ``True`` if ``mpirun`` is that of IBM's Spectrum MPI.
    """
    return _get_mpi_implementation(env) == _SMPI_IMPL


def is_mpich(env: dict[str, str] | None = None) -> bool:
    """Return whether ``mpirun`` is that of MPICH.

    Args:
        env: The environment; by default this process's.

    Returns:
        ``True`` if ``mpirun`` is that of MPICH.
    """
    return _get_mpi_implementation(env) == _MPICH_IMPL


def is_intel_mpi(env: dict[str, str] | None = None) -> bool:
    """Return whether ``mpirun`` is that of Intel MPI.

    Args:
        env: The environment; by default this process's.

    Returns:
        ``True`` if ``mpirun`` is that of Intel MPI.
    """
    return _get_mpi_implementation(env) == _IMPI_IMPL


def _get_mpi_implementation(env: dict[str, str] | None = None) -> str:
    answer = tiny_shell_exec.execute("mpirun --version", env)
    if answer is None:
        return _MISSING_IMPL
    output, code = answer
    if code == 0:
        for mark, implementation in (
            ("Open MPI", _OMPI_IMPL),
            ("OpenRTE", _OMPI_IMPL),
            ("IBM Spectrum MPI", _SMPI_IMPL),
            ("MPICH", _MPICH_IMPL),
            ("HYDRA", _MPICH_IMPL),
            ("Intel(R) MPI", _IMPI_IMPL),
        ):
            if mark in output:
                return implementation
        print(f"Unknown MPI implementation given in output of mpirun --version:\n{output}", file=sys.stderr)
        return _UNKNOWN_IMPL
    print(f"Was unable to run mpirun --version:\n{output}", file=sys.stderr)
    return _MISSING_IMPL


def _get_mpi_implementation_flags(
    tcp_flag: bool | None, env: dict[str, str] | None = None
) -> tuple[list[str] | None, list[str] | None, str | None]:
    """Return flags of the installed ``mpirun``, its binding arguments and kind; three times ``None`` without one."""
    implementation = _get_mpi_implementation(env)
    if implementation == _OMPI_IMPL:
        return list(_OMPI_FLAGS), list(_NO_BINDING_ARGS), implementation
    if implementation == _SMPI_IMPL:
        return list(_SMPI_FLAGS_TCP if tcp_flag else _SMPI_FLAGS), list(_SOCKET_BINDING_ARGS), implementation
    if implementation in (_MPICH_IMPL, _IMPI_IMPL):
        return [], [], implementation
    return None, None, None


def _line(settings: Any, nics: Any, exported: Sequence[str], command: Sequence[str], found: tuple[Any, ...]) -> str:
    """Return the command line for the shell.

    Scripts compare it. Each option has its place, which stays empty if the option is not needed.
    """
    flags, binding, implementation = found
    is_hydra = implementation in (_MPICH_IMPL, _IMPI_IMPL)
    # Open MPI reads the list of hosts from the environment itself.
    names = hosts_util.parse_hosts_and_slots(settings.hosts)[0] if is_hydra or not settings.num_hosts else []
    num_hosts = settings.num_hosts or len(names)
    ssh = [f"-p {settings.ssh_port}"] if settings.ssh_port else []
    ssh += [f"-i {settings.ssh_identity_file}"] if settings.ssh_identity_file else []
    reach = '-bootstrap=ssh -bootstrap-exec-args "{}"' if is_hydra else '-mca plm_rsh_args "{}"'
    if num_hosts >= _LARGE_CLUSTER_THRESHOLD and not is_hydra:
        flags = [*flags, "-mca plm_rsh_no_tree_spawn true", f"-mca plm_rsh_num_concurrent {num_hosts}"]
    first_to_last = list(Interfaces(nics or ()))
    interfaces = ",".join(first_to_last)
    folder = shlex.quote(settings.output_filename) if settings.output_filename else ""
    if is_hydra:
        per_host = max(1, settings.num_proc // max(1, num_hosts))
        places = [f"-l -np {settings.num_proc} -ppn {per_host} -hosts {','.join(names)}"]
        options = {
            "interfaces": f"-iface {first_to_last[0]}" if nics else "",
            "nccl": f"-genv NCCL_SOCKET_IFNAME {interfaces}" if nics else "",
            "output": f"-outfile-pattern {folder}" if folder else "",
            "variables": f"-genvlist {','.join(exported)}" if exported else "",
        }
    else:
        places = [f"--allow-run-as-root --tag-output -np {settings.num_proc} -H {settings.hosts}"]
        options = {
            "interfaces": f"-mca btl_tcp_if_include {interfaces}" if nics else "",
            "nccl": f"-x NCCL_SOCKET_IFNAME={interfaces}" if nics else "",
            "output": f"--output-filename {folder}" if folder else "",
            "variables": " ".join(f"-x {name}" for name in exported),
        }
    places += [settings.binding_args or " ".join(binding), " ".join(flags), reach.format(" ".join(ssh)) if ssh else ""]
    places += [*options.values(), settings.extra_mpi_args or ""]
    return " ".join(["mpirun", *places, *map(shlex.quote, command)])


def mpi_run(
    settings: Any,
    nics: Any,
    env: dict[str, str],
    command: Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Start a job. From the command line, this process becomes ``mpirun``.

    Args:
        settings: Settings of the job.
        nics: Interfaces for MPI's own messages.
        env: Environment of the processes.
        command: The command that each process runs.
        stdout: Receives ``mpirun``'s output.
        stderr: Receives ``mpirun``'s errors.

    Raises:
        Exception: ``env`` is not a dictionary, or there is no MPI.
        RuntimeError: ``mpirun`` failed.
    """
    if env is not None and not isinstance(env, dict):
        raise Exception(f"env argument must be a dict, not {type(env)}: {env}")
    found = _get_mpi_implementation_flags(settings.tcp_flag, env=env)
    if found[0] is None:
        raise Exception(_MISSING_TEXT)
    env = dict(env or {})
    if settings.tcp_flag:
        env["NCCL_IB_DISABLE"] = "1"
    # Only names: mpirun gets the values in its environment, because any user can read command lines.
    exported = [name for name in sorted(env) if is_exportable(name) and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
    for name in ("PATH", "PYTHONPATH"):
        # Variables that mpirun itself needs.
        if name not in env and name in os.environ:
            env[name] = os.environ[name]
    line = _line(settings, nics, exported, command, found)
    if settings.verbose >= 2:
        print(line)
    sys.stdout.flush()
    sys.stderr.flush()
    if settings.run_func_mode:
        code = safe_shell_exec.execute(line, env=env, stdout=stdout, stderr=stderr)
        if code != 0:
            raise RuntimeError(f"mpirun failed with exit code {code}")
        return
    os.execve("/bin/sh", ["/bin/sh", "-c", line], env)
