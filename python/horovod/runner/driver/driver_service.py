"""Finds the interfaces at which all hosts of a job reach each other."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from horovod.runner.common.service import driver_service
from horovod.runner.common.util import codec, secret
from horovod.runner.common.util.network import Addresses
from horovod.runner.common.util.timeout import Timeout
from horovod.runner.util import cache, remote
from horovod.runner.util.network import Interfaces, get_local_host_intfs

#: Seconds to wait for a host, unless the settings set a time.
_TIMEOUT_S = 30
_POLL_SECONDS = 0.2


class HorovodRunDriverService(driver_service.BasicDriverService):
    """The launcher's end of the search for interfaces.

    Args:
        num_hosts: Number of hosts.
        key: The job's secret.
        nics: Interfaces at which the service is reached; all by default.
    """

    NAME = "horovod driver service"

    def __init__(self, num_hosts: int, key: bytes, nics: Any = None) -> None:
        super().__init__(num_hosts, self.NAME, key, nics)


class HorovodRunDriverClient(driver_service.BasicDriverClient):
    """The client with which a host's task reports its interfaces to the driver.

    Args:
        driver_addresses: Addresses of the driver to try, by interface.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: Number of attempts for each address.
    """

    def __init__(
        self,
        driver_addresses: Addresses,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        name = HorovodRunDriverService.NAME
        super().__init__(name, driver_addresses, key, verbose, match_intf, probe_timeout, attempts)


def _launch_task(host: str, is_here: bool, task_input: str, error_files: IO[bytes], settings: Any) -> subprocess.Popen:
    """Start a host's task. Parameters go to its standard input, because other users can read command lines."""
    path = os.environ.get("PYTHONPATH")
    words = [*([f"PYTHONPATH={shlex.quote(path)}"] if path else []), shlex.quote(sys.executable)]
    command = f"cd {shlex.quote(os.getcwd())} && {' '.join(words)} -m horovod.runner.task_fn"
    if not is_here:
        command = remote.get_ssh_command(command, host, settings.ssh_port, settings.ssh_identity_file)
    if settings.verbose >= 2:
        print(f"Launching horovod task function: {command}", flush=True)
    task = subprocess.Popen(
        command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=error_files, text=True
    )
    assert task.stdin is not None
    try:
        task.stdin.write(task_input)
        task.stdin.close()
    except BrokenPipeError:
        # The task has ended; the driver reports which tasks are missing.
        return task
    return task


def _driver_fn(all_host_names: Sequence[str], local_host_names: set[str], settings: Any) -> set[str]:
    """Let each host's task probe the addresses of the next host's task.

    Raises:
        TimeoutError: A host is missing.
        RuntimeError: A task has failed, or hosts have no interface in common.
    """
    key = settings.key or secret.make_secret_key()
    limit = settings.start_timeout or Timeout(_TIMEOUT_S, "{activity} took longer than {timeout} seconds")
    driver = HorovodRunDriverService(len(all_host_names), key, settings.nics)
    tasks: list[subprocess.Popen] = []
    error_files: list[IO[bytes]] = []
    try:
        for index, host in enumerate(all_host_names):
            task_settings = (index, len(all_host_names), driver.addresses(), key, limit.remaining(), settings.nics)
            # A file, because a pipe would fill up while tasks run, and processes that they started may keep it open.
            error_files.append(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the others below
            is_here = host in local_host_names
            tasks.append(_launch_task(host, is_here, str(codec.dumps_base64(task_settings)), error_files[-1], settings))
        for wait in (driver.wait_for_initial_registration, driver.wait_for_task_to_task_address_updates):
            _wait(wait, limit, all_host_names, tasks, error_files)
        common = driver.get_common_interfaces()
        for task in tasks:
            # Each task waits for the previous one; the addresses are known already.
            with contextlib.suppress(subprocess.TimeoutExpired):
                task.wait(limit.remaining() + 1)
        return common
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()
            task.wait()
        for file in error_files:
            file.close()
        driver.shutdown()


def _wait(
    wait: Any,
    limit: Timeout,
    names: Sequence[str],
    tasks: Sequence[subprocess.Popen],
    error_files: Sequence[IO[bytes]],
) -> None:
    """Wait until tasks have registered; stop early if one has ended before that."""
    while True:
        try:
            return wait(min(_POLL_SECONDS, limit.remaining()))
        except TimeoutError:
            ended = [
                f"{name}: {_last_error(task, error_file)}"
                for name, task, error_file in zip(names, tasks, error_files, strict=True)
                if task.poll()
            ]
            if ended:
                raise RuntimeError("; ".join(ended)) from None
            if limit.timed_out():
                silent = [name for name, task in zip(names, tasks, strict=True) if task.poll() is None]
                raise TimeoutError(f"no answer in time from the hosts {', '.join(silent)}") from None


def _last_error(task: subprocess.Popen, error_file: IO[bytes]) -> str:
    error_file.seek(0)
    text = error_file.read().decode(errors="replace").strip()
    return text.splitlines()[-1] if text else f"exit code {task.returncode}"


def get_local_interfaces(settings: Any) -> Interfaces:
    """Return the interfaces of a job on this host alone.

    Args:
        settings: Settings of the job.

    Returns:
        The interfaces of the settings, or else the loopback's.
    """
    if settings.verbose >= 2:
        print("All hosts are local, finding the interfaces with address 127.0.0.1")
    found = Interfaces(settings.nics or {name for name, ip in get_local_host_intfs().items() if ip == "127.0.0.1"})
    if settings.verbose >= 2:
        print(f"Local interface found {' '.join(found)}")
    return found


@cache.use_cache()
def _found(all_host_names: tuple[str, ...], local_host_names: tuple[str, ...], settings: Any) -> list[str]:
    return sorted(_driver_fn(all_host_names, set(local_host_names), settings))


class _Unkept:
    """Leaves settings out of the cache key: the other parameters determine the result."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)

    def __repr__(self) -> str:
        return "settings"


def get_common_interfaces(
    settings: Any, all_host_names: Sequence[str], remote_host_names: Sequence[str] | None = None, fn_cache: Any = None
) -> Interfaces:
    """Return the interfaces at which all hosts of a job reach each other.

    Args:
        settings: Settings of the job; their ``nics``, if there are any, are the result.
        all_host_names: All hosts.
        remote_host_names: The hosts other than this one.
        fn_cache: A :class:`~horovod.runner.util.cache.Cache` that keeps the answer, or ``None``.

    Returns:
        The interfaces.

    Raises:
        TimeoutError: A host does not answer.
        RuntimeError: A task has failed, or hosts have no interface in common.
    """
    if not remote_host_names:
        return get_local_interfaces(settings)
    if settings.nics:
        found = Interfaces(settings.nics)
    else:
        if settings.verbose >= 2:
            print("Testing interfaces on all the hosts.", flush=True)
        here = tuple(name for name in all_host_names if name not in set(remote_host_names))
        found = Interfaces(_found(tuple(all_host_names), here, _Unkept(settings), fn_cache=fn_cache))
    if settings.verbose >= 2:
        print(f"Common interface found: {' '.join(found)}", flush=True)
    return found
