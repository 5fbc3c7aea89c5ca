"""Pods of the manifests of examples/kubernetes: processes of this machine, with the variables that each operator sets.

    pods = pytorch_job("--epochs 3", secret)
    run_pods(pods)                          # their outputs
    with Pods(pods) as running:             # as a kubelet or a controller does: what fails is started again
        running.wait(limit=3)

The variables are those of the operators' documentation (https://www.kubeflow.org/docs/components/trainer, Kubernetes' "Indexed Job for
parallel processing").
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support import forks, hosts, launchers

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "examples" / "kubernetes"
#: What all manifests run.
TRAIN = "examples/resumable_digits.py"
#: Starts a command as the first process of a PID namespace, which ends with it.
_OWN_IDS = ("unshare", "--pid", "--fork", "--kill-child")
#: What `sshd` gives to its commands on Debian.
_PATH_OF_SSHD = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def load(name: str) -> list[dict[str, Any]]:
    """Returns the documents of a manifest."""
    import yaml

    return [document for document in yaml.safe_load_all((MANIFESTS / name).read_text()) if document]


@dataclass(frozen=True)
class Pod:
    """The command of a pod's container, and the variables that the operator and the manifest set."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    #: Whether its first process has the id 1, as it has unless the containers share a PID namespace.
    has_own_ids: bool = False

    def on(self, prefix: list[str]) -> Pod:
        """Returns the pod with the network that `prefix` enters."""
        # All prefixes but `unshare` end in `exec`: the process of the pod is that of its command.
        return replace(self, command=[*prefix, *(_OWN_IDS if self.has_own_ids else ()), *self.command])

    def environment(self) -> dict[str, str]:
        """The variables of the container: those of its image, and those that are set for the pod."""
        own = {**launchers.clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
        own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}"
        return {**own, **self.variables}

    def start(self) -> subprocess.Popen[str]:
        """Starts the command."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(self.command, env=self.environment(), cwd=ROOT, text=True, **pipes)


def first_of(process: subprocess.Popen[str]) -> int:
    """Id of the first process of a pod, which gets its signals: `unshare` starts it in a PID namespace of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if "unshare" in process.args else process.pid


class Reader(threading.Thread):
    """Reads what a pod prints, and notes when each line came."""

    def __init__(self, pod: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._pod = pod
        self._lines: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        for line in self._pod.stdout:
            self._lines.append((time.monotonic(), line))

    def text(self) -> str:
        return "".join(line for _, line in self._lines)

    def wait_for(self, words: str, patience: float) -> float:
        """When the first line with the words came."""
        deadline = time.monotonic() + patience
        while True:
            is_last = not self.is_alive() or time.monotonic() > deadline
            for when, line in list(self._lines):
                if words in line:
                    return when
            assert not is_last, f"no line has `{words}`:\n{self.text()}"
            time.sleep(0.02)


def run_pods(pods: list[Pod]) -> list[str]:
    """The outputs of the pods' commands, which run at the same time."""
    started = [pod.start() for pod in pods]
    try:
        outputs = [each.communicate(timeout=150 * forks.patience)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * len(pods), "\n".join(outputs)
    return outputs


class Pods:
    """Pods that run within a `with` block, with `folder` for their temporary files."""

    def __init__(self, pods: list[Pod], folder: Path) -> None:
        own = {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        self._pods = [replace(pod, variables={**pod.variables, **own}) for pod in pods]
        #: The process of each pod, and what reads its output.
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[Reader] = []
        #: How often each pod was started again.
        self.restarts = [0] * len(pods)
        self._texts = [""] * len(pods)

    def __enter__(self) -> Pods:
        self.processes = [pod.start() for pod in self._pods]
        self.readers = [Reader(each) for each in self.processes]
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.kill()
            each.wait()

    def text(self) -> str:
        """What all pods have printed, before and after they were started again."""
        return "\n".join(old + reader.text() for old, reader in zip(self._texts, self.readers, strict=True))

    def finish(self, limit: int, seconds: float) -> None:
        """Waits until the commands of all pods have succeeded, and starts those that fail again.

        A pod is started again at once, and then after 1 s, 2 s, 4 s. Kubernetes waits ten times as long.

        Args:
            limit: How many failures of all pods together the job allows.
            seconds: The longest wait.
        """
        deadline = time.monotonic() + seconds * forks.patience
        due: dict[int, float] = {}
        while True:
            codes = [each.poll() for each in self.processes]
            if codes == [0] * len(codes):
                return
            assert time.monotonic() < deadline, f"exit codes {codes}, restarts {self.restarts}:\n{self.text()}"
            for number, code in enumerate(codes):
                if code in (None, 0):
                    continue
                if number not in due:
                    due[number] = time.monotonic() + (2 ** (self.restarts[number] - 1) if self.restarts[number] else 0)
                    self.restarts[number] += 1
                    assert sum(self.restarts) <= limit, f"the job has failed:\n{self.text()}"
                if time.monotonic() >= due[number]:
                    del due[number]
                    self.readers[number].join(10)
                    self._texts[number] += self.readers[number].text()
                    self.processes[number] = self._pods[number].start()
                    self.readers[number] = Reader(self.processes[number])
            time.sleep(0.05)


def pod_spec(document: dict[str, Any], *path: str) -> dict[str, Any]:
    """The pods' form below the keys of `path`."""
    for key in path:
        document = document[key]
    return document["template"]["spec"]


def _command(words: list[str], arguments: str) -> list[str]:
    """The command of a manifest with other arguments for the script."""
    given = "--checkpoints /checkpoints"
    if words[0] == "sh":
        assert words[-1].endswith(given)
        return [*words[:-1], words[-1].replace(given, arguments)]
    assert words[-2:] == given.split()
    return [*words[:-2], *arguments.split()]


def indexed_job(arguments: str, secret: dict[str, str], size: int = 2, master: str = "localhost") -> list[Pod]:
    """The pods of the Job."""
    spec = pod_spec(load("job.yaml")[1], "spec")
    (container,) = spec["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given["MASTER_ADDR"] == "digits-0.digits"
    port = str(launchers.free_port())
    given |= {"WORLD_SIZE": str(size), "MASTER_ADDR": master, "MASTER_PORT": port, **secret}
    command, has_own_ids = _command(container["command"], arguments), not spec.get("shareProcessNamespace")
    return [Pod(command, {**given, "JOB_COMPLETION_INDEX": str(index)}, has_own_ids) for index in range(size)]


def pytorch_job(arguments: str, secret: dict[str, str], size: int = 2, master: str = "localhost") -> list[Pod]:
    """The pods of the PyTorchJob, with one master."""
    (document,) = load("pytorchjob.yaml")
    port = str(launchers.free_port())
    pods = []
    for rank, kind in enumerate(["Master"] + ["Worker"] * (size - 1)):
        spec = pod_spec(document, "spec", "pytorchReplicaSpecs", kind)
        variables = {
            "PYTHONUNBUFFERED": "1", "MASTER_ADDR": master, "MASTER_PORT": port, "WORLD_SIZE": str(size),
            "RANK": str(rank), "PET_NNODES": str(size), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": master, "PET_MASTER_PORT": port, **secret,
        }  # fmt: skip
        command = _command(spec["containers"][0]["command"], arguments)
        pods.append(Pod(command, variables, not spec.get("shareProcessNamespace")))
    return pods


def train_job(arguments: str, secret: dict[str, str], size: int = 2, master: str = "localhost") -> list[Pod]:
    """The pods of the TrainJob. torchrun, the first process of each, starts the rank."""
    (document,) = load("trainjob.yaml")
    trainer = document["spec"]["trainer"]
    program, *words = _command(trainer["command"], arguments)
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    common = {
        "PET_NNODES": str(size), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": master, "PET_MASTER_PORT": str(launchers.free_port()), **secret,
    }  # fmt: skip
    # The pods' form is that of the runtime `torch-distributed`, whose containers share no PID namespace.
    return [Pod(command, {**common, "PET_NODE_RANK": str(rank)}, has_own_ids=True) for rank in range(size)]


def mpi_job(arguments: str, secret: dict[str, str], workers: list[str], folder: Path, slots: int = 1) -> Pod:
    """The launcher of the MPIJob, whose hostfile with the names of `workers` is in `folder`."""
    (document,) = load("mpijob.yaml")
    (container,) = pod_spec(document, "spec", "mpiReplicaSpecs", "Launcher")["containers"]
    *shell, line = _command(container["command"], arguments)
    assert "exec mpirun -n 2 " in line
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{worker} slots={slots}\n" for worker in workers))
    # The operator's variables for Open MPI.
    variables = {
        "OMPI_MCA_orte_default_hostfile": str(hostfile), "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", **secret,
    }  # fmt: skip
    command = [*shell, line.replace("-n 2 ", f"-n {slots * len(workers)} ")]
    return Pod(command, variables, has_own_ids=True)


class Workers:
    """Worker pods of an MPIJob on the hosts of `network` after its first one, on which the launcher runs.

    Each has a PID namespace, whose first process is its `sshd`. Its commands have no variables but those of `sshd`, and those of the
    test that the image would not need.
    """

    def __init__(self, network: hosts.Hosts, folder: Path, variables: dict[str, str] | None = None) -> None:
        """Starts the workers; their image sets `variables`."""
        self.names = [f"digits-worker-{number}.digits.default.svc" for number in range(network.count - 1)]
        self._network = network
        own = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
        # The library's cache is used, as other tests do.
        cache = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "SMD_CACHE_DIR") if name in os.environ}
        self._environment = {"PATH": _PATH_OF_SSHD, **cache, **own, **(variables or {})}
        names = "".join(f"{hosts.address(number + 1)} {name}\n" for number, name in enumerate(self.names))
        for host in range(network.count):
            (network.etc(host) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self._servers = [self._start(number) for number in range(len(self.names))]

    def launcher(self, arguments: str, secret: dict[str, str], folder: Path) -> Pod:
        """The pod of the launcher."""
        pod = mpi_job(arguments, secret, self.names, folder).on(self._network.on(0))
        path = os.pathsep.join([self._network.ssh_folder(), str(Path(sys.executable).parent), os.environ["PATH"]])
        return replace(pod, variables={**pod.variables, "PATH": path})

    def delete(self, number: int) -> None:
        """Ends a worker with all of its processes."""
        os.kill(first_of(self._servers[number]), signal.SIGKILL)
        self._servers[number].wait()

    def replace(self, number: int) -> None:
        """Deletes a worker; the operator starts another one of the same name."""
        self.delete(number)
        self._servers[number] = self._start(number)

    def _start(self, number: int) -> subprocess.Popen[str]:
        server = self._network.start_sshd(number + 1, _OWN_IDS, self._environment)
        assert server.stdout.readline() == "ready\n"
        return server


@contextlib.contextmanager
def training(pods: list[Pod], folder: Path) -> Iterator[tuple[list[subprocess.Popen[str]], list[Reader]]]:
    """Starts pods that train without end; yields their processes and readers once the first epoch is over."""
    with Pods(pods, folder) as running:
        running.readers[0].wait_for("epoch 1:", 120 * forks.patience)
        yield running.processes, running.readers
