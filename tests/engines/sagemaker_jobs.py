"""Jobs that the toolkit of Amazon's containers, `sagemaker-training`, starts: ``make test-engines``."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import sagemaker
from leftovers import files_left, shared_memory
from pods import first_of
from waiting import NOTICE_SECONDS, VARIABLES

from support import hosts

pytestmark = [
    # The toolkit sleeps 30 s at the end of each job.
    pytest.mark.timeout(300),
    pytest.mark.skipif(sagemaker.missing() is not None, reason=sagemaker.missing() or ""),
]

needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))

REPORT = """
import json, os, sys
def report(rank, **more):
    names = ("SM_HOSTS", "SM_CURRENT_HOST", "SM_CHANNEL_TRAIN", "SM_MODEL_DIR", "SM_HP_EPOCHS", "SM_HP_MP_PARAMETERS")
    told = {name: os.environ.get(name) for name in names}
    with open(os.path.join(os.environ["SM_MODEL_DIR"], f"rank{rank}.json"), "w") as file:
        json.dump({"rank": rank, "arguments": sys.argv[1:], "told": told, **more}, file)
"""

DATA_PARALLEL = """
import torch
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
for _ in range(3):
    optimizer.zero_grad()
    model(inputs[rank::size]).square().mean().backward()
    optimizer.step()
report(rank, size=size, local=dist.get_local_rank(), weights=model.module.weight.flatten().tolist())
"""

MODEL_PARALLEL = """
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

@smp.step
def train(inputs):
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss

losses = []
for _ in range(3):
    optimizer.zero_grad()
    losses.append(float(train(inputs).reduce_mean()))
    optimizer.step()
report(smp.rank(), size=smp.size(), pp=smp.pp_size(), losses=losses)
"""


def test_smdataparallel():
    """Its runner calls `mpirun .. smddprun python -m mpi4py train.py`."""
    enabled = {"sagemaker_distributed_dataparallel_enabled": True, "epochs": 3}
    with sagemaker.Container(REPORT + DATA_PARALLEL, enabled) as container:
        done = container.train()
        assert done.returncode == 0, done.stdout
        assert container.failure() is None
        results = container.results()
    assert "smddprun" in done.stdout
    assert "-m mpi4py train.py --epochs 3" in done.stdout
    assert [each["rank"] for each in results] == [0, 1]
    for each in results:
        assert (each["size"], each["local"], each["arguments"]) == (2, each["rank"], ["--epochs", "3"])
        assert each["told"]["SM_HOSTS"] == '["algo-1"]'
        assert each["told"]["SM_CHANNEL_TRAIN"] == "/opt/ml/input/data/train"
        assert each["told"]["SM_HP_EPOCHS"] == "3"
    check_weights(results)


def check_weights(results):
    """Compares the weights of both ranks of `DATA_PARALLEL` with those of one process."""
    import torch

    assert results[0]["weights"] == results[1]["weights"]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(results[0]["weights"]), model.weight.detach().flatten())


@needs_network
def test_smdataparallel_on_two_hosts():
    """The toolkit of the first host starts the ranks of the second one through its `sshd`."""
    enabled = {"sagemaker_distributed_dataparallel_enabled": True, "epochs": 3}
    variables = {"SMD_SECRET": secrets.token_hex(16), "SMD_LOG": "info"}
    with sagemaker.Cluster(REPORT + DATA_PARALLEL, enabled, variables=variables) as cluster:
        first, _ = cluster.train()
        results = [each for container in cluster.containers for each in container.results()]
        assert [container.failure() for container in cluster.containers] == [None, None]
    assert "mpirun --host algo-1:1,algo-2:1 -np 2" in first
    assert "Open MPI v4" in first, "MPI moves the tensors"
    assert "open to the network" not in first
    assert [(each["rank"], each["size"], each["local"]) for each in results] == [(0, 2, 0), (1, 2, 0)]
    for each, host in zip(results, sagemaker.HOSTS, strict=True):
        assert (each["told"]["SM_HOSTS"], each["told"]["SM_CURRENT_HOST"]) == ('["algo-1","algo-2"]', host)
    check_weights(results)


PARTITIONS = {"mp_parameters": {"partitions": 2, "microbatches": 2}, "epochs": 3}


def test_modelparallel_through_mpi():
    """Its runner calls `mpirun .. smddpmprun -i TYPE --allow-bypass python -m mpi4py train.py`."""
    with sagemaker.Container(REPORT + MODEL_PARALLEL, PARTITIONS) as container:
        done = container.train()
        assert done.returncode == 0, done.stdout
        assert container.failure() is None
        results = container.results()
    assert "smddpmprun -i ml.c5.xlarge --allow-bypass" in done.stdout
    check_losses(results)


@needs_network
def test_modelparallel_on_two_hosts():
    with sagemaker.Cluster(REPORT + MODEL_PARALLEL, PARTITIONS) as cluster:
        cluster.train()
        results = [each for container in cluster.containers for each in container.results()]
    check_losses(results)


def check_losses(results):
    """Compares the losses of both ranks of `MODEL_PARALLEL` with those of one process."""
    import torch

    assert [(each["rank"], each["size"], each["pp"]) for each in results] == [(0, 2, 2), (1, 2, 2)]
    assert "partitions" in results[0]["told"]["SM_HP_MP_PARAMETERS"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    assert results[0]["losses"] == pytest.approx(expected, rel=1e-5)


def test_a_failure_reaches_sagemaker():
    """The toolkit reports the error of the script, and the exit code is that of a failure."""
    script = REPORT + DATA_PARALLEL.replace("for _ in range(3):", "for _ in [1 // (rank - 1)]:")
    with sagemaker.Container(script, {"sagemaker_distributed_dataparallel_enabled": True}) as container:
        done = container.train()
        assert done.returncode != 0
        failure = container.failure()
    assert failure is not None
    assert "ExecuteUserScriptError" in failure
    assert "ZeroDivisionError" in done.stdout


FOREVER = """
import time
import torch
import smdistributed.dataparallel.torch.distributed as dist

dist.init_process_group()
rank, folder = dist.get_rank(), os.environ["SM_MODEL_DIR"]
x = torch.ones(4)
try:
    for step in range(10**9):
        dist.all_reduce(x)
        if step == 10:
            report(rank)
        time.sleep(0.01)
except Exception as error:
    with open(f"{folder}/partial{rank}", "w") as file:
        file.write(f"{time.time()} {type(error).__name__}: {error}")
    os.rename(f"{folder}/partial{rank}", f"{folder}/survivor{rank}.txt")
    raise
"""


def wait_for_results(container, job, number):
    deadline = time.monotonic() + 120
    while len(container.results()) < number:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_worker_is_named_by_the_others():
    enabled = {"sagemaker_distributed_dataparallel_enabled": True}
    before = shared_memory()
    with sagemaker.Container(REPORT + FOREVER, enabled, processes=3) as container, container.start() as job:
        try:
            wait_for_results(container, job, 3)
            pids = container.ranks()
            assert sorted(pids) == [0, 1, 2]
            os.kill(pids[1], signal.SIGKILL)
            killed = time.time()
            output, _ = job.communicate(timeout=120)
        finally:
            job.kill()
        survivors = {path.name: path.read_text() for path in container.survivors()}
        failure = container.failure()
        left = container.processes()
        files = files_left(container.folder / "tmp", before)
    assert job.returncode != 0
    assert sorted(survivors) == ["survivor0.txt", "survivor2.txt"], output
    for text in survivors.values():
        assert float(text.split()[0]) - killed < 10
        assert "rank 1 died" in text
    assert failure is not None
    assert left == []
    assert files == []


@needs_network
def test_every_rank_names_the_host_whose_link_is_cut():
    """On both sides of the cut."""
    enabled = {"sagemaker_distributed_dataparallel_enabled": True}
    script = f"import os; os.environ.update({VARIABLES})\n" + REPORT + FOREVER
    with sagemaker.Cluster(script, enabled) as cluster:
        cluster.start()
        first, second = cluster.containers
        wait_for_results(first, cluster.jobs[0], 1)
        wait_for_results(second, cluster.jobs[1], 1)
        cluster.cut(1)
        since, texts = time.time(), {}
        while len(texts) < 2 and time.time() - since < 30:
            texts = {path.name: path.read_text() for each in (first, second) for path in each.survivors()}
            time.sleep(0.1)
    assert sorted(texts) == ["survivor0.txt", "survivor1.txt"]
    for rank in range(2):
        text = texts[f"survivor{rank}.txt"]
        assert float(text.split()[0]) - since < NOTICE_SECONDS
        assert f"rank {1 - rank} died" in text


def test_a_container_that_is_stopped_leaves_nothing():
    """SageMaker sends SIGTERM to the first process of a container, and SIGKILL if it is still there some time later.

    The first process is the toolkit. It has no handler for SIGTERM, and the kernel ignores signals without a handler for the first
    process of a PID namespace: all processes go on until SIGKILL.
    """
    enabled = {"sagemaker_distributed_dataparallel_enabled": True}
    before = shared_memory()
    with sagemaker.Container(REPORT + FOREVER, enabled, processes=3) as container, container.start() as job:
        try:
            wait_for_results(container, job, 3)
            first = first_of(job)
            os.kill(first, signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(2)
            assert sorted(container.ranks()) == [0, 1, 2]
            os.kill(first, signal.SIGKILL)
            job.communicate(timeout=60)
            deadline = time.monotonic() + 10
            while left := container.processes():
                assert time.monotonic() < deadline, left
                time.sleep(0.1)
        finally:
            job.kill()
        # SIGKILL also ends `mpirun`, whose session folder is in the container and goes with it.
        files = [path for path in files_left(container.folder / "tmp", before) if "/ompi." not in path]
    assert files == []
