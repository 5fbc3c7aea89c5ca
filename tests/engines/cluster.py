"""A Ray cluster of several raylets on this machine. Each has an address of the loopback network, or a network namespace of its own.

with RayCluster(cpus=[1, 1]) as cluster:
    cluster.run("examples/ray/horovod_digits.py", "--workers", "2")
    cluster.remove(1)
    cluster.add(cpus=1)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support import hosts, launchers, neighbours
from support.neighbours import processes

ROOT = Path(__file__).resolve().parents[2]
#: A variable of all processes of a cluster, by which they are found.
_MARK = "ENGINE_TEST_CLUSTER"
#: Longest time in which a node starts or ends, in seconds.
_PATIENCE = 300.0


class RayCluster:
    """A cluster from `with` on until its end. The first node is the head."""

    def __init__(
        self,
        cpus: list[int],
        gpus: list[list[int]] | None = None,
        has_hosts: bool = False,
        joining: int = 0,
        has_job_server: bool = False,
        user: int = 0,
    ) -> None:
        """Takes the number of CPUs of each node, and the indices of its GPUs.

        With `has_hosts`, each node is a host to the library, and scripts run on that of the head; there are hosts for `joining` more
        nodes. Otherwise the cluster is one host. With `has_job_server`, which needs `ray[default]`, the cluster accepts `submit`.
        All processes are those of `user`: 0 is that of the test, the other one `neighbours.NOBODY`.
        """
        self._cpus = cpus
        self._gpus = gpus or [[] for _ in cpus]
        self._hosts = hosts.Hosts(len(cpus) + joining) if has_hosts else None
        self._user = user
        # Paths of sockets have at most 107 bytes.
        self.folder = neighbours.private_folder(user) if user else Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        (self.folder / "tmp").mkdir()
        if user:
            os.chown(self.folder / "tmp", user, user)
        self.address = ""
        self._job_server = f"http://{self._address(0)}:{_free_port()}" if has_job_server else ""
        #: `ray start` of each node, by number; None where it was removed.
        self.nodes: list[subprocess.Popen[bytes] | None] = []
        self.environment = {
            **launchers.clean_environment(),
            _MARK: str(self.folder),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Workers compete with the test that waits for them.
            "RAY_worker_niceness": "0",
            # A machine that does other work needs longer than Ray's defaults.
            "RAY_worker_register_timeout_seconds": "120",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_health_check_period_ms": "10000",
            "RAY_health_check_failure_threshold": "12",
            "RAY_DEDUP_LOGS": "0",
            "CUDA_VISIBLE_DEVICES": "",
            # The network of the hosts is Ethernet, whatever this machine has.
            **({"NCCL_IB_DISABLE": "1"} if has_hosts else {}),
        }

    def __enter__(self) -> RayCluster:
        try:
            if self._hosts:
                self._hosts.__enter__()
            for cpus, gpus in zip(self._cpus, self._gpus, strict=True):
                self.add(cpus, gpus)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # The head last: a node without a head waits for it.
            for number in reversed(range(len(self.nodes))):
                self.remove(number)
            # Agents of a node end when they see that it has ended.
            deadline = time.monotonic() + _PATIENCE
            while self.processes():
                assert time.monotonic() < deadline, f"the cluster left processes behind: {self.processes()}"
                time.sleep(0.2)
        finally:
            for pid, _ in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._hosts:
                self._hosts.__exit__()
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, cpus: int, gpus: Sequence[int] = ()) -> int:
        """Starts a node, waits until the cluster has it, and returns its number."""
        number = len(self.nodes)
        host = self._address(number)
        command = [*self._on(number), sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += ["--num-cpus", str(cpus), "--node-ip-address", host, "--object-store-memory", str(100 << 20)]
        command += ["--disable-usage-stats", "--num-gpus", str(len(gpus))]
        if number == 0:
            port = _free_port()
            self.address = f"{host}:{port}"
            self.environment["RAY_ADDRESS"] = self.address
            command += ["--head", "--port", str(port), "--temp-dir", str(self.folder)]
            command += ["--include-dashboard", "true" if self._job_server else "false"]
            if self._job_server:
                # Jobs are submitted to the dashboard.
                command += ["--dashboard-host", host, "--dashboard-port", self._job_server.rpartition(":")[2]]
            # Another cluster of this machine may have the default.
            command += ["--ray-client-server-port", str(_free_port())]
        else:
            command += ["--address", self.address]
        output = (self.folder / f"node{number}.txt").open("wb")
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        node = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self.nodes.append(node)
        deadline = time.monotonic() + _PATIENCE
        while "Ray runtime started" not in self.log(number):
            assert node.poll() is None, f"node {number} has not started:\n{self.log(number)}"
            assert time.monotonic() < deadline, f"node {number} has not started in time:\n{self.log(number)}"
            time.sleep(0.1)
        return number

    def _address(self, number: int) -> str:
        return hosts.address(number) if self._hosts else f"127.0.0.{number + 1}"

    def log(self, number: int) -> str:
        """What `ray start` of a node has printed."""
        return (self.folder / f"node{number}.txt").read_text(errors="replace")

    def remove(self, number: int) -> None:
        """Ends a node as `ray stop` does, and waits until it has ended."""
        node = self.nodes[number]
        if node is None:
            return
        self.nodes[number] = None
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            node.kill()
            raise

    def kill(self, number: int) -> None:
        """Kills the raylet of a node. Its workers and `ray start` end with it."""
        os.kill(self._raylet(number), signal.SIGKILL)
        node, self.nodes[number] = self.nodes[number], None
        node.wait(_PATIENCE)

    def cut(self, number: int) -> None:
        """Cuts the link of a node that has a host of its own. Its processes go on."""
        self._hosts.cut(number)

    def workers(self, number: int) -> list[int]:
        """Ids of the processes of the actors on a node that are ranks."""
        parent = f"\nPPid:\t{self._raylet(number)}\n"
        actors = [pid for pid, command in self.processes() if "RankActor" in command]
        return [pid for pid in actors if parent in Path(f"/proc/{pid}/status").read_text()]

    def _raylet(self, number: int) -> int:
        address = f"--node_ip_address={self._address(number)}"
        (found,) = [
            pid
            for pid, command in self.processes()
            if Path(command.split()[0]).name == "raylet" and address in command.split()
        ]
        return found

    def start(self, *command: object) -> subprocess.Popen[str]:
        """Starts a Python script that uses the cluster."""
        words = [*self._on(0), sys.executable, *map(str, command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, cwd=ROOT, env=self.environment, text=True, **pipes)

    def run(self, *command: object, timeout: float = 600.0) -> str:
        """Runs a Python script that uses the cluster, and returns what it printed."""
        return self._output_of(self.start(*command), timeout)

    def submit(self, *command: object, timeout: float = 600.0) -> str:
        """Runs a Python script by `ray job submit` to its end, and returns what that printed."""
        words = [*self._on(0), sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
        words += ["--address", self._job_server, "--", sys.executable, *map(str, command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self._output_of(subprocess.Popen(words, cwd=ROOT, env=self.environment, text=True, **pipes), timeout)

    def _output_of(self, process: subprocess.Popen[str], timeout: float) -> str:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, output
        return output

    def results(self, script: str, *options: object) -> object:
        """Runs one of the examples, and returns its results."""
        out = self.folder / "results.json"
        out.unlink(missing_ok=True)
        self.run(ROOT / "examples" / "ray" / script, *options, "--out", out)
        return json.loads(out.read_text())

    def _on(self, number: int) -> list[str]:
        return [*(self._hosts.on(number) if self._hosts else []), *neighbours.as_user(self._user)]

    def processes(self) -> list[tuple[int, str]]:
        """Ids and commands of the cluster's processes and of the processes that they started."""
        return [(pid, " ".join(each.words)) for pid, each in processes.having(_MARK, self.folder).items()]


def _free_port() -> int:
    # Of those that Linux gives to outgoing connections: Ray keeps 10002 to 19999 for its workers.
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
