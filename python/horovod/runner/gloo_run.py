"""Jobs under the core's own launcher, `smdrun`, which replaces the original's Gloo."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod.common.util import env as environment
from horovod.runner.common.util import codec, safe_shell_exec, secret
from horovod.runner.common.util.env import is_exportable
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util.network import Interfaces, get_driver_ip
from horovod.runner.util.threads import execute_function_multithreaded
from smdistributed import _core

FAILED = "Horovod detected that one or more processes exited with non-zero status"


def is_here(host: str) -> bool:
    """Return whether a name is that of this host.

    Args:
        host: A name or an address.

    Returns:
        ``True`` if the name is this host's.
    """
    return _core.is_this_host(host)


def create_slot_env_vars(slot_info: SlotInfo) -> dict[str, str]:
    """Return the variables with the ranks of a process.

    Args:
        slot_info: The host and the ranks.

    Returns:
        Values by name.
    """
    return {
        "HOROVOD_HOSTNAME": str(slot_info.hostname),
        "HOROVOD_RANK": str(slot_info.rank),
        "HOROVOD_SIZE": str(slot_info.size),
        "HOROVOD_LOCAL_RANK": str(slot_info.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot_info.local_size),
        "HOROVOD_CROSS_RANK": str(slot_info.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot_info.cross_size),
    }


def create_run_env_vars(server_ip: str, nics: Any, port: int, elastic: bool = False) -> dict[str, str]:
    """Return the variables that all processes get.

    Args:
        server_ip: Address of the store.
        nics: Interfaces of the hosts.
        port: Port of the store.
        elastic: Whether processes may join and leave.

    Returns:
        Values by name.
    """
    interfaces = list(Interfaces(nics or ()))
    env = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_ip,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interfaces[0] if interfaces else "",
        "NCCL_SOCKET_IFNAME": ",".join(interfaces),
    }
    return env | ({"HOROVOD_ELASTIC": "1"} if elastic else {})


def get_run_command(command: Sequence[str], server_ip: str, nics: Any, port: int, elastic: bool = False) -> str:
    """Return a command of the shell that sets the variables of :func:`create_run_env_vars` first.

    Args:
        command: The command that each process runs.
        server_ip: Address of the store.
        nics: Interfaces of the hosts.
        port: Port of the store.
        elastic: Whether processes may join and leave.

    Returns:
        The command.
    """
    variables = create_run_env_vars(server_ip, nics, port, elastic)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, *map(shlex.quote, command)])


def register_shutdown_event() -> threading.Event:
    """Create an event that is set when this process is asked to end.

    Returns:
        The event.
    """
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: event.set())
    return event


def _get_min_start_hosts(settings: Any) -> int:
    """Return the hosts that a job needs at its start."""
    return 1


def _common(settings: Any) -> list[str]:
    options = ["--horovod"]
    if settings.output_filename:
        options += ["--output-dir", settings.output_filename]
    if settings.prefix_output_with_timestamp:
        options += ["--prefix-timestamp"]
    if settings.ssh_port:
        options += ["--ssh-port", str(settings.ssh_port)]
    if settings.ssh_identity_file:
        options += ["--ssh-identity-file", settings.ssh_identity_file]
    return options


def _smdrun(words: list[str], env: dict[str, str], settings: Any) -> int:
    env = {**env, "PYTHONUNBUFFERED": "1"}
    if settings.verbose >= 2:
        print(f"Launching horovod task function: {shlex.join(words)}")
    sys.stdout.flush()
    sys.stderr.flush()
    if settings.run_func_mode:
        # The caller's process may have threads, and handlers for signals. If it is killed, so is the job.
        return safe_shell_exec.execute([sys.executable, "-m", "smdistributed", *words], env=env)
    os.environ.update(env)
    return _core.smdrun(["smdrun", *words], sys.executable)


def _smdrun_with_reason(
    words: list[str], command: Sequence[str], env: dict[str, str], settings: Any
) -> tuple[int, str | None]:
    """Run `smdrun`; return its exit code and the reason of a failure, if it has written one."""
    with tempfile.TemporaryDirectory() as folder:
        reason = Path(folder) / "reason"
        code = _smdrun([*words, "--reason-file", str(reason), *command], env, settings)
        return code, reason.read_text() if reason.exists() else None


def gloo_run(settings: Any, nics: Any, env: dict[str, str], server_ip: str | None, command: Sequence[str]) -> None:
    """Run a job as :func:`launch_gloo`, with the arguments of the command line.

    Args:
        settings: Settings of the job.
        nics: Interfaces of the hosts.
        env: Environment of the processes.
        server_ip: This host's address for the processes.
        command: The command that each process runs.

    Raises:
        RuntimeError: A process failed.
    """
    launch_gloo(command, None, settings, nics, env, server_ip)


def launch_gloo(
    command: Sequence[str],
    exec_command: Any,
    settings: Any,
    nics: Any,
    env: dict[str, str],
    server_ip: str | None,
) -> None:
    """Run a job on fixed hosts to its end.

    Args:
        command: The command that each process runs.
        exec_command: Runs a process to its end by other means than ssh, in a thread of its own. It gets a command of
            the shell, the process's :class:`SlotInfo`, and events; when one of them is set, it must end the process. It
            returns the exit code and the time of the end in seconds since 1970. The process needs the job's secret,
            ``settings.key`` if there is one, in ``_HOROVOD_SECRET_KEY``, where this process has it meanwhile. With
            ``None`` the core's launcher starts processes, and needs neither ``nics`` nor ``server_ip``.
        settings: Settings of the job.
        nics: Interfaces of the hosts.
        env: Environment of the processes.
        server_ip: This host's address for the processes.

    Raises:
        RuntimeError: A process failed.
        Exception: The exception of ``exec_command``, after the other processes have ended.
    """
    if exec_command is not None:
        _launch_by(exec_command, command, settings, nics, env, server_ip or "127.0.0.1")
        return
    listed = parse_hosts(settings.hosts)
    words = ["-n", str(settings.num_proc), "--no-python", "--grace", "5", *_common(settings)]
    words += ["--hosts", ",".join(f"{host.hostname}:{host.slots}" for host in listed)]
    code, reason = _smdrun_with_reason(words, command, env, settings)
    if code == 0:
        return
    if reason is None:
        raise RuntimeError(f"{FAILED}, thus causing the job to be terminated: it ended with status code {code}")
    raise _first_failure(*reason.split())


def _first_failure(rank: Any, code: Any) -> RuntimeError:
    print(f"Process {rank} exit with status code {code}.", file=sys.stderr)
    return RuntimeError(
        f"{FAILED}, thus causing the job to be terminated. The first process to do so was:\n"
        f"Process name: {rank}\nExit code: {code}\n"
    )


def _launch_by(
    exec_command: Any, command: Sequence[str], settings: Any, nics: Any, env: dict[str, str], server_ip: str
) -> None:
    """Start all processes of a job, which connect through a store in this process."""
    slots = get_host_assignments(parse_hosts(settings.hosts), settings.num_proc, settings.num_proc)
    server, over = RendezvousServer(settings.verbose, settings.key), threading.Event()
    port = server.start()
    line = get_run_command(command, server_ip, nics, port)

    def run(slot: SlotInfo) -> tuple[int, float]:
        try:
            code, at = exec_command(_with_place(line, slot, env), slot, [over])
        except BaseException:
            over.set()
            raise
        if code != 0:
            over.set()
        return code, at

    try:
        server.init(slots)
        with environment(**{secret.HOROVOD_SECRET_KEY: str(codec.dumps_base64(server.key))}):
            ends = execute_function_multithreaded(run, [[slot] for slot in slots])
    finally:
        # The processes still run if the wait for them was interrupted.
        over.set()
        server.stop()
    failures = [(at, rank, code) for rank, (code, at) in ends.items() if code != 0]
    if failures:
        _, rank, code = min(failures)
        raise _first_failure(rank, code)


def gloo_run_elastic(settings: Any, env: dict[str, str], command: Sequence[str]) -> None:
    """Run a job as :func:`launch_gloo_elastic`, with the arguments of the command line.

    Args:
        settings: Settings of the job.
        env: Environment of the processes.
        command: The command that each process runs.

    Raises:
        RuntimeError: The job could not continue.
    """
    launch_gloo_elastic(command, None, settings, env, None, None, None)


def launch_gloo_elastic(
    command: Sequence[str],
    exec_command: Any,
    settings: Any,
    env: dict[str, str],
    get_common_interfaces: Any,
    rendezvous: Any,
    executable: str | None,
) -> None:
    """Run a job whose hosts may join and leave.

    Args:
        command: The command that each process runs.
        exec_command: See :func:`launch_gloo`. With ``None`` the core's launcher starts processes, and ignores the last
            three arguments.
        settings: Settings of the job.
        env: Environment of the processes.
        get_common_interfaces: Returns interfaces of the hosts for the job's
            :class:`~horovod.runner.elastic.driver.ElasticDriver`.
        rendezvous: The store from which processes get their places; a new one by default.
        executable: Accepted for compatibility, without effect.

    Raises:
        RuntimeError: The job could not continue.
    """
    if exec_command is not None:
        rendezvous = rendezvous or RendezvousServer(settings.verbose, settings.key)
        _launch_elastic_by(exec_command, command, settings, env, get_common_interfaces, rendezvous)
        return
    words = ["elastic", "-n", str(settings.num_proc or settings.min_num_proc), *_common(settings)]
    options = {
        "--min-np": settings.min_num_proc,
        "--max-np": settings.max_num_proc,
        "--elastic-timeout": settings.elastic_timeout,
        "--reset-limit": settings.reset_limit,
    }
    for name, value in options.items():
        words += [name, str(value)] if value is not None else []
    if settings.cooldown_range:
        words += ["--blacklist-cooldown-range", *map(str, settings.cooldown_range)]
    if isinstance(settings.discovery, FixedHosts):
        found = settings.discovery.find_available_hosts_and_slots()
        words += ["--hosts", ",".join(f"{name}:{slots}" for name, slots in found.items())]
    else:
        words += ["--host-discovery-script", settings.discovery.script]
        slots = settings.discovery.default_slots
        words += ["--slots-per-host", str(slots)] if slots is not None else []
    code, reason = _smdrun_with_reason(words, command, env, settings)
    if code == 0:
        return
    raise _elastic_failure(reason or f"it ended with status code {code}")


def _elastic_failure(why: str) -> RuntimeError:
    if "number of resets" in why or "unable to broadcast" in why or "timed out" in why:
        return RuntimeError(f"{why}. {FAILED}")
    return RuntimeError(f"{FAILED}, thus causing the job to be terminated: {why}")


def _launch_elastic_by(
    exec_command: Any,
    command: Sequence[str],
    settings: Any,
    env: dict[str, str],
    get_common_interfaces: Any,
    rendezvous: RendezvousServer,
) -> None:
    """Start all processes of an elastic job, which get their ranks from a driver in this process."""
    driver = ElasticDriver(
        rendezvous,
        settings.discovery,
        settings.min_num_proc,
        settings.max_num_proc,
        timeout=settings.elastic_timeout,
        reset_limit=settings.reset_limit,
        cooldown_range=settings.cooldown_range,
        verbose=settings.verbose,
    )
    port = rendezvous.start(create_rendezvous_handler(driver))
    first = settings.num_proc or settings.min_num_proc
    try:
        driver.wait_for_available_slots(first)
        nics = get_common_interfaces(driver) if get_common_interfaces else settings.nics
        line = get_run_command(command, get_driver_ip(nics), nics, port, elastic=True)
        with environment(**{secret.HOROVOD_SECRET_KEY: str(codec.dumps_base64(rendezvous.key))}):
            driver.start(first, lambda slot, events: exec_command(_with_place(line, slot, env), slot, events))
            results = driver.get_results()
    finally:
        driver.stop()
        rendezvous.stop()
    if results.error_message is not None:
        raise _elastic_failure(results.error_message)


def _with_place(line: str, slot: SlotInfo, env: dict[str, str]) -> str:
    """Return the command line of one process."""
    variables = {name: value for name, value in env.items() if is_exportable(name)} | create_slot_env_vars(slot)
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), line])
