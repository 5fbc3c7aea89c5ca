"""Jobs under ``mpirun``."""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from horovod.runner.common.util import hosts as hosts_util
from horovod.runner.common.util import safe_shell_exec, tiny_shell_exec
from horovod.runner.common.util.env import is_exportable

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
#: From so many hosts on, mpirun is told how to reach them.
_LARGE_CLUSTER_THRESHOLD = 64

_MISSING_TEXT = (
    "horovod does not find an installed MPI.\n\nInstall one, or leave out --mpi: horovodrun needs none of its own."
)


def mpi_available(env: dict[str, str] | None = None) -> bool:
    """Whether there is an ``mpirun`` of a kind that is known."""
    return _get_mpi_implementation(env) not in (_UNKNOWN_IMPL, _MISSING_IMPL)


def is_open_mpi(env: dict[str, str] | None = None) -> bool:
    """Whether it is Open MPI's."""
    return _get_mpi_implementation(env) == _OMPI_IMPL


def is_spectrum_mpi(env: dict[str, str] | None = None) -> bool:
    """Whether it is IBM's."""
    return _get_mpi_implementation(env) == _SMPI_IMPL


def is_mpich(env: dict[str, str] | None = None) -> bool:
    """Whether it is MPICH's."""
    return _get_mpi_implementation(env) == _MPICH_IMPL


def is_intel_mpi(env: dict[str, str] | None = None) -> bool:
    """Whether it is Intel's."""
    return _get_mpi_implementation(env) == _IMPI_IMPL


def _get_mpi_implementation(env: dict[str, str] | None = None) -> str:
    answer = tiny_shell_exec.execute("mpirun --version", env=env)
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


def _flags(settings: Any, implementation: str) -> tuple[list[str], list[str]]:
    if implementation == _OMPI_IMPL:
        return list(_OMPI_FLAGS), _NO_BINDING_ARGS
    if implementation == _SMPI_IMPL:
        return list(_SMPI_FLAGS_TCP if settings.tcp_flag else _SMPI_FLAGS), _SOCKET_BINDING_ARGS
    return [], []


def mpi_run(
    settings: Any,
    nics: Any,
    env: dict[str, str],
    command: Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Starts a job. From the command line, this process becomes ``mpirun``.

    Args:
        settings: Those of the job.
        nics: Interfaces for MPI's own messages.
        env: The processes' environment.
        command: What each process runs.
        stdout: Where ``mpirun``'s output goes.
        stderr: The same for errors.

    Raises:
        Exception: `env` is no dictionary, or there is no MPI.
        RuntimeError: ``mpirun`` failed.
    """
    if env is not None and not isinstance(env, dict):
        raise Exception(f"env argument must be a dict, not {type(env)}: {env}")
    implementation = _get_mpi_implementation(env)
    if implementation in (_MISSING_IMPL, _UNKNOWN_IMPL):
        raise Exception(_MISSING_TEXT)
    env = copy.copy(env) if env else {}
    for name in ("PATH", "PYTHONPATH"):
        if name not in env and name in os.environ:
            env[name] = os.environ[name]
    flags, binding = _flags(settings, implementation)
    names, _ = hosts_util.parse_hosts_and_slots(settings.hosts)
    # Names alone: the values reach mpirun in its environment, since any user of the host can read a command line.
    exported = [name for name in sorted(env) if is_exportable(name) and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
    if implementation in (_OMPI_IMPL, _SMPI_IMPL):
        words = ["mpirun", "--allow-run-as-root", "--tag-output", f"-np {settings.num_proc}", f"-H {settings.hosts}"]
        words += [settings.binding_args] if settings.binding_args else binding
        words += flags
        if settings.ssh_port or settings.ssh_identity_file:
            ssh = [f"-p {settings.ssh_port}"] if settings.ssh_port else []
            ssh += [f"-i {settings.ssh_identity_file}"] if settings.ssh_identity_file else []
            words += [f'-mca plm_rsh_args "{" ".join(ssh)}"']
        if len(names) >= _LARGE_CLUSTER_THRESHOLD:
            words += ["-mca plm_rsh_no_tree_spawn true", f"-mca plm_rsh_num_concurrent {len(names)}"]
        if nics:
            interfaces = ",".join(sorted(nics))
            words += [f"-mca btl_tcp_if_include {interfaces}", f"-x NCCL_SOCKET_IFNAME={interfaces}"]
        words += [f"--output-filename {shlex.quote(settings.output_filename)}"] if settings.output_filename else []
        words += [f"-x {name}" for name in exported]
    else:
        per_host = max(1, settings.num_proc // max(1, len(names)))
        words = ["mpirun", "-l", f"-np {settings.num_proc}", f"-ppn {per_host}", f"-hosts {','.join(names)}"]
        words += [settings.binding_args] if settings.binding_args else []
        words += [f"-iface {sorted(nics)[0]}"] if nics else []
        words += [f"-outfile-pattern {shlex.quote(settings.output_filename)}"] if settings.output_filename else []
        words += [f"-genvlist {','.join(exported)}"] if exported else []
    words += [settings.extra_mpi_args] if settings.extra_mpi_args else []
    line = " ".join([*words, *map(shlex.quote, command)])
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
