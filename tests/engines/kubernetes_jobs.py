"""The manifests of examples/kubernetes against the published schemas, and their commands in the environment that each operator sets.

There is no cluster here: processes of this machine take the place of pods, with the variables of the operators' documentation
(https://www.kubeflow.org/docs/components/trainer, Kubernetes' "Indexed Job for parallel processing").
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import processes
from leftovers import files_left, processes_left, shared_memory

from support import forks, hosts, launchers

#: Packages with the schemas.
PACKAGES = ("kubernetes_validate", "kubeflow_trainer_api", "kubeflow", "yaml")
missing = [each for each in PACKAGES if importlib.util.find_spec(each) is None]
pytestmark = [pytest.mark.timeout(200), pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")]

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "examples" / "kubernetes"
#: The version of Kubernetes whose schemas are used.
KUBERNETES = "1.34"
#: What all manifests run.
TRAIN = "examples/resumable_digits.py"


def load(name):
    import yaml

    return [document for document in yaml.safe_load_all((MANIFESTS / name).read_text()) if document]


def unknown_keys(value, kind, path):
    """Keys of a manifest that a model of Kubeflow's or Kubernetes' Python client does not have, and missing ones."""
    import kubernetes.client.models as core
    from kubeflow.training import models

    inner = re.fullmatch(r"(?:list\[|dict\(str, )(.*)[\])]", kind)
    if inner:
        items = enumerate(value) if isinstance(value, list) else value.items()
        return [each for key, item in items for each in unknown_keys(item, inner.group(1), f"{path}.{key}")]
    model = getattr(models, kind, None) or getattr(core, kind, None)
    if model is None:
        expected = {"str": str, "int": int, "bool": bool, "object": object, "float": float}[kind]
        return [] if isinstance(value, expected) else [f"{path}: {value!r} is no {kind}"]
    names = {key: name for name, key in model.attribute_map.items()}
    found = [f"{path}.{key}" for key in value if key not in names]
    for key, item in value.items():
        if key in names:
            found += unknown_keys(item, model.openapi_types[names[key]], f"{path}.{key}")
    return found


def test_the_job_has_the_form_of_kubernetes():
    import kubernetes_validate

    documents = load("job.yaml")
    assert [each["kind"] for each in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("name", "kind"), [("pytorchjob.yaml", "KubeflowOrgV1PyTorchJob"), ("mpijob.yaml", "KubeflowOrgV1MPIJob")]
)
def test_jobs_of_the_training_operator_have_its_form(name, kind):
    # The fields of MPIJob that the manifest uses are the same in v1, whose models are published, and in v2beta1.
    (document,) = load(name)
    assert unknown_keys(document, kind, name) == []
    document["spec"]["unheard"] = 1
    assert unknown_keys(document, kind, name) == [f"{name}.spec.unheard"]


def test_the_job_of_the_trainer_has_its_form():
    from kubeflow_trainer_api import models

    (document,) = load("trainjob.yaml")
    read = models.TrainerV1alpha1TrainJob.from_dict(document)
    # Fields that are not in the schema would be left out.
    assert read.to_dict() == document


@dataclass(frozen=True)
class Pod:
    """The command of a pod's container, and the variables that the operator and the manifest set."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    #: Whether its first process has the id 1, as it has unless the containers share a PID namespace.
    has_own_ids: bool = False


def start_pods(pods):
    """Starts the pods' commands at the same time."""
    own = {**launchers.clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [subprocess.Popen(pod.command, env={**own, **pod.variables}, cwd=ROOT, text=True, **pipes) for pod in pods]


def first_of(process):
    """Id of the first process of a pod, which gets its signals: `unshare` starts it in a PID namespace of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if "unshare" in process.args else process.pid


class Reader(threading.Thread):
    """Reads what a pod prints, and notes when each line came."""

    def __init__(self, pod):
        super().__init__(daemon=True)
        self._pod = pod
        self._lines = []
        self.start()

    def run(self):
        for line in self._pod.stdout:
            self._lines.append((time.monotonic(), line))

    def text(self):
        return "".join(line for _, line in self._lines)

    def wait_for(self, words, patience):
        """When the first line with the words came."""
        deadline = time.monotonic() + patience
        while True:
            is_last = not self.is_alive() or time.monotonic() > deadline
            for when, line in list(self._lines):
                if words in line:
                    return when
            assert not is_last, f"no line has `{words}`:\n{self.text()}"
            time.sleep(0.02)


def run_pods(pods):
    """The outputs of the pods' commands, which run at the same time."""
    started = start_pods(pods)
    try:
        outputs = [each.communicate(timeout=150 * forks.patience)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * len(pods), "\n".join(outputs)
    return outputs


def check_training(outputs):
    """The two ranks train as one process does."""
    (one,) = run_pods([Pod([sys.executable, TRAIN, "--epochs", "3"])])
    expected = [float(loss) for loss in re.findall(r"^epoch \d+: loss ([0-9.]+)$", one, re.MULTILINE)]
    found = [float(loss) for loss in re.findall(r"^epoch \d+: loss ([0-9.]+)$", "\n".join(outputs), re.MULTILINE)]
    assert len(expected) == 3
    assert found == pytest.approx(expected, abs=2e-5)
    assert "on 2 ranks" in "\n".join(outputs)


def pod_spec(document, *path):
    for key in path:
        document = document[key]
    return document["template"]["spec"]


def container(document, *path):
    return pod_spec(document, *path)["containers"][0]


@pytest.fixture
def secret():
    return {"SMD_SECRET": secrets.token_hex(16)}


def indexed_job(arguments, secret, size=2, master="localhost"):
    """The pods of the Job."""
    document = load("job.yaml")[1]
    pod = container(document, "spec")
    command = [part.replace("--checkpoints /checkpoints", arguments) for part in pod["command"]]
    has_own_ids = not pod_spec(document, "spec").get("shareProcessNamespace")
    given = {each["name"]: each["value"] for each in pod["env"]}
    assert given["MASTER_ADDR"] == "digits-0.digits"
    port = str(launchers.free_port())
    given |= {"WORLD_SIZE": str(size), "MASTER_ADDR": master, "MASTER_PORT": port, **secret}
    return [Pod(command, {**given, "JOB_COMPLETION_INDEX": str(index)}, has_own_ids) for index in range(size)]


def pytorch_job(arguments, secret, size=2, master="localhost"):
    """The pods of the PyTorchJob, with one master."""
    (document,) = load("pytorchjob.yaml")
    port = str(launchers.free_port())
    pods = []
    for rank, kind in enumerate(["Master"] + ["Worker"] * (size - 1)):
        spec = pod_spec(document, "spec", "pytorchReplicaSpecs", kind)
        command = spec["containers"][0]["command"]
        command = [*command[: command.index("--checkpoints")], *arguments.split()]
        variables = {
            "PYTHONUNBUFFERED": "1", "MASTER_ADDR": master, "MASTER_PORT": port, "WORLD_SIZE": str(size),
            "RANK": str(rank), "PET_NNODES": str(size), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": master, "PET_MASTER_PORT": port, **secret,
        }  # fmt: skip
        pods.append(Pod(command, variables, not spec.get("shareProcessNamespace")))
    return pods


def train_job(arguments, secret, size=2, master="localhost"):
    """The pods of the TrainJob. torchrun, the first process of each, starts the rank."""
    (document,) = load("trainjob.yaml")
    trainer = document["spec"]["trainer"]
    program, *words = trainer["command"]
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words, *arguments.split()]
    common = {
        "PET_NNODES": str(size), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": master, "PET_MASTER_PORT": str(launchers.free_port()), **secret,
    }  # fmt: skip
    # The pods' form is that of the runtime `torch-distributed`, whose containers share no PID namespace.
    return [Pod(command, {**common, "PET_NODE_RANK": str(rank)}, has_own_ids=True) for rank in range(size)]


def mpi_job(arguments, secret, size, folder):
    """The launcher of the MPIJob, which starts all ranks on this host; all files are below `folder`."""
    (document,) = load("mpijob.yaml")
    command = container(document, "spec", "mpiReplicaSpecs", "Launcher")["command"]
    assert command[:3] == ["mpirun", "-n", "2"]
    command = ["mpirun", "-n", str(size), *command[3:], *arguments.split()]
    hostfile = folder / "hostfile"
    hostfile.write_text(f"localhost slots={size}\n")
    # The operator's variables for Open MPI; the agent that reaches a worker is not needed on one host.
    variables = {
        "OMPI_MCA_orte_default_hostfile": str(hostfile), "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **secret,
    }  # fmt: skip
    return [Pod(command, variables)]


JOBS = [indexed_job, pytorch_job, train_job]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_trains(job, secret):
    check_training(run_pods(job("--epochs 3", secret)))


@launchers.needs("mpirun")
def test_a_job_of_the_mpi_operator_trains(tmp_path, secret):
    (launcher,) = mpi_job("--epochs 3", secret, 2, tmp_path)
    check_training(run_pods([replace(launcher, variables={**launcher.variables, "TMPDIR": str(tmp_path)})]))


needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))


@contextlib.contextmanager
def training(pods, folder):
    """Starts pods that train without end, with `folder` for their temporary files.

    Yields their processes, and a reader of each one's output, once the first epoch is over. At the end, the pods are killed.
    """
    own = {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    started = start_pods([replace(pod, variables={**pod.variables, **own}) for pod in pods])
    readers = [Reader(each) for each in started]
    try:
        readers[0].wait_for("epoch 1:", 120 * forks.patience)
        yield started, readers
    finally:
        for each in started:
            each.kill()
            each.wait()


@contextlib.contextmanager
def training_pods(job, number, secret, folder):
    """Like `training`, with each pod in a network namespace and with a host name of its own."""
    with hosts.Hosts(number) as network:
        pods = []
        for rank, pod in enumerate(job("--epochs 100000", secret, number, hosts.address(0))):
            # All prefixes but `unshare` end in `exec`: the process of the pod is that of its command.
            prefix = [*network.on(rank), *(["unshare", "--pid", "--fork", "--kill-child"] if pod.has_own_ids else [])]
            pods.append(replace(pod, command=[*prefix, *pod.command]))
        with training(pods, folder) as started:
            yield started


def check_that_nothing_is_left(folder, before):
    """No process of a job is left, not even one that has lost its parent, and no file."""
    assert processes_left(folder) == {}
    assert files_left(folder, before) == []


@needs_network
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("job", JOBS)
def test_a_killed_rank_is_named_by_the_others(job, victim, how, secret, tmp_path):
    """Rank 0 serves the store where the ranks met.

    The process that trains gets SIGKILL, as if it used too much memory. The first process of a pod gets SIGTERM, as if the pod were
    deleted or evicted. The first process of a PID namespace ignores SIGTERM if it has no handler. torchrun has one: it sends SIGTERM
    to its rank, which ends without a message, and prints that it got the signal.
    """
    before = shared_memory()
    with training_pods(job, 3, secret, tmp_path) as (pods, readers):
        pid = processes.ranks(tmp_path, TRAIN)[victim] if how == "SIGKILL" else first_of(pods[victim])
        os.kill(pid, signal.Signals[how])
        killed = time.monotonic()
        survivors = [rank for rank in range(3) if rank != victim]
        # The end of the process comes later: on a busy machine Python takes seconds to free what PyTorch has made.
        named = [readers[rank].wait_for(f"rank {victim} died", 60) - killed for rank in survivors]
        for pod in pods:
            pod.wait(60)
        check_that_nothing_is_left(tmp_path, before)
    assert max(named) < 10, [reader.text() for reader in readers]
    assert pods[victim].returncode != 0
    if job is train_job:
        # torchrun says how its rank ended, or that it was told to end it.
        words = "traceback : Signal 9 (SIGKILL)" if how == "SIGKILL" else "got signal: 15"
        assert words in readers[victim].text(), readers[victim].text()
    for rank in survivors:
        assert pods[rank].returncode not in (0, -signal.SIGKILL), readers[rank].text()


@needs_network
@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_is_deleted_leaves_nothing(job, secret, tmp_path):
    """The first processes of all pods get SIGTERM."""
    before = shared_memory()
    with training_pods(job, 2, secret, tmp_path) as (pods, readers):
        for pod in pods:
            os.kill(first_of(pod), signal.SIGTERM)
        for pod in pods:
            pod.wait(10)
        check_that_nothing_is_left(tmp_path, before)
    assert all(pod.returncode != 0 for pod in pods), [reader.text() for reader in readers]


@launchers.needs("mpirun")
@pytest.mark.parametrize("how", ["a rank is killed", "the launcher is deleted"])
def test_a_job_of_the_mpi_operator_that_is_ended_leaves_nothing(how, secret, tmp_path):
    """The operator deletes the launcher at the end of its job: mpirun gets SIGTERM, and ends all ranks."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    before = shared_memory()
    with training(mpi_job("--epochs 100000", secret, 3, tmp_path), folder) as ((launcher,), (reader,)):
        found = processes.ranks(folder, TRAIN)
        assert sorted(found) == [0, 1, 2]
        if how == "a rank is killed":
            os.kill(found[1], signal.SIGKILL)
        else:
            launcher.terminate()
        ended = time.monotonic()
        launcher.wait(60)
        assert time.monotonic() - ended < 10, reader.text()
        check_that_nothing_is_left(folder, before)
    reader.join(10)
    assert launcher.returncode != 0, reader.text()
    if how == "a rank is killed":
        # mpirun sends SIGTERM to the other ranks one second after the first one has ended. They have named it by then.
        found = re.findall(r"rank 1 died \(.*?\) while rank (\d) was in", reader.text())
        assert sorted(found) == ["0", "2"], reader.text()
        assert re.search(r"mpirun noticed that process rank 1 .* exited on signal 9", reader.text()), reader.text()


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_images_take_what_the_repository_has(name):
    """There is no container engine here: what is copied exists, and each line is an instruction."""
    lines = [line for line in (MANIFESTS / name).read_text().splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} == {"FROM", "RUN", "COPY", "ARG", "WORKDIR"} | (
        {"ENV"} if name.endswith("cuda") else set()
    )
    sources = [line.split()[1] for line in lines if line.startswith("COPY")]
    # The wheel is built before the image.
    assert [source for source in sources if not (ROOT / source).exists()] == ["dist/*.whl"]
