"""The launcher's Python API: ``horovod.run``."""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any


class _HorovodArgs(argparse.Namespace):
    """Return the options of the command line as attributes, with their defaults."""

    disable_cache: bool | None
    verbose: bool | None

    def __init__(self) -> None:
        super().__init__()
        for name in _OPTIONS:
            setattr(self, name, None)
        self.num_proc = 1
        self.check_build = self.disable_cache = self.verbose = self.prefix_output_with_timestamp = False


_OPTIONS = [
    "num_proc",
    "check_build",
    "disable_cache",
    "start_timeout",
    "nics",
    "output_filename",
    "verbose",
    "config_file",
    "ssh_port",
    "ssh_identity_file",
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "torus_allreduce",
    "autotune",
    "autotune_log_file",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples",
    "autotune_gaussian_process_noise",
    "min_num_proc",
    "max_num_proc",
    "slots",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
    "timeline_filename",
    "timeline_mark_cycles",
    "no_stall_check",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
    "mpi_threads_disable",
    "mpi_args",
    "tcp_flag",
    "binding_args",
    "num_nccl_streams",
    "thread_affinity",
    "gloo_timeout_seconds",
    "log_level",
    "log_with_timestamp",
    "prefix_output_with_timestamp",
    "hosts",
    "hostfile",
    "host_discovery_script",
    "use_gloo",
    "use_mpi",
    "use_jsrun",
    "command",
    "run_func",
    "executable",
]


def renamed(old: str, value: Any, new: str, current: Any) -> Any:
    """Return the value of an argument that had another name, with a warning if the caller uses the old one.

    Args:
        old: The old name.
        value: The value under the old name; ``None`` if it was not given.
        new: The new name.
        current: The value under the new name.

    Returns:
        The value to use.
    """
    if value is None:
        return current
    warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
    return value


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Any = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function on all processes of a new job, and return their results.

    Args:
        func: Any function; with ``cloudpickle`` also closures and lambdas.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes.
        min_num_proc: Least number of slots of an elastic job: it waits until they are available.
        max_num_proc: Largest number of slots of an elastic job.
        slots: Slots of hosts for which the discovery script prints none.
        reset_limit: Largest number of sessions after the first.
        cooldown_range: Least and largest time that a host is not used after a process failed there, in seconds.
        hosts: Hosts and slots, such as ``a:2,b:4``; by default all processes run on this host.
        hostfile: A file of lines ``name slots=n``.
        host_discovery_script: A script that prints lines ``name:slots``.
        start_timeout: Longest wait until all processes have joined, in seconds.
        ssh_port: Port of ``ssh``.
        ssh_identity_file: Key of ``ssh``.
        disable_cache: Whether checks of other hosts run for each job instead of once an hour.
        output_filename: A folder for what each process prints.
        verbose: Whether to print progress.
        use_gloo: Whether the core's own control plane starts the processes, which is the default.
        use_mpi: Whether ``mpirun`` starts the processes.
        mpi_args: More arguments of ``mpirun``.
        network_interface: Deprecated: use ``network_interfaces``.
        network_interfaces: Interfaces for NCCL, as a list or separated by commas; by default those that hosts have in
            common.
        executable: The Python interpreter; by default this process's.
        np: Deprecated: use ``num_proc``.
        min_np: Deprecated: use ``min_num_proc``.
        max_np: Deprecated: use ``max_num_proc``.

    Returns:
        The function's results by rank; of an elastic job, those of the first ``min_num_proc`` ranks.

    Raises:
        ValueError: Arguments exclude each other.
        RuntimeError: A process failed; its exception is the cause.

    Examples:
        >>> def train():
        ...     hvd.init()
        ...     return hvd.rank()
        >>> horovod.run(train, num_proc=2)
        [0, 1]
    """
    from horovod.runner import launch
    from horovod.runner.util.network import Interfaces

    num_proc = renamed("np", np, "num_proc", num_proc)
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    nics = renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if not callable(func):
        raise ValueError(f"func is {func!r}: expected a function")
    options = _HorovodArgs()
    options.num_proc = num_proc
    options.min_num_proc = min_num_proc
    options.max_num_proc = max_num_proc
    options.slots = slots
    options.reset_limit = reset_limit
    options.cooldown_range = cooldown_range
    options.hosts = hosts
    options.hostfile = hostfile
    options.host_discovery_script = host_discovery_script
    options.start_timeout = start_timeout
    options.ssh_port = ssh_port
    options.ssh_identity_file = ssh_identity_file
    options.disable_cache = disable_cache
    options.output_filename = output_filename
    options.verbose = verbose
    options.use_gloo = use_gloo
    options.use_mpi = use_mpi
    options.mpi_args = mpi_args
    options.nics = nics if nics is None else Interfaces(nics.split(",") if isinstance(nics, str) else nics)
    options.run_func = functools.partial(func, *args, **(kwargs or {}))
    options.executable = executable or sys.executable
    results = launch._run(options)
    assert results is not None, "a function was run, not a command"
    return results
