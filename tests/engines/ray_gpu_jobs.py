"""Jobs of `horovod.ray` on a Ray cluster whose node has two GPUs: ``make test-engines`` where they are.

Several raylets of one machine are one host to the library, whose local ranks go on from raylet to raylet. So nodes with GPUs of their
own can only be tried on several machines.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` installs it")
pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import torch
from cluster import RayCluster

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, {torch.cuda.device_count()} are here"),
]

TRAINING = """
    import json, ray, torch

    def losses_of(device, rank, size, wrap, mean):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(device)
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.2))
        x, y = torch.randn(32, 8).to(device), torch.randn(32, 3).to(device)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x[rank::size]) - y[rank::size]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(mean(loss.detach()).item())
        return losses

    def train():
        import horovod.torch as hvd
        hvd.init()
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
        def wrap(model, optimizer):
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        losses = losses_of(device, hvd.rank(), hvd.size(), wrap, lambda loss: hvd.allreduce(loss, name="loss"))
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        return {"rank": hvd.rank(), "size": hvd.size(), "gpu": gpu, "losses": losses}

    def report(results):
        alone = losses_of("cpu", 0, 1, lambda model, optimizer: optimizer, lambda loss: loss)
        print("RESULTS", json.dumps([results, alone]))
"""

EXECUTORS = {
    "static": """
        from horovod.ray import RayExecutor
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2, use_gpu=True)
        executor.start()
        report(executor.run(train))
        executor.shutdown()
    """,
    "elastic": """
        from horovod.ray import ElasticRayExecutor
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=120)
        executor = ElasticRayExecutor(settings, use_gpu=True)
        executor.start()
        report(executor.run(train))
    """,
}


def test_workers_train_on_a_gpu_each():
    """The gradients of CUDA tensors are reduced, and the loss of each step is that of one process on a CPU."""
    with RayCluster(cpus=[2], gpus=[[0, 1]]) as cluster:
        for name, body in EXECUTORS.items():
            path = cluster.folder / f"{name}.py"
            main = f"if __name__ == '__main__':\n    ray.init()\n{textwrap.indent(textwrap.dedent(body), '    ')}"
            path.write_text(textwrap.dedent(TRAINING) + main)
            results, alone = json.loads(cluster.run(path, timeout=120).rpartition("RESULTS ")[2].splitlines()[0])
            results.sort(key=lambda each: each["rank"])
            assert [(each["rank"], each["size"]) for each in results] == [(0, 2), (1, 2)], name
            assert len({each["gpu"] for each in results}) == 2, (name, results)
            assert results[0]["losses"] == results[1]["losses"], name
            assert results[0]["losses"] == pytest.approx(alone, abs=1e-3), name
            assert alone[-1] < 0.8 * alone[0]
