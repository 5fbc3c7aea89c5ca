"""``horovodrun``: Horovod's command line over ``smdrun``, on this host."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence

import horovod
from horovod.common import util

_MB = 1024 * 1024


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace.

    Args:
        argv: Without the program's name; ``None`` takes the process's own.

    Raises:
        ValueError: A number is negative.
        SystemExit: The line is not acceptable, or asks for help.
    """
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Starts a job of OpenSMD as horovodrun does.",
        usage="%(prog)s -np N [OPTIONS] COMMAND",
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=horovod.__version__)
    add("-np", "--num-proc", dest="num_proc", type=int, help="processes to start")
    add("-cb", "--check-build", action="store_true", help="says what there is, and ends")
    add("--verbose", action="store_true", help="accepted; what goes wrong is said in any case")
    add("--disable-cache", action="store_true", help="accepted; nothing is kept")
    add("--start-timeout", type=int, help="seconds until all processes must have joined")
    add(
        "--network-interfaces",
        "--network-interface",
        dest="nics",
        action="append",
        help="accepted; this host needs none",
    )
    add("--output-filename", help="a folder that gets what each process prints, too")
    add("--config-file", help="YAML; options win")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", help="such as localhost:4; this host only")
    hosts.add_argument("-hostfile", "--hostfile", help="a file of lines `name slots=n`")
    hosts.add_argument("--host-discovery-script", help="not available yet")
    add("-p", "--ssh-port", type=int, help="accepted; this host needs no ssh")
    add("-i", "--ssh-identity-file", help="accepted; this host needs no ssh")
    controller = parser.add_mutually_exclusive_group()
    controller.add_argument("--gloo", action="store_true", help="the control plane of OpenSMD; what happens by default")
    controller.add_argument("--mpi", action="store_true", help="mpirun starts the processes")
    controller.add_argument("--jsrun", action="store_true", help="not available")
    add("--mpi-args", help="more arguments of mpirun")
    add("--fusion-threshold-mb", type=int, help="what is ready together runs as one operation up to this size")
    add("--cache-capacity", type=int, help="names that are remembered")
    add("--cycle-time-ms", type=float, help="accepted; nothing waits for a cycle")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        _switch(parser, name, "a hint")
    _switch(parser, "autotune", "measures and chooses")
    add("--autotune-log-file", help="passed on")
    for name in ("warmup-samples", "steps-per-sample", "bayes-opt-max-samples"):
        add(f"--autotune-{name}", type=int, help="passed on")
    add("--autotune-gaussian-process-noise", type=float, help="passed on")
    for name in ("min-np", "max-np", "slots-per-host", "elastic-timeout", "reset-limit"):
        other = [f"--{name.replace('-np', '-num-proc')}"] if name.endswith("-np") else []
        add(f"--{name}", *other, type=int, help="elastic jobs are not available yet")
    add("--timeline-filename", help="a trace of what happens")
    _switch(parser, "timeline-mark-cycles", "accepted; there are no cycles")
    add(
        "--no-stall-check",
        dest="no_stall_check",
        action="store_true",
        default=None,
        help="accepted; warnings stay",
    )
    add("--stall-check", dest="no_stall_check", action="store_false", help="warns of them; the default")
    add("--stall-check-warning-time-seconds", type=int, help="after this time")
    add("--stall-check-shutdown-time-seconds", type=int, help="ends what waits after this time")
    _switch(parser, "mpi-threads-disable", "accepted")
    add("--num-nccl-streams", type=int, help="passed on")
    add("--thread-affinity", help="passed on")
    add("--gloo-timeout-seconds", type=int, help="passed on")
    add("--log-level", choices=["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"], help="of the core")
    add("command", nargs=argparse.REMAINDER, help="what each process runs")
    args = parser.parse_args(argv)
    if args.config_file:
        _read_config(args)
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected no negative number")
    noise = args.autotune_gaussian_process_noise
    if noise is not None and noise > 1:
        raise ValueError(f"--autotune-gaussian-process-noise is {noise}: expected 0 to 1")
    if args.check_build:
        return args
    if args.num_proc is None:
        parser.error("the following arguments are required: -np/--num-proc")
    if not args.command:
        parser.error("the command to run is missing")
    return args


def _switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    dest = name.replace("-", "_")
    parser.add_argument(f"--{name}", dest=dest, action="store_true", default=None, help=text)
    parser.add_argument(f"--no-{name}", dest=dest, action="store_false", help="the opposite")


def _read_config(args: argparse.Namespace) -> None:
    try:
        import yaml
    except ImportError:
        raise ValueError("`--config-file` needs the package PyYAML") from None
    with open(args.config_file) as file:
        config = yaml.safe_load(file) or {}
    prefixes = {"params": "", "autotune": "autotune_", "timeline": "timeline_", "stall_check": "stall_check_"}
    prefixes |= {"library_options": "", "logging": "log_"}
    names = {"autotune_enabled": "autotune", "verbose": "verbose"}
    for section, values in config.items():
        if section == "controller":
            if values not in ("gloo", "mpi"):
                raise ValueError(f"No such controller supported: {values}")
            if not (args.gloo or args.mpi):
                setattr(args, values, True)
            continue
        for key, value in (values or {}).items():
            name = prefixes.get(section, "?") + key
            name = names.get(name, name)
            if name == "stall_check_enabled":
                name, value = "no_stall_check", not value
            if not hasattr(args, name):
                print(f"horovodrun: warning: {args.config_file} has an unknown key `{section}.{key}`", file=sys.stderr)
            elif getattr(args, name) is None:
                setattr(args, name, value)


def set_env_from_args(env: dict[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Adds the variables that the options stand for; others stay as they are.

    Args:
        env: Is changed.
        args: See :func:`parse_args`.

    Returns:
        `env`.
    """
    values = {
        "FUSION_THRESHOLD": None if args.fusion_threshold_mb is None else args.fusion_threshold_mb * _MB,
        "CACHE_CAPACITY": args.cache_capacity,
        "CYCLE_TIME": args.cycle_time_ms,
        "HIERARCHICAL_ALLREDUCE": args.hierarchical_allreduce,
        "HIERARCHICAL_ALLGATHER": args.hierarchical_allgather,
        "TORUS_ALLREDUCE": args.torus_allreduce,
        "AUTOTUNE": args.autotune,
        "TIMELINE": args.timeline_filename,
        "STALL_CHECK_DISABLE": args.no_stall_check,
        "STALL_CHECK_TIME_SECONDS": args.stall_check_warning_time_seconds,
        "STALL_SHUTDOWN_TIME_SECONDS": args.stall_check_shutdown_time_seconds,
        "MPI_THREADS_DISABLE": args.mpi_threads_disable,
        "NUM_NCCL_STREAMS": args.num_nccl_streams,
        "THREAD_AFFINITY": args.thread_affinity,
        "GLOO_TIMEOUT_SECONDS": args.gloo_timeout_seconds,
        "LOG_LEVEL": args.log_level,
    }
    if args.autotune:
        values |= {
            "AUTOTUNE_LOG": args.autotune_log_file,
            "AUTOTUNE_WARMUP_SAMPLES": args.autotune_warmup_samples,
            "AUTOTUNE_STEPS_PER_SAMPLE": args.autotune_steps_per_sample,
            "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": args.autotune_bayes_opt_max_samples,
            "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": args.autotune_gaussian_process_noise,
        }
    if args.timeline_filename:
        values["TIMELINE_MARK_CYCLES"] = args.timeline_mark_cycles
    for name, value in values.items():
        if value is not None:
            env[f"HOROVOD_{name}"] = str(int(value)) if isinstance(value, bool) else str(value)
    return env


def check_build(verbose: bool = False) -> str:
    """What there is, in the original's words.

    Args:
        verbose: Changes nothing.
    """
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


def parse_hosts(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Names and slots of the hosts.

    Raises:
        ValueError: A host is not `name:slots`, or there are fewer slots than processes.
    """
    if args.hostfile:
        with open(args.hostfile) as file:
            words = [line.split() for line in file if line.strip() and not line.startswith("#")]
        text = ",".join(f"{name}:{dict(word.split('=') for word in rest).get('slots', '1')}" for name, *rest in words)
    else:
        text = args.hosts or f"localhost:{args.num_proc}"
    hosts = []
    for host in text.split(","):
        name, _, slots = host.strip().rpartition(":")
        if not name or not slots.isdigit():
            raise ValueError(
                f"Invalid host input, please make sure it has format as : worker-0:2,worker-1:2. It is {host!r}"
            )
        hosts.append((name, int(slots)))
    if sum(slots for _, slots in hosts) < args.num_proc:
        raise ValueError(f"Requested more processes ({args.num_proc}) than there are available slots: {text}")
    return hosts


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())


def _run(args: argparse.Namespace) -> int:
    from smdistributed import _core

    if args.check_build:
        print(check_build())
        return 0
    if args.jsrun:
        raise ValueError("horovodrun did not detect an LSF job, and jsrun is not available")
    if args.host_discovery_script or args.min_np or args.max_np:
        raise ValueError("elastic jobs are not available yet: leave out --min-np, --max-np and --host-discovery-script")
    hosts = parse_hosts(args)
    set_env_from_args(os.environ, args)
    timeout = args.start_timeout or os.environ.get("HOROVOD_START_TIMEOUT")
    if timeout:
        os.environ.setdefault("SMD_INIT_TIMEOUT_SECONDS", str(timeout))
    if args.mpi:
        return _mpirun(args, hosts)
    elsewhere = [host for host, _ in hosts if not _is_here(host)]
    if elsewhere:
        raise ValueError(
            f"only processes on this host are started, not on {', '.join(elsewhere)}: use --mpi, or mpirun itself"
        )
    options = ["--horovod", "--no-python", "--grace", "5"]
    if args.output_filename:
        options += ["--output-dir", args.output_filename]
    sys.stdout.flush()
    sys.stderr.flush()
    command = ["smdrun", "-n", str(args.num_proc), *options, *args.command]
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    code = _core.smdrun(command, sys.executable)
    if code == 0:
        return 0
    print(
        "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so ended with exit status {code}.",
        file=sys.stderr,
    )
    return 1


def _mpirun(args: argparse.Namespace, hosts: list[tuple[str, int]]) -> int:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise ValueError("horovod does not find an installed MPI.")
    command = [mpirun, "--allow-run-as-root", "--tag-output", "-np", str(args.num_proc)]
    command += ["-H", ",".join(f"{name}:{slots}" for name, slots in hosts), "-bind-to", "none", "-map-by", "slot"]
    for name in sorted(os.environ):
        if name.startswith(("HOROVOD_", "SMD_")) or name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
            command += ["-x", name]
    if args.output_filename:
        command += ["--output-filename", args.output_filename]
    command += shlex.split(args.mpi_args or "")
    sys.stdout.flush()
    os.execv(mpirun, [*command, *args.command])


def run_commandline() -> int:
    """The console script."""
    try:
        return _run(parse_args())
    except (ValueError, OSError) as error:
        print(f"horovodrun: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run_commandline())
