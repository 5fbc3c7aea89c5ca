"""Jobs on a Ray cluster with two GPUs, of `horovod.ray` and of Ray Train: ``make test-engines`` where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` installs it")
pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import torch
from cluster import RayCluster
from ray_training import train

from support import hosts

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, {torch.cuda.device_count()} are here"),
]


@pytest.mark.parametrize("job", ["executor", "elastic executor", "ray train"])
def test_workers_of_a_node_train_on_a_gpu_each(job):
    """The gradients of CUDA tensors are reduced, and the loss of each step is that of one process on a CPU."""
    with RayCluster(cpus=[2], gpus=[[0, 1]]) as cluster:
        results = train(cluster, job, "cuda")
    assert [each["hosts"] for each in results] == [1, 1]
    assert job != "ray train" or all(each["is_current"] for each in results)


@pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
@pytest.mark.parametrize("job", ["executor over hosts", "ray train"])
def test_nodes_on_hosts_of_their_own_train_on_a_gpu_each(job):
    """Each node has one of the GPUs, and a network and a host name of its own: two hosts to the library and to NCCL."""
    with RayCluster(cpus=[1, 1], gpus=[[0], [1]], has_hosts=True) as cluster:
        assert [each["hosts"] for each in train(cluster, job, "cuda")] == [2, 2]
