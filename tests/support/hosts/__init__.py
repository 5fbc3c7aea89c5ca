"""Network namespaces that stand for hosts. They share processors and disk, but nothing by which the library identifies
a host.

    with Hosts(2) as hosts:
        run_ranks(body, 4, launcher=hosts)              # mpirun: ranks 0, 1 on the first host, 2, 3 on the second one
        run_ranks(body, 4, launcher=hosts.by_hand())    # without MPI: each rank started with the variables of torchrun
        run_ranks(body, 4, launcher=hosts.torchrun())   # torchrun, once on each host
        hosts.cut(1)                                    # the second host's link goes down

A bridge in a namespace of its own connects the hosts. It is not visible from outside.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NETWORK = "10.213.7"
_PREFIX = "smd-"
#: Always free, because each namespace has ports of its own.
_MASTER_PORT = "29500"

#: The remote shell of mpirun: runs a command on a host. Its arguments are options, the address, and the command.
_REMOTE_SHELL = """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$(($(echo "$1" | sed 's/.*[.]//') - 10)); shift
exec {on_host} "$host" sh -c "$*"
"""

#: The `ssh` that `smdrun`, `horovodrun` and Open MPI call. Its arguments are options, the address, options, and the
#: command. All options but `-x` have values.
_SSH = """#!/bin/sh
while case "$1" in -x) shift ;; -*) shift 2 ;; *) false ;; esac; do :; done
host=$1; shift
while case "$1" in -*) shift 2 ;; *) false ;; esac; do :; done
exec {python} {sshd} run "$host" "$*"
"""

_SSHD = Path(__file__).with_name("sshd.py")

#: `ip netns exec` mounts the files of a namespace's folder here over those of /etc.
_ETC = Path("/etc/netns")

#: Runs a command on host number `$1`.
_ON_HOST = """#!/bin/sh
host=$1; shift
exec ip netns exec {name}-$host unshare --uts sh -c 'hostname "$0"; exec "$@"' smd-host-$host "$@"
"""


class Hosts:
    """`count` hosts that exist within a `with` block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"{_PREFIX}{os.getpid()}"
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        _remove_leftovers()
        self._folder = tempfile.TemporaryDirectory(prefix="smd-hosts-")
        switch = f"{self.name}-switch"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for host in range(self.count):
                self._add(host, switch)
        except BaseException:
            self.__exit__()
            raise
        self._script("on-host", _ON_HOST.format(name=self.name))
        self._script("remote-shell", _REMOTE_SHELL.format(on_host=self._path("on-host")))
        self._script("ssh", _SSH.format(python=sys.executable, sshd=_SSHD))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            with server:
                """Leaving the context closes the server's standard input, which ends it."""
        for name in (*(f"{self.name}-{host}" for host in range(self.count)), f"{self.name}-switch"):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(_ETC / name, ignore_errors=True)
        if self._folder:
            self._folder.cleanup()

    def command(self, n: int, options: list[str]) -> list[str]:
        """Returns the command that starts `n` ranks with mpirun, host by host; the Python file is appended to it."""
        slots = -(-n // self.count)
        network = f"{_NETWORK}.0/24"
        return [
            *self.on(0),
            *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(n)),
            *("--host", ",".join(f"{address(host)}:{slots}" for host in range(self.count))),
            *("--mca", "plm_rsh_agent", self._path("remote-shell"), "--mca", "orte_keep_fqdn_hostnames", "1"),
            *("--mca", "orte_tmpdir_base", self._path("")),
            *("--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network),
            *options,
            sys.executable,
        ]

    def etc(self, host: int) -> Path:
        """The folder whose files processes on `host` see in place of those of /etc."""
        folder = _ETC / f"{self.name}-{host}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def name_each_other(self) -> None:
        """Lets all hosts find each other by name."""
        names = "".join(f"{address(host)} smd-host-{host}\n" for host in range(self.count))
        for host in range(self.count):
            (self.etc(host) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def remote_shell(self) -> str:
        """Path of the command that an MPI launcher calls in place of `ssh`."""
        return self._path("remote-shell")

    def by_hand(self, own: Mapping[int, Mapping[str, str]] | None = None) -> ByHand:
        """Returns a launcher that starts each rank itself; `own` has extra variables of single ranks."""
        return ByHand(self, own or {})

    def torchrun(self) -> Torchrun:
        """Returns a launcher that starts torchrun on each host."""
        return Torchrun(self)

    def on(self, host: int) -> list[str]:
        """Returns the command prefix that runs a command on `host`."""
        return [self._path("on-host"), str(host)]

    def with_ssh(self) -> dict[str, str]:
        """Starts an `ssh` server on each host; returns the variables that let `ssh` find the hosts."""
        for server in [self.start_sshd(host) for host in range(self.count)]:
            assert server.stdout
            assert server.stdout.readline() == "ready\n", f"no server of `ssh`: {server.args}"
        return {"PATH": os.pathsep.join([self.ssh_folder(), os.environ["PATH"]])}

    def start_sshd(
        self, host: int, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts an `ssh` server on `host`, which prints a line when it is ready and ends with the `with` block.

        Args:
            host: The host.
            prefix: What starts the server there.
            environment: Its variables and those of the commands that it runs.
        """
        command = [*self.on(host), *prefix, sys.executable, str(_SSHD), "serve", address(host)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        server = subprocess.Popen(command, env=environment, text=True, **pipes)
        self._servers.append(server)
        return server

    def ssh_folder(self) -> str:
        """The folder with the `ssh` that reaches these servers."""
        return self._path("")

    def cut(self, host: int) -> None:
        """Takes the link of `host` down: it neither sends nor receives any more."""
        _ip("-n", f"{self.name}-{host}", "link", "set", "eth0", "down")

    def _add(self, host: int, switch: str) -> None:
        name, port = f"{self.name}-{host}", f"port{host}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _path(self, name: str) -> str:
        assert self._folder, "use hosts inside of a `with` block"
        return str(Path(self._folder.name) / name)

    def _script(self, name: str, text: str) -> None:
        path = Path(self._path(name))
        path.write_text(text)
        path.chmod(0o700)


@dataclass(frozen=True)
class ByHand:
    """Ranks on several hosts, host by host, with the variables that torchrun sets."""

    hosts: Hosts
    #: Extra variables of single ranks.
    own: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def starts(self, n: int, program: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Returns the command and the variables of each process."""
        local = -(-n // self.hosts.count)
        common = {"WORLD_SIZE": str(n), "MASTER_ADDR": address(0), "MASTER_PORT": _MASTER_PORT}
        found = []
        for rank in range(n):
            host = rank // local
            size = min(local, n - host * local)
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(size)}
            variables = common | place | dict(self.own.get(rank, {}))
            found.append(([*self.hosts.on(host), sys.executable, *program], variables))
        return found


@dataclass(frozen=True)
class Torchrun:
    """Runs torchrun once on each host."""

    hosts: Hosts

    def starts(self, n: int, program: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Returns the command and the variables of each process."""
        assert n % self.hosts.count == 0, "the number of ranks must be a multiple of the number of hosts"
        local = ["--nproc-per-node", str(n // self.hosts.count), "--nnodes", str(self.hosts.count)]
        master = ["--master-addr", address(0), "--master-port", _MASTER_PORT]
        return [
            (
                [
                    *self.hosts.on(host),
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *(*local, "--node-rank", str(host), *master, *program),
                ],
                {},
            )
            for host in range(self.hosts.count)
        ]


def address(host: int) -> str:
    """Returns the address of a host in the network of all hosts."""
    return f"{_NETWORK}.{10 + host}"


def missing() -> str | None:
    """Returns the reason why hosts with MPI cannot be made on this machine, or None if they can."""
    for tool, package in (("mpirun", "openmpi-bin"), ("mpicc", "libopenmpi-dev")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package {package})"
    return missing_network()


@functools.cache
def missing_network() -> str | None:
    """Returns the reason why hosts cannot be made on this machine, or None if they can."""
    if shutil.which("ip") is None:
        return "ip is not installed (package iproute2)"
    try:
        with Hosts(1) as one:
            subprocess.run([*one.on(0), "true"], check=True, capture_output=True, text=True)
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        return f"network namespaces cannot be made here: {message.strip()}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _remove_leftovers() -> None:
    """Removes namespaces of processes that were killed before they could remove them."""
    with contextlib.suppress(FileNotFoundError):
        for path in Path("/run/netns").iterdir():
            words = path.name.removeprefix(_PREFIX).split("-")
            if path.name.startswith(_PREFIX) and words[0].isdigit() and not Path("/proc", words[0]).exists():
                subprocess.run(["ip", "netns", "del", path.name], check=False, stderr=subprocess.DEVNULL)
