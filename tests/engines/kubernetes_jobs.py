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
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import files_left, shared_memory

from support import hosts, launchers

#: Packages with the schemas.
PACKAGES = ("kubernetes_validate", "kubeflow_trainer_api", "kubeflow", "yaml")
missing = [each for each in PACKAGES if importlib.util.find_spec(each) is None]
pytestmark = [pytest.mark.timeout(200), pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")]

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "examples" / "kubernetes"
#: The version of Kubernetes whose schemas are used.
KUBERNETES = "1.34"


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


def start_pods(commands, environments):
    """Starts the pods' commands at the same time."""
    own = {**launchers.clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}"
    return [
        subprocess.Popen(
            command, env={**own, **environment}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, environment in zip(commands, environments, strict=True)
    ]


def rank_of(pod):
    """Id of the process that trains: that of the pod, or the one that this starts in another PID namespace."""
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    return int(children[0]) if "unshare" in pod.args else pod.pid


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


def run_pods(commands, environments):
    """The outputs of the pods' commands, which run at the same time."""
    pods = start_pods(commands, environments)
    try:
        outputs = [pod.communicate(timeout=150)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0] * len(pods), "\n".join(outputs)
    return outputs


def check_training(outputs):
    """The two ranks train as one process does."""
    (one,) = run_pods([[sys.executable, "examples/resumable_digits.py", "--epochs", "3"]], [{}])
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


def before_the_command(pod):
    """What starts the command of a container: unless the pod shares a PID namespace, its process is the first one of its own."""
    return [] if pod.get("shareProcessNamespace") else ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.fixture
def secret():
    return {"SMD_SECRET": secrets.token_hex(16)}


def indexed_job(arguments, secret, size=2, master="localhost"):
    """Commands and variables of the pods of the Job."""
    document = load("job.yaml")[1]
    pod = container(document, "spec")
    command = [part.replace("--checkpoints /checkpoints", arguments) for part in pod["command"]]
    command = [*before_the_command(pod_spec(document, "spec")), *command]
    given = {each["name"]: each["value"] for each in pod["env"]}
    assert given["MASTER_ADDR"] == "digits-0.digits"
    port = str(launchers.free_port())
    given |= {"WORLD_SIZE": str(size), "MASTER_ADDR": master, "MASTER_PORT": port, **secret}
    return [command] * size, [{**given, "JOB_COMPLETION_INDEX": str(index)} for index in range(size)]


def pytorch_job(arguments, secret, size=2, master="localhost"):
    """Commands and variables of the pods of the PyTorchJob, with one master."""
    (document,) = load("pytorchjob.yaml")
    kinds = ["Master"] + ["Worker"] * (size - 1)
    pods = [pod_spec(document, "spec", "pytorchReplicaSpecs", kind) for kind in kinds]
    commands = []
    for pod in pods:
        command = pod["containers"][0]["command"]
        command = [*command[: command.index("--checkpoints")], *arguments.split()]
        commands.append([*before_the_command(pod), *command])
    port = str(launchers.free_port())
    variables = [
        {
            "PYTHONUNBUFFERED": "1", "MASTER_ADDR": master, "MASTER_PORT": port, "WORLD_SIZE": str(size),
            "RANK": str(rank), "PET_NNODES": str(size), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": master, "PET_MASTER_PORT": port, **secret,
        }
        for rank in range(size)
    ]  # fmt: skip
    return commands, variables


@pytest.mark.parametrize("job", [indexed_job, pytorch_job])
def test_a_job_trains(job, secret):
    check_training(run_pods(*job("--epochs 3", secret)))


needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))


@contextlib.contextmanager
def training_pods(job, number, secret, folder):
    """Starts a job whose pods train without end, each in a network namespace and with a host name of its own.

    Yields the processes of the pods, and a reader of each one's output, once the first epoch is over. At the end, the pods are killed.
    """
    with hosts.Hosts(number) as network:
        commands, variables = job("--epochs 100000", secret, number, hosts.address(0))
        # All prefixes but `unshare` end in `exec`: the process of the pod is the rank.
        commands = [[*network.on(rank), *command] for rank, command in enumerate(commands)]
        own = {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        pods = start_pods(commands, [{**each, **own} for each in variables])
        readers = [Reader(pod) for pod in pods]
        try:
            readers[0].wait_for("epoch 1:", 120)
            yield pods, readers
        finally:
            for pod in pods:
                pod.kill()
                pod.wait()


@needs_network
@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGTERM)])
@pytest.mark.parametrize("job", [indexed_job, pytorch_job])
def test_a_killed_pod_is_named_by_the_others(job, victim, how, secret, tmp_path):
    """Rank 0 serves the store where the ranks met.

    SIGTERM is what a pod gets that is deleted or evicted. The first process of a PID namespace ignores it if it has no handler.
    """
    before = shared_memory()
    with training_pods(job, 3, secret, tmp_path) as (pods, readers):
        os.kill(rank_of(pods[victim]), how)
        killed = time.monotonic()
        survivors = [rank for rank in range(3) if rank != victim]
        # The end of the process comes later: on a busy machine Python takes seconds to free what PyTorch has made.
        named = [readers[rank].wait_for(f"rank {victim} died", 60) - killed for rank in survivors]
        for pod in pods:
            pod.wait(60)
    assert max(named) < 10, [reader.text() for reader in readers]
    for rank in survivors:
        assert pods[rank].returncode not in (0, -signal.SIGKILL), readers[rank].text()
    assert files_left(tmp_path, before) == []


@needs_network
@pytest.mark.parametrize("job", [indexed_job, pytorch_job])
def test_a_job_that_is_deleted_leaves_nothing(job, secret, tmp_path):
    """All pods get SIGTERM."""
    before = shared_memory()
    with training_pods(job, 2, secret, tmp_path) as (pods, readers):
        for pod in pods:
            os.kill(rank_of(pod), signal.SIGTERM)
        for pod in pods:
            pod.wait(10)
    assert all(pod.returncode != 0 for pod in pods), [reader.text() for reader in readers]
    assert files_left(tmp_path, before) == []


def test_a_job_of_the_trainer_trains(secret):
    (document,) = load("trainjob.yaml")
    trainer = document["spec"]["trainer"]
    program, *arguments = trainer["command"]
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "--epochs", "3"]
    common = {
        "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(launchers.free_port()), **secret,
    }  # fmt: skip
    check_training(run_pods([command] * 2, [{**common, "PET_NODE_RANK": str(rank)} for rank in range(2)]))


@launchers.needs("mpirun")
def test_a_job_of_the_mpi_operator_trains(tmp_path, secret):
    (document,) = load("mpijob.yaml")
    command = container(document, "spec", "mpiReplicaSpecs", "Launcher")["command"]
    hosts = tmp_path / "hostfile"
    hosts.write_text("localhost slots=2\n")
    # The operator's variables for Open MPI; the agent that reaches a worker is not needed on one host.
    variables = {
        "OMPI_MCA_orte_default_hostfile": str(hosts), "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_orte_tmpdir_base": str(tmp_path), **secret,
    }  # fmt: skip
    check_training(run_pods([[*command, "--epochs", "3"]], [variables]))


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
