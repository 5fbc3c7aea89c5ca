"""Spark applications on a cluster of two executors, all on this machine (``local-cluster``), or on two network namespaces.

with SparkCluster() as cluster:
    cluster.run("examples/spark/pytorch_digits.py", "--num-proc", "2")
with SparkCluster(has_hosts=True) as cluster:
    application = cluster.start("train.py")
    cluster.cut(1)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from waiting import output_of

from support import hosts, launchers, neighbours
from support.neighbours import processes

ROOT = Path(__file__).resolve().parents[2]
#: A variable of all processes of an application, by which they are found.
_MARK = "ENGINE_TEST_SPARK"
#: Seconds in which the processes of an application end after it.
_PATIENCE = 60.0
#: Seconds in which the workers of the hosts find their master.
_START = 60.0

_HEAD = """
import os, signal, subprocess, sys, threading, time
import horovod.spark
from pyspark.sql import SparkSession

def spark(**options):
    builder = SparkSession.builder.master(os.environ["ENGINE_TEST_MASTER"]).config("spark.ui.enabled", "false")
    for name, value in options.items():
        builder = builder.config(name.replace("_", "."), value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
"""


class SparkCluster:
    """A folder and an environment for Spark applications, from `with` on until its end."""

    def __init__(self, master: str = "local-cluster[2,1,1024]", user: int = 0, has_hosts: bool = False) -> None:
        """Takes the cluster that applications make, and the user who starts them: 0 is that of the test, the other one `NOBODY`.

        With `has_hosts`, there is one cluster with a worker on each of two hosts, and applications start on the first one.
        """
        self._user = user
        self._hosts = hosts.Hosts(2) if has_hosts else None
        #: The master and the workers of the hosts.
        self._daemons: list[subprocess.Popen[bytes]] = []
        master = f"spark://{hosts.address(0)}:7077" if has_hosts else master
        # The test's own folder is closed to other users.
        self.folder = neighbours.private_folder(user) if user else Path(tempfile.mkdtemp(prefix="spark"))
        self.environment = {
            **launchers.clean_environment(),
            _MARK: str(self.folder),
            "ENGINE_TEST_MASTER": master,
            "OMP_NUM_THREADS": "1",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "TMPDIR": str(self.folder / "tmp"),
            "SPARK_HOME": str(self.folder / "home"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def __enter__(self) -> SparkCluster:
        import pyspark

        (self.folder / "tmp").mkdir()
        # Workers of a local cluster write below SPARK_HOME.
        home = self.folder / "home"
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            if path.name != "work":
                (home / path.name).symlink_to(path)
        if self._user:
            for folder in (home, self.folder / "tmp"):
                os.chown(folder, self._user, self._user)
        try:
            self._start_hosts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        try:
            self.check_that_all_have_ended()
        finally:
            if self._hosts:
                self._hosts.__exit__()
            for pid, _ in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_hosts(self) -> None:
        if not self._hosts:
            return
        self._hosts.__enter__()
        self._hosts.name_each_other()
        address, log = hosts.address(0), self.folder / "master.log"
        master = ["master.Master", "--host", address, "--port", "7077", "--webui-port", "0"]
        self._daemon(0, master, log)
        for number in range(self._hosts.count):
            options = ["--host", hosts.address(number), "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            worker = ["worker.Worker", *options, self.environment["ENGINE_TEST_MASTER"]]
            self._daemon(number, worker, self.folder / f"worker{number}.log")
        deadline = time.monotonic() + _START
        while log.read_text().count("Registering worker") < self._hosts.count:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def _daemon(self, number: int, words: list[str], log: Path) -> None:
        spark_class = self.folder / "home" / "bin" / "spark-class"
        name, *options = words
        command = [*self._on(number), str(spark_class), f"org.apache.spark.deploy.{name}", *options]
        with log.open("wb") as output:
            self._daemons.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=self.environment)
            )

    def _on(self, number: int) -> list[str]:
        """What runs a command on a host."""
        own = ["env", f"SPARK_LOCAL_IP={hosts.address(number)}"]
        return [*self._hosts.on(number), *own] if self._hosts else neighbours.as_user(self._user)

    def cut(self, number: int) -> None:
        """Cuts the link of a host."""
        assert self._hosts
        self._hosts.cut(number)

    def check_that_all_have_ended(self, patience: float = _PATIENCE) -> None:
        """Waits until no process of an application is left."""
        deadline = time.monotonic() + patience
        while self.processes():
            assert time.monotonic() < deadline, f"processes are left: {self.processes()}"
            time.sleep(0.2)

    def script(self, name: str, body: str) -> Path:
        """Writes an application that can call `spark()`."""
        path = self.folder / f"{name}.py"
        path.write_text(_HEAD + textwrap.dedent(body))
        return path

    def start(self, *command: object) -> subprocess.Popen[str]:
        """Starts an application."""
        words = [*self._on(0), sys.executable, *map(str, command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, cwd=ROOT, env=self.environment, text=True, **pipes)

    def run(self, *command: object, timeout: float = 600.0) -> str:
        """Runs an application, and returns what it printed."""
        process = self.start(*command)
        try:
            return output_of(process, timeout)
        finally:
            process.kill()
            process.wait()

    def submit(self, *command: object, timeout: float = 600.0) -> str:
        """Runs an application by `spark-submit`; returns its standard output and error."""
        words = [Path(sys.executable).parent / "spark-submit", "--master", self.environment["ENGINE_TEST_MASTER"]]
        words += ["--conf", "spark.ui.enabled=false", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([*map(str, words)], cwd=ROOT, env=self.environment, text=True, **pipes)
        try:
            return output_of(process, timeout)
        finally:
            process.kill()
            process.wait()

    def results(self, script: str, *options: object) -> object:
        """Runs one of the examples, and returns its results."""
        out = self.folder / "results.json"
        out.unlink(missing_ok=True)
        options = (*options, "--master", self.environment["ENGINE_TEST_MASTER"])
        self.run(ROOT / "examples" / "spark" / script, *options, "--out", out)
        return json.loads(out.read_text())

    def processes(self) -> list[tuple[int, str]]:
        """Ids and commands of the processes of applications."""
        return [(pid, " ".join(each.words)) for pid, each in processes.having(_MARK, self.folder).items()]

    def ranks(self) -> list[tuple[int, str]]:
        """Ids and commands of the processes that train."""
        return [(pid, command) for pid, command in self.processes() if "horovod.runner.run_task" in command]

    def files_with(self, *secrets: bytes) -> list[str]:
        """Files below the folder that contain one of the texts."""
        found = []
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_relative_to(self.folder / "home" / "jars"):
                    data = path.read_bytes()
                    found += [str(path) for secret in secrets if secret in data]
        return found
