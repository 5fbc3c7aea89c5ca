"""``horovodrun``: Horovod's command line over the core's launcher."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import horovod
from horovod.common import util
from horovod.common.util import gloo_built as gloo_built
from horovod.runner.common.util import config_parser, hosts, timeout
from horovod.runner.common.util import settings as hvd_settings
from horovod.runner.driver import driver_service
from horovod.runner.elastic import settings as elastic_settings
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript
from horovod.runner.function import run_function
from horovod.runner.gloo_run import FAILED, gloo_run, gloo_run_elastic, is_here
from horovod.runner.js_run import is_jsrun_installed, js_run
from horovod.runner.mpi_run import mpi_available, mpi_run
from horovod.runner.util import cache, lsf, remote
from horovod.runner.util.network import Interfaces

_SSH_ATTEMPTS = 5
_SSH_TIMEOUT_S = 10
_CHECKS_MINUTES = 60


class _SplitInterfaces(argparse.Action):
    def __call__(self, parser: Any, args: Any, values: Any, option_string: str | None = None) -> None:
        setattr(args, self.dest, Interfaces([*(getattr(args, self.dest, None) or ()), *values.split(",")]))


def _parser(suppress: bool) -> argparse.ArgumentParser:
    """Parse the command line; with `suppress`, return only options that were given."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Starts a job of OpenSMD as horovodrun does.",
        usage="%(prog)s -np N [OPTIONS] COMMAND",
        argument_default=argparse.SUPPRESS if suppress else None,
    )
    off: Any = argparse.SUPPRESS if suppress else False
    none: Any = argparse.SUPPRESS if suppress else None
    add = parser.add_argument

    def flag(target: Any, *names: str, default: Any = off, action: str = "store_true", **kwargs: Any) -> None:
        target.add_argument(*names, action=action, default=default, **kwargs)

    def switch(name: str, text: str, opposite: str = "the opposite") -> None:
        dest = name.replace("-", "_")
        flag(parser, f"--{name}", dest=dest, default=none, help=text)
        flag(parser, f"--no-{name}", dest=dest, default=none, action="store_false", help=opposite)

    add("-v", "--version", action="version", version=horovod.__version__, help="the version")
    add("-np", "--num-proc", dest="num_proc", type=int, help="processes to start")
    flag(
        parser,
        "-cb",
        "--check-build",
        dest="check_build",
        help="print the available frameworks, controllers and operations, and exit",
    )
    flag(
        parser, "--disable-cache", dest="disable_cache", help="check other hosts at each start instead of once an hour"
    )
    add("--start-timeout", type=int, help="seconds until all processes must have joined; HOROVOD_START_TIMEOUT")
    add(
        "--network-interfaces",
        dest="nics",
        action=_SplitInterfaces,
        help="comma-separated interfaces for NCCL; default: the interfaces that all hosts have",
    )
    add("--network-interface", dest="nics", action=_SplitInterfaces, help="one interface for NCCL; may be repeated")
    add("--output-filename", help="folder for a copy of each process's output")
    flag(parser, "--verbose", dest="verbose", help="print what is done")
    add("--config-file", help="YAML file with options; options of the command line override it")

    ssh = parser.add_argument_group("other hosts")
    ssh.add_argument("-p", "--ssh-port", dest="ssh_port", type=int, help="port of ssh")
    ssh.add_argument("-i", "--ssh-identity-file", dest="ssh_identity_file", help="key for ssh")

    add("--fusion-threshold-mb", type=int, help="fusion size of collectives that are ready together")
    add("--cycle-time-ms", type=float, help="accepted and ignored: there are no cycles")
    add("--cache-capacity", type=int, help="capacity of the response cache, in names")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        switch(name, "accepted and ignored")
    switch("autotune", "try fusion sizes and keep the fastest")
    add("--autotune-log-file", help="CSV file for the sizes that were tried")
    add("--autotune-warmup-samples", type=int, help="samples to discard at the beginning")
    add("--autotune-steps-per-sample", type=int, help="steps of a sample")
    add("--autotune-bayes-opt-max-samples", type=int, help="number of sizes to try")
    add("--autotune-gaussian-process-noise", type=float, help="share of noise in the measurements, from 0 to 1")

    elastic = parser.add_argument_group("elastic jobs")
    add = elastic.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        dest="min_num_proc",
        type=int,
        help="the job waits until there are this many slots",
    )
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, help="the job uses at most this many slots")
    add("--slots-per-host", dest="slots", type=int, help="slots of hosts for which the discovery script prints none")
    add(
        "--elastic-timeout",
        type=int,
        help="timeout for enough slots and for started workers, in seconds; default: HOROVOD_ELASTIC_TIMEOUT, or 600",
    )
    add("--reset-limit", type=int, help="maximum number of restarts of the session")
    add(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="shortest and longest time for which a host is not used after a failure, in seconds",
    )

    add = parser.add_argument
    add("--timeline-filename", help="file for a timeline")
    switch("timeline-mark-cycles", "mark answers of the negotiation in the timeline")
    flag(parser, "--no-stall-check", dest="no_stall_check", default=none, help="no warnings about missing ranks")
    flag(
        parser,
        "--stall-check",
        dest="no_stall_check",
        default=none,
        action="store_false",
        help="warnings about missing ranks",
    )
    add("--stall-check-warning-time-seconds", type=int, help="time until the warning")
    add("--stall-check-shutdown-time-seconds", type=int, help="time until waiting collectives fail")
    switch("mpi-threads-disable", "accepted and ignored")
    add("--mpi-args", help="additional arguments of mpirun")
    flag(parser, "--tcp", dest="tcp_flag", default=none, help="with --mpi: TCP only")
    add("--binding-args", help="with --mpi: how processes are bound")
    add("--num-nccl-streams", type=int, help="accepted and ignored")
    add("--thread-affinity", help="comma-separated core numbers, one for each process of a host")
    add("--gloo-timeout-seconds", type=int, help="seconds until all processes must have joined")
    add("--log-level", choices=config_parser.LOG_LEVELS, help="log level of the core")
    flag(
        parser, "--log-with-timestamp", dest="log_with_timestamp", default=none, help="show the time in the core's log"
    )
    flag(
        parser,
        "--log-without-timestamp",
        dest="log_with_timestamp",
        default=none,
        action="store_false",
        help="no time in the core's log (default)",
    )
    flag(
        parser, "--log-hide-timestamp", dest="log_with_timestamp", default=none, action="store_false", help="deprecated"
    )
    flag(parser, "--no-log-hide-timestamp", dest="log_with_timestamp", default=none, help="deprecated")
    flag(
        parser,
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_output_with_timestamp",
        help="prefix each line of output with the time",
    )

    places = parser.add_mutually_exclusive_group()
    places.add_argument("-H", "--hosts", dest="hosts", help="hosts and slots, such as a:2,b:4; default: this host")
    places.add_argument("-hostfile", "--hostfile", dest="hostfile", help="a file of lines `name slots=n`")
    places.add_argument("--host-discovery-script", help="script that prints lines `name:slots`; run every second")

    controller = parser.add_mutually_exclusive_group()
    flag(
        controller,
        "--gloo",
        dest="use_gloo",
        default=none,
        help="use the core's own control plane (default)",
    )
    flag(controller, "--mpi", dest="use_mpi", default=none, help="start the processes by mpirun")
    flag(controller, "--jsrun", dest="use_jsrun", default=none, help="start the processes by jsrun, in a job of LSF")
    # Not by `argument_default`, which would drop the arguments of the command.
    add(
        "command",
        nargs=argparse.REMAINDER,
        default=argparse.SUPPRESS if suppress else [],
        help="the command of each process",
    )
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments without the program's name; by default those of this process.

    Returns:
        The options.

    Raises:
        ValueError: A number is out of its range.
        SystemExit: The command line is invalid, or requests help.
    """
    parser = _parser(suppress=False)
    args = parser.parse_args(argv)
    given = set(vars(_parser(suppress=True).parse_args(argv)))
    if args.config_file:
        try:
            import yaml
        except ImportError:
            raise ValueError("`--config-file` needs the package PyYAML") from None
        with open(args.config_file) as file:
            config_parser.set_args_from_config(args, yaml.safe_load(file) or {}, given)
    config_parser.validate_config_args(args)
    args.run_func = None
    args.executable = None
    if args.check_build:
        return args
    if args.num_proc is None and not lsf.LSFUtils.using_lsf():
        parser.error("the following arguments are required: -np/--num-proc")
    return args


def mpi_built(verbose: bool = False) -> bool:
    """Return whether there is an ``mpirun`` that could start the processes.

    Args:
        verbose: Accepted for compatibility, without effect.

    Returns:
        ``True`` if there is one.
    """
    return mpi_available()


def is_gloo_used(use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None) -> bool:
    """Return whether the core's own control plane starts the processes.

    Args:
        use_gloo: Whether the core's control plane is requested.
        use_mpi: Whether MPI is requested.
        use_jsrun: Whether ``jsrun`` is requested.

    Returns:
        ``True`` if the core's own control plane starts the processes.
    """
    return bool(use_gloo) or not (use_mpi or use_jsrun)


def run_controller(
    use_gloo: bool | None,
    gloo_run: Any,
    use_mpi: bool | None,
    mpi_run: Any,
    use_jsrun: bool | None,
    js_run: Any,
    verbosity: int | None,
) -> None:
    """Call the function of the requested controller, or else of the first one that is available.

    Args:
        use_gloo: Whether the core's own control plane is requested.
        gloo_run: Starts a job by the core's own control plane.
        use_mpi: Whether MPI is requested.
        mpi_run: Starts a job by MPI.
        use_jsrun: Whether ``jsrun`` is requested.
        js_run: Starts a job by ``jsrun``.
        verbosity: Accepted for compatibility, without effect.

    Raises:
        ValueError: The controller is not available.
    """
    verbose = verbosity is not None and verbosity >= 2
    if use_gloo:
        if not gloo_built(verbose=verbose):
            raise ValueError("Gloo support has not been built.  No framework is installed for it.")
        gloo_run()
    elif use_mpi:
        if not mpi_built(verbose=verbose):
            raise ValueError("MPI support has not been built.  There is no mpirun on the PATH.")
        mpi_run()
    elif use_jsrun:
        if not mpi_built(verbose=verbose):
            raise ValueError("MPI support has not been built.  There is no mpirun on the PATH.")
        if not lsf.LSFUtils.using_lsf():
            raise ValueError(
                "Horovod did not detect an LSF job.  The jsrun launcher can only be used in that environment."
            )
        js_run()
    elif mpi_built(verbose=verbose):
        if lsf.LSFUtils.using_lsf() and is_jsrun_installed():
            js_run()
        else:
            mpi_run()
    elif gloo_built(verbose=verbose):
        gloo_run()
    else:
        raise ValueError("Neither MPI nor Gloo support has been built.  No framework is installed.")


#: Options by their names in the namespace: those of elastic jobs, and those of MPI's launchers.
_ELASTIC_OPTIONS = {
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
}
_MPI_OPTIONS = {"mpi_args": "--mpi-args", "tcp_flag": "--tcp", "binding_args": "--binding-args"}


def _warn_ignored(args: argparse.Namespace, options: dict[str, str], reason: str) -> None:
    given = [option for name, option in options.items() if getattr(args, name, None)]
    if given:
        warnings.warn(f"without effect: {', '.join(given)}. {reason}", stacklevel=2)


def _is_elastic(args: argparse.Namespace) -> bool:
    return args.host_discovery_script is not None or args.min_num_proc is not None


def check_build(verbose: bool = False) -> str:
    """Print the available components in the original's form, and end the process with 0.

    Args:
        verbose: Accepted for compatibility, without effect.

    Returns:
        Nothing: the process ends.
    """
    print(_build_report())
    raise SystemExit(0)


def _build_report() -> str:
    from horovod.common import basics

    def box(there: object) -> str:
        return "[X]" if there else "[ ]"

    core = basics.shared()
    return f"""\
Horovod v{horovod.__version__}:

Available Frameworks:
    {box(util.extension_available("tensorflow"))} TensorFlow
    {box(util.extension_available("torch"))} PyTorch
    {box(False)} MXNet

Available Controllers:
    {box(core.mpi_built())} MPI
    {box(core.gloo_built())} Gloo

Available Tensor Operations:
    {box(core.nccl_built())} NCCL
    {box(core.ddl_built())} DDL
    {box(core.ccl_built())} CCL
    {box(core.mpi_built())} MPI
    {box(core.gloo_built())} Gloo

OpenSMD runs it: "Gloo" stands for its own control plane and transports; `smdrun doctor` says more."""


@cache.use_cache()
def _check_all_hosts_ssh_successful(
    host_addresses: Sequence[str], ssh_port: int | None = None, ssh_identity_file: str | None = None
) -> bool:
    """Check that each of these hosts can be reached through ``ssh``; print those that cannot."""
    from horovod.runner.common.util import safe_shell_exec
    from horovod.runner.util.threads import execute_function_multithreaded

    def reach(host: str) -> bool:
        command = remote.get_ssh_command("true", host, ssh_port, ssh_identity_file, _SSH_TIMEOUT_S)
        return any(safe_shell_exec.execute(command) == 0 for _ in range(_SSH_ATTEMPTS))

    reached = execute_function_multithreaded(reach, [[host] for host in host_addresses])
    for index, host in enumerate(host_addresses):
        if not reached[index]:
            print(f"ssh not successful for host {host}", file=sys.stderr)
    return all(reached.values())


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    text = os.environ.get("HOROVOD_START_TIMEOUT", "30")
    if not text.isdecimal():
        raise ValueError(f"`HOROVOD_START_TIMEOUT` is `{text}`: expected a number of seconds")
    start = args.start_timeout or int(text)
    return {
        "verbose": 2 if args.verbose else 0,
        "ssh_port": args.ssh_port,
        "ssh_identity_file": args.ssh_identity_file,
        "extra_mpi_args": args.mpi_args,
        "tcp_flag": args.tcp_flag,
        "binding_args": args.binding_args,
        "start_timeout": timeout.Timeout(start, "{activity} took longer than {timeout} seconds"),
        "num_proc": args.num_proc,
        "output_filename": args.output_filename,
        "run_func_mode": args.run_func is not None,
        "nics": args.nics,
        "prefix_output_with_timestamp": args.prefix_output_with_timestamp,
    }


def _environment(args: argparse.Namespace) -> dict[str, str]:
    env = os.environ.copy()
    config_parser.set_env_from_args(env, args)
    if args.start_timeout:
        env["SMD_INIT_TIMEOUT_SECONDS"] = str(args.start_timeout)
    elif start := env.get("HOROVOD_START_TIMEOUT"):
        env.setdefault("SMD_INIT_TIMEOUT_SECONDS", start)
    return env


def _checks(settings: hvd_settings.Settings) -> cache.Cache:
    """Return the results of checks in the last hour."""
    asked = (settings.hosts, settings.ssh_port, settings.ssh_identity_file, list(Interfaces(settings.nics or ())))
    parameters = hashlib.md5(repr(asked).encode(), usedforsecurity=False).hexdigest()
    return cache.Cache(os.path.expanduser("~/.horovod"), _CHECKS_MINUTES, parameters)


def _common_interfaces(
    settings: hvd_settings.Settings,
    names: list[str],
    elsewhere: list[str],
    kept: cache.Cache | None,
    env: dict[str, str],
) -> Interfaces:
    """Return the interfaces for NCCL: those of the options, or on several hosts those that the hosts have in common."""
    if not settings.nics and "NCCL_SOCKET_IFNAME" in env and elsewhere:
        return Interfaces()
    try:
        found = driver_service.get_common_interfaces(settings, names, elsewhere, fn_cache=kept)
    except (RuntimeError, TimeoutError, timeout.TimeoutException) as error:
        # The core finds interfaces itself, and usually so does NCCL.
        print(f"horovodrun: warning: the interfaces of the hosts could not be compared: {error}", file=sys.stderr)
        return Interfaces()
    return found if elsewhere or settings.nics else Interfaces()


def _run_static(args: argparse.Namespace) -> None:
    listed = args.hosts
    if args.hostfile:
        listed = hosts.parse_host_files(args.hostfile)
    if not listed and lsf.LSFUtils.using_lsf():
        listed = ",".join(f"{host}:{slots}" for host, slots in lsf.LSFUtils.get_slots().items())
    if args.num_proc is None:
        args.num_proc = lsf.LSFUtils.get_num_processes()
    if args.num_proc < 1:
        raise ValueError(f"the number of processes is {args.num_proc}: expected at least one")
    listed = listed or f"localhost:{args.num_proc}"
    _warn_ignored(args, _ELASTIC_OPTIONS, "Only jobs with --min-np or --host-discovery-script are elastic")
    if not (args.use_mpi or args.use_jsrun):
        _warn_ignored(args, _MPI_OPTIONS, "MPI starts processes only with --mpi or --jsrun")
    names, _ = hosts.parse_hosts_and_slots(listed)
    hosts.get_host_assignments(hosts.parse_hosts(listed), args.num_proc)
    settings = hvd_settings.Settings(hosts=listed, **_settings(args))
    elsewhere = [name for name in names if not is_here(name)]
    kept = None if args.disable_cache or not elsewhere else _checks(settings)
    if elsewhere:
        if settings.verbose >= 2:
            print(f"Remote host found: {' '.join(elsewhere)}")
            print("Checking ssh on all remote hosts.")
        if not _check_all_hosts_ssh_successful(elsewhere, args.ssh_port, args.ssh_identity_file, fn_cache=kept):
            raise RuntimeError("could not connect to some hosts via ssh")
        if settings.verbose >= 2:
            print("SSH was successful into all the remote hosts.")
    sys.stdout.flush()
    env = _environment(args)

    def own_run() -> None:
        found = _common_interfaces(settings, names, elsewhere, kept, env)
        if found:
            env["NCCL_SOCKET_IFNAME"] = ",".join(found)
        if args.nics:
            env["HOROVOD_GLOO_IFACE"] = ",".join(Interfaces(args.nics))
        gloo_run(settings, found, env, None, args.command)

    nothing_chosen = not (args.use_gloo or args.use_mpi or args.use_jsrun)
    run_controller(
        # The original prefers an installed MPI. Here, the default needs nothing but the core.
        args.use_gloo or nothing_chosen,
        own_run,
        args.use_mpi,
        lambda: mpi_run(settings, args.nics, env, args.command),
        args.use_jsrun,
        lambda: js_run(settings, args.nics, env, args.command),
        settings.verbose,
    )


def _run_elastic(args: argparse.Namespace) -> None:
    if args.use_mpi or args.use_jsrun:
        raise ValueError("elastic jobs need the core's own control plane: leave out --mpi and --jsrun")
    discovery: Any
    if args.host_discovery_script:
        discovery = HostDiscoveryScript(args.host_discovery_script, args.slots)
    else:
        listed = hosts.parse_host_files(args.hostfile) if args.hostfile else args.hosts
        _, available = hosts.parse_hosts_and_slots(listed or f"localhost:{args.num_proc}")
        if len(available) < 2:
            raise ValueError(
                "Cannot run in fault tolerance mode with fewer than 2 hosts: give more hosts, or a host discovery "
                "script"
            )
        discovery = FixedHosts(available)
    settings = elastic_settings.ElasticSettings(
        discovery=discovery,
        min_num_proc=args.min_num_proc or args.num_proc,
        max_num_proc=args.max_num_proc,
        elastic_timeout=args.elastic_timeout,
        reset_limit=args.reset_limit,
        cooldown_range=args.cooldown_range,
        **_settings(args),
    )
    env = _environment(args)
    if args.nics:
        # Hosts that join later must have these interfaces as well.
        env["NCCL_SOCKET_IFNAME"] = env["HOROVOD_GLOO_IFACE"] = ",".join(Interfaces(args.nics))
    gloo_run_elastic(settings, env, args.command)


def _run(args: argparse.Namespace) -> list[Any] | None:
    """Run a job.

    Args:
        args: The options. With a `run_func`, all processes call that function instead of running a command.

    Returns:
        The results of `run_func`, by rank; ``None`` for a command.
    """
    if args.hosts and args.host_discovery_script:
        raise ValueError("give either hosts or a host discovery script")
    if getattr(args, "run_func", None) is not None:
        return run_function(args, _run_command)
    if not args.command:
        raise ValueError("the command to run is missing")
    _run_command(args)
    return None


def _run_command(args: argparse.Namespace) -> None:
    if _is_elastic(args):
        _run_elastic(args)
    else:
        _run_static(args)


def run_commandline() -> None:
    """Run ``horovodrun``."""
    try:
        args = parse_args()
        if args.check_build:
            check_build(args.verbose)
        _run(args)
    except RuntimeError as error:
        print(f"RuntimeError: {error}" if FAILED in str(error) else f"horovodrun: error: {error}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, OSError) as error:
        print(f"horovodrun: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_commandline()
