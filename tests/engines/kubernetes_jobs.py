"""The manifests of examples/kubernetes against the published schemas, and their commands in the environment that each operator sets.

There is no cluster here: processes of this machine take the place of pods (`pods.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import files_left, processes_left, shared_memory
from pods import (
    MANIFESTS,
    ROOT,
    TRAIN,
    Pod,
    Pods,
    Workers,
    first_of,
    indexed_job,
    load,
    mpi_job,
    pod_spec,
    pytorch_job,
    run_pods,
    train_job,
    training,
)
from waiting import VARIABLES

from support import forks, hosts, launchers
from support.neighbours import processes

#: Packages with the schemas.
PACKAGES = ("kubernetes_validate", "kubeflow_trainer_api", "kubeflow", "yaml")
missing = [each for each in PACKAGES if importlib.util.find_spec(each) is None]
pytestmark = [pytest.mark.timeout(200), pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")]

#: The version of Kubernetes whose schemas are used.
KUBERNETES = "1.34"


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


def manifests():
    """By manifest: the forms of the pods that train, and the command with the script."""
    job, (pytorch,), (mpi,) = load("job.yaml")[1], load("pytorchjob.yaml"), load("mpijob.yaml")
    (trainer,) = load("trainjob.yaml")
    (patch,) = trainer["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    replicas = [pod_spec(pytorch, "spec", "pytorchReplicaSpecs", kind) for kind in ("Master", "Worker")]
    launcher, worker = (pod_spec(mpi, "spec", "mpiReplicaSpecs", kind) for kind in ("Launcher", "Worker"))
    return {
        "job.yaml": ([pod_spec(job, "spec")], pod_spec(job, "spec")["containers"][0]["command"]),
        "pytorchjob.yaml": (replicas, replicas[0]["containers"][0]["command"]),
        "trainjob.yaml": ([pod_spec(node["template"], "spec")], trainer["spec"]["trainer"]["command"]),
        "mpijob.yaml": ([worker], launcher["containers"][0]["command"]),
    }


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml", "trainjob.yaml", "mpijob.yaml"])
def test_pods_that_train_have_the_claim_with_the_checkpoints(name):
    specs, command = manifests()[name]
    assert " ".join(command).endswith(f"{TRAIN} --checkpoints /checkpoints")
    for spec in specs:
        (container,), (volume,) = spec["containers"], spec["volumes"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/checkpoints"}]
        assert volume["persistentVolumeClaim"] == {"claimName": "checkpoints"}


def losses(output):
    """The loss of each epoch that rank 0 has printed."""
    return {
        int(epoch): float(loss) for epoch, loss in re.findall(r"^epoch (\d+): loss ([0-9.]+)$", output, re.MULTILINE)
    }


@pytest.fixture(scope="module")
def of_one_process():
    """What one process prints in four epochs, without an operator."""
    (output,) = run_pods([Pod([sys.executable, TRAIN, "--epochs", "4"])])
    assert sorted(losses(output)) == [1, 2, 3, 4]
    return output


def check_training(output, of_one_process):
    """The two ranks train as one process does."""
    expected = losses(of_one_process)
    assert losses(output) == pytest.approx({epoch: expected[epoch] for epoch in (1, 2, 3)}, abs=2e-5)
    assert "on 2 ranks" in output


@pytest.fixture
def secret():
    return {"SMD_SECRET": secrets.token_hex(16)}


JOBS = [indexed_job, pytorch_job, train_job]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_trains(job, secret, of_one_process):
    check_training("\n".join(run_pods(job("--epochs 3", secret))), of_one_process)


needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))


@contextlib.contextmanager
def pods_on_hosts(job, arguments, number, secret):
    """The pods of a job, each with a network and a host name of its own."""
    with hosts.Hosts(number) as network:
        yield on_hosts(job, arguments, network, secret)


def on_hosts(job, arguments, network, variables):
    """The pods of a job, each on a host of the network."""
    pods = job(arguments, variables, network.count, hosts.address(0))
    return [pod.on(network.on(rank)) for rank, pod in enumerate(pods)]


@contextlib.contextmanager
def training_pods(job, number, secret, folder):
    """Like `training`, with each pod on a host of its own."""
    with pods_on_hosts(job, "--epochs 100000", number, secret) as pods, training(pods, folder) as started:
        yield started


def check_that_nothing_is_left(folder, before):
    """No process of a job is left, not even one that has lost its parent, and no file. A worker of an MPIJob keeps its `sshd`."""
    assert {pid: each for pid, each in processes_left(folder).items() if "serve" not in each.words} == {}
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
@pytest.mark.parametrize("victim", [2, launchers.more(0)])
@pytest.mark.parametrize("job", JOBS)
def test_every_rank_names_the_host_whose_link_is_cut(job, victim, secret, tmp_path):
    """On both sides of the cut. All pods end by themselves."""
    before = shared_memory()
    with hosts.Hosts(3) as network:
        variables = {**secret, **VARIABLES}
        with training(on_hosts(job, "--epochs 100000", network, variables), tmp_path) as (pods, readers):
            network.cut(victim)
            cut = time.monotonic()
            named = [reader.wait_for(" died (no sign of ", 60) - cut for reader in readers]
            for pod in pods:
                pod.wait(60)
            check_that_nothing_is_left(tmp_path, before)
    texts = [reader.text() for reader in readers]
    assert max(named) < 10, texts
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in range(3):
        others = survivors if rank == victim else [victim]
        assert re.search(rf"rank [{''.join(map(str, others))}] died \(no sign of ", texts[rank]), texts
        assert pods[rank].returncode not in (0, -signal.SIGKILL), texts


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


def check_that_training_went_on(output, of_one_process):
    """After a failure, the job has gone on from a checkpoint, and the result is that of one process."""
    (first,) = re.findall(r"^going on from epoch-(\d)\.pt$", output, re.MULTILINE)
    assert int(first) >= 2, output
    assert losses(output) == pytest.approx(losses(of_one_process), abs=2e-5)
    accuracy = re.compile(r"^accuracy [0-9.]+ on", re.MULTILINE)
    assert accuracy.findall(output) == accuracy.findall(of_one_process), output


#: With a pause, so that the ranks still train when one of them is killed.
UNTIL_THE_END = "--epochs 4 --pause 0.05 --checkpoints"

#: How many failures of pods a job of two pods allows: of pods of a Job, of restarts of a PyTorchJob's containers, and of restarts of
#: the containers of the Job that the Trainer creates.
LIMITS = {
    indexed_job: load("job.yaml")[1]["spec"]["backoffLimit"],
    pytorch_job: load("pytorchjob.yaml")[0]["spec"]["runPolicy"]["backoffLimit"] - 1,
    train_job: 5,
}


@needs_network
@pytest.mark.parametrize(("how", "victim"), [("SIGKILL", 1), ("SIGTERM", 0)])
@pytest.mark.parametrize("job", JOBS)
def test_a_job_goes_on_from_its_newest_checkpoint(job, how, victim, secret, of_one_process, tmp_path):
    """A rank is killed, or a pod is deleted. Each pod is started again when it has ended, whatever the others do."""
    folder, checkpoints = tmp_path / "tmp", tmp_path / "checkpoints"
    folder.mkdir()
    before = shared_memory()
    with pods_on_hosts(job, f"{UNTIL_THE_END} {checkpoints}", 2, secret) as pods, Pods(pods, folder) as running:
        running.readers[0].wait_for("epoch 2:", 90 * forks.patience)
        first = running.processes[victim]
        os.kill(processes.ranks(folder, TRAIN)[victim] if how == "SIGKILL" else first_of(first), signal.Signals[how])
        running.finish(LIMITS[job], 90)
        output = running.text()
        assert f"rank {victim} died" in output, output
        assert all(running.restarts), running.restarts
        check_that_nothing_is_left(folder, before)
    check_that_training_went_on(output, of_one_process)


needs_mpirun = launchers.needs("mpirun")


@needs_mpirun
@pytest.mark.parametrize("how", ["a rank is killed", "the launcher is deleted"])
def test_ranks_of_one_worker_of_the_mpi_operator(how, secret, tmp_path):
    """The operator deletes the launcher at the end of its job: mpirun gets SIGTERM, and ends all ranks."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    before = shared_memory()
    job = mpi_job("--epochs 100000", secret, ["localhost"], tmp_path, slots=3)
    with training([job], folder) as ((launcher,), (reader,)):
        found = processes.ranks(folder, TRAIN)
        assert sorted(found) == [0, 1, 2]
        if how == "a rank is killed":
            os.kill(found[1], signal.SIGKILL)
        else:
            launcher.terminate()
        check_the_end_of_mpirun(launcher, reader, 1 if how == "a rank is killed" else None, folder, before)


def check_the_end_of_mpirun(launcher, reader, victim, folder, before):
    """mpirun ends within 10 s, and so do three ranks. The others have named the one that was killed."""
    ended = time.monotonic()
    launcher.wait(60)
    assert time.monotonic() - ended < 10, reader.text()
    check_that_nothing_is_left(folder, before)
    reader.join(10)
    assert launcher.returncode != 0, reader.text()
    if victim is not None:
        # mpirun sends SIGTERM to the other ranks one second after the first one has ended. They have named it by then.
        found = re.findall(rf"rank {victim} died \(.*?\) while rank (\d) was in", reader.text())
        assert sorted(map(int, found)) == [rank for rank in range(3) if rank != victim], reader.text()
        words = rf"mpirun noticed that process rank {victim} .* exited on signal 9"
        assert re.search(words, reader.text()), reader.text()


@needs_network
@needs_mpirun
def test_workers_of_the_mpi_operator_train(secret, of_one_process, tmp_path):
    """The launcher is on a host without ranks, and reaches the workers by ssh."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    before = shared_memory()
    with hosts.Hosts(3) as network:
        workers = Workers(network, folder)
        with Pods([workers.launcher("--epochs 3", secret, tmp_path)], folder) as running:
            running.finish(0, 90)
            check_training(running.text(), of_one_process)
        assert files_left(folder, before) == []


@needs_network
@needs_mpirun
@pytest.mark.parametrize("victim", [0, 2, None])
def test_workers_of_the_mpi_operator_end(victim, secret, tmp_path):
    """A rank is killed, or the launcher is deleted."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    before = shared_memory()
    with hosts.Hosts(4) as network:
        workers = Workers(network, folder)
        with training([workers.launcher("--epochs 100000", secret, tmp_path)], folder) as ((launcher,), (reader,)):
            found = processes.ranks(folder, TRAIN)
            assert sorted(found) == [0, 1, 2]
            names = [os.readlink(f"/proc/{pid}/ns/net") for pid in (*found.values(), first_of(launcher))]
            assert len(set(names)) == 4
            os.kill(*((first_of(launcher), signal.SIGTERM) if victim is None else (found[victim], signal.SIGKILL)))
            check_the_end_of_mpirun(launcher, reader, victim, folder, before)


@needs_network
@needs_mpirun
def test_workers_of_the_mpi_operator_name_the_one_whose_link_is_cut(secret, tmp_path):
    """mpirun waits for its daemon on the lost host, even after SIGTERM. Kubernetes kills the launcher after the grace period."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    before = shared_memory()
    with hosts.Hosts(4) as network:
        workers = Workers(network, folder, VARIABLES)
        with training([workers.launcher("--epochs 100000", secret, tmp_path)], folder) as ((launcher,), (reader,)):
            network.cut(3)
            cut = time.monotonic()
            named = [reader.wait_for(f") while rank {rank} was in", 60) - cut for rank in (0, 1)]
            launcher.kill()
            launcher.wait()
            workers.delete(2)
            # The daemons of the other workers end when they lose mpirun.
            deadline = time.monotonic() + 10
            while left := [each.words for each in processes_left(folder).values() if "serve" not in each.words]:
                assert time.monotonic() < deadline, left
            # Folders for sessions go with the containers.
            files = [path for path in files_left(folder, before) if "/ompi." not in path]
    text = reader.text()
    assert max(named) < 10, text
    assert sorted(re.findall(r"rank 2 died \(no sign of .*?\) while rank (\d) was in", text)) == ["0", "1"], text
    assert files == []


@needs_network
@needs_mpirun
@pytest.mark.parametrize("how", ["a rank is killed", "the launcher is deleted", "a worker is deleted"])
def test_workers_of_the_mpi_operator_go_on_from_their_newest_checkpoint(how, secret, of_one_process, tmp_path):
    """The launcher is started again, and a worker that was deleted, too."""
    folder, checkpoints = tmp_path / "tmp", tmp_path / "checkpoints"
    folder.mkdir()
    limit = load("mpijob.yaml")[0]["spec"]["runPolicy"]["backoffLimit"] - 1
    with hosts.Hosts(3) as network:
        workers = Workers(network, folder)
        launcher = workers.launcher(f"{UNTIL_THE_END} {checkpoints}", secret, tmp_path)
        with Pods([launcher], folder) as running:
            running.readers[0].wait_for("epoch 2:", 90 * forks.patience)
            if how == "a rank is killed":
                os.kill(processes.ranks(folder, TRAIN)[1], signal.SIGKILL)
            elif how == "the launcher is deleted":
                os.kill(first_of(running.processes[0]), signal.SIGTERM)
            else:
                workers.replace(1)
            running.finish(limit, 90)
            output = running.text()
    if how == "a rank is killed":
        assert "rank 1 died" in output, output
    check_that_training_went_on(output, of_one_process)


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
