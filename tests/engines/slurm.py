"""A Slurm cluster on this machine: slurmctld and a slurmd on each of two network namespaces, and munged.

with SlurmCluster() as cluster:
    cluster.run("srun", "-N2", "-n2", sys.executable, "train.py")
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support import hosts, launchers
from support.neighbours import processes

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "scontrol", "squeue")
#: Longest time in which the cluster comes up, in seconds.
_PATIENCE = 60.0

_CONFIGURATION = """
ClusterName=engines
SlurmctldHost=smd-host-0({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=requeue_setup_env_fail
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed (package slurm-wlm)"
    return hosts.missing_network()


class SlurmCluster:
    """A cluster of two hosts from `with` on until its end."""

    def __init__(self) -> None:
        self._hosts = hosts.Hosts(2)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **launchers.clean_environment(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> SlurmCluster:
        try:
            self._hosts.__enter__()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        self._hosts.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        folder, numbers = self.folder, range(self._hosts.count)
        self._hosts.name_each_other()
        nodes = "\n".join(
            f"NodeName=smd-host-{number} NodeAddr={hosts.address(number)} CPUs=2 RealMemory=1000" for number in numbers
        )
        text = _CONFIGURATION.format(folder=folder, address=hosts.address(0), nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        # Nothing uses cgroups here; this plug-in does not look for them at its start.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # munged wants that all users can reach its socket.
        folder.chmod(0o755)
        # The folders for temporary files of the hosts, which have the same file system, are for PMIx.
        for name in ("state", *(f"{kind}.smd-host-{number}" for number in numbers for kind in ("spool", "tmp"))):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        options = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", ["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *options])
        deadline = time.monotonic() + _PATIENCE
        while not (folder / "munge.socket").exists():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.1)
        self._daemon("slurmctld", [*self._hosts.on(0), "slurmctld", "-D", "-c"])
        for number in numbers:
            self._daemon(f"slurmd{number}", [*self._hosts.on(number), "slurmd", "-D"])
        while self.ask("sinfo", "--noheader", "--format=%T %D").split() != ["idle", str(self._hosts.count)]:
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.2)

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=self.environment)
            )

    def _logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    @contextlib.contextmanager
    def without_link(self, number: int) -> Iterator[None]:
        """Cuts the link of a host, until the end of `with`."""
        self._hosts.cut(number)
        try:
            yield
        finally:
            subprocess.run(["ip", "-n", f"{self._hosts.name}-{number}", "link", "set", "eth0", "up"], check=True)

    def command(self, *words: object) -> list[str]:
        """The command on the first host."""
        return [*self._hosts.on(0), *map(str, words)]

    def start(self, *words: object, **variables: str) -> subprocess.Popen[str]:
        """Starts a command on the first host."""
        return subprocess.Popen(
            self.command(*words),
            cwd=ROOT,
            env={**self.environment, **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *words: object, timeout: float = 240.0, **variables: str) -> str:
        """Runs a command on the first host, and returns what it printed."""
        process = self.start(*words, **variables)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, output + self._logs()
        return output

    def ask(self, *words: object) -> str:
        """What a command prints, whether it succeeds or not."""
        done = subprocess.run(self.command(*words), env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout

    def ranks(self, script: str) -> list[int]:
        """Ids of the processes of Python that run a script of this cluster's jobs, in the order of their ranks."""
        found = {}
        for pid, each in processes.having("SLURM_CONF", self.folder / "slurm.conf").items():
            if each.words[0] == sys.executable and any(word.endswith(script) for word in each.words[1:]):
                found[int(each.variables["SLURM_PROCID"])] = pid
        return [pid for _, pid in sorted(found.items())]
