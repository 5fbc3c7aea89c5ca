"""Starting jobs."""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any


class _HorovodArgs(argparse.Namespace):
    """The options of the command line as attributes, with their defaults."""

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
    """Runs a function on all processes of a new job.

    Args:
        func: Any function; closures and lambdas as well, with ``cloudpickle``.
        args: Its arguments.
        kwargs: More of them.
        num_proc: Processes.
        min_num_proc: Of an elastic job: slots without which nobody trains.
        max_num_proc: Slots beyond which none is used.
        slots: Of hosts for which the discovery script prints none.
        reset_limit: Sessions after the first, at most.
        cooldown_range: How long a host where a process failed is not used, the first time and at most, in seconds.
        hosts: Such as ``a:2,b:4``; by default all are here.
        hostfile: A file of lines ``name slots=n``.
        host_discovery_script: Prints lines ``name:slots``.
        start_timeout: Seconds until all processes must have joined.
        ssh_port: Port of ``ssh``.
        ssh_identity_file: Key for it.
        disable_cache: Checks of other hosts are done anew, not once an hour.
        output_filename: A folder that gets what each process prints.
        verbose: Says what is being done.
        use_gloo: The core's own control plane, as by default.
        use_mpi: ``mpirun`` starts the processes.
        mpi_args: More arguments of it.
        network_interface: Deprecated: `network_interfaces`.
        network_interfaces: Interfaces for NCCL, as a list or with commas; by default those that hosts have in common.
        executable: The Python to use.
        np: Deprecated: `num_proc`.
        min_np: Deprecated: `min_num_proc`.
        max_np: Deprecated: `max_num_proc`.

    Returns:
        What the function returned, by rank; of an elastic job, of the first `min_num_proc` ranks.

    Raises:
        ValueError: Arguments exclude each other.
        RuntimeError: A process failed; its exception is the cause.
    """
    from horovod.runner import launch
    from horovod.runner.util.network import Interfaces

    def renamed(old: str, value: Any, new: str, current: Any) -> Any:
        if value is None:
            return current
        warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
        return value

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
