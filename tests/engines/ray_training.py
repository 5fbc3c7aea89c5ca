"""A training on a Ray cluster, with CPU tensors or on GPUs, whose losses are those of one process on a CPU.

results = train(cluster, "executor over hosts", "cuda")     # by rank

`meet_at_once` runs jobs beside each other.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from cluster import RayCluster

from support import neighbours

_TRAINING = """
    import json, os, sys
    import ray, torch

    def losses_of(device, rank, size, wrap, mean):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(device)
        model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.2))
        x, y = torch.randn(32, 8).to(device), torch.randn(32, 3).to(device)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x[rank::size]) - y[rank::size]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(mean(loss.detach()).item())
        return losses

    def described(device, rank, size, losses, **more):
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        return {"rank": rank, "size": size, "gpu": gpu, "losses": losses, **more}

    def train():
        import horovod.torch as hvd
        hvd.init()
        device = torch.device(kind)
        if kind == "cuda":
            device = torch.device(kind, hvd.local_rank())
            torch.cuda.set_device(device)
        def wrap(model, optimizer):
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        losses = losses_of(device, hvd.rank(), hvd.size(), wrap, lambda loss: hvd.allreduce(loss, name="loss"))
        return described(device, hvd.rank(), hvd.size(), losses, hosts=hvd.cross_size())

    def train_with_ray_train(config):
        import ray.train.torch
        import torch.distributed as dist
        rank, size = dist.get_rank(), dist.get_world_size()
        assert dist.get_backend() == "smddp"
        device = ray.train.torch.get_device()
        def mean(loss):
            dist.all_reduce(loss)
            return loss / size
        losses = losses_of(device, rank, size, lambda model, it: (ray.train.torch.prepare_model(model), it), mean)
        is_current = device.type == "cpu" or torch.cuda.current_device() == device.index
        networks = [None] * size
        dist.all_gather_object(networks, os.readlink("/proc/self/ns/net"))
        with open(f"{config['folder']}/result{rank}.json", "w") as file:
            json.dump(described(device, rank, size, losses, hosts=len(set(networks)), is_current=is_current), file)
        ray.train.report({"rank": rank})

    def report(results):
        alone = losses_of("cpu", 0, 1, lambda model, optimizer: (model, optimizer), lambda loss: loss)
        print("RESULTS", json.dumps([results, alone]))

    kind = sys.argv[1]
    use_gpu = kind == "cuda"
"""

_JOBS = {
    "executor": """
        from horovod.ray import RayExecutor
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2, use_gpu=use_gpu)
        executor.start()
        report(executor.run(train))
        executor.shutdown()
    """,
    "executor over hosts": """
        from horovod.ray import RayExecutor
        settings = RayExecutor.create_settings(timeout_s=120)
        executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=1, use_gpu=use_gpu)
        executor.start()
        report(executor.run(train))
        executor.shutdown()
    """,
    "elastic executor": """
        from horovod.ray import ElasticRayExecutor
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=120)
        executor = ElasticRayExecutor(settings, use_gpu=use_gpu)
        executor.start()
        report(executor.run(train))
    """,
    "ray train": """
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        from smdistributed.integrations.ray import SmdConfig
        folder = os.path.dirname(os.path.abspath(__file__))
        TorchTrainer(
            train_with_ray_train, train_loop_config={"folder": folder}, torch_config=SmdConfig(timeout_s=120),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=use_gpu, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="training", storage_path=folder),
        ).fit()
        report([json.load(open(f"{folder}/result{rank}.json")) for rank in range(2)])
    """,
}


def train(cluster: RayCluster, job: str, kind: str, timeout: float = 120.0) -> list[dict[str, Any]]:
    """Trains with two workers, and checks the losses.

    Args:
        cluster: The cluster.
        job: What starts the workers, one of `_JOBS`.
        kind: The device of their tensors, `cpu` or `cuda`.
        timeout: The longest time of the job in seconds.

    Returns:
        What each rank has seen.
    """
    path = cluster.folder / f"{job.replace(' ', '_')}.py"
    # Ray pickles the functions of the main script with the globals that they use.
    main = f"if __name__ == '__main__':\n    ray.init()\n{textwrap.indent(textwrap.dedent(_JOBS[job]), '    ')}"
    path.write_text(textwrap.dedent(_TRAINING) + main)
    output = cluster.run(path, kind, timeout=timeout)
    results, alone = json.loads(output.rpartition("RESULTS ")[2].splitlines()[0])
    results.sort(key=lambda each: each["rank"])
    assert [(each["rank"], each["size"]) for each in results] == [(0, 2), (1, 2)], job
    assert results[0]["losses"] == results[1]["losses"], job
    assert results[0]["losses"] == pytest.approx(alone, abs=1e-3 if kind == "cuda" else 1e-5), job
    assert alone[-1] < 0.8 * alone[0]
    assert len({each["gpu"] for each in results}) == (2 if kind == "cuda" else 1), (job, results)
    return results


_MEETING = """
import os, sys
import ray

folder, factor = sys.argv[1], int(sys.argv[2])

def train():
    import torch
    import horovod.torch as hvd
    hvd.init()
    meet(folder, factor, lambda number: hvd.allreduce(torch.ones(8) * number, op=hvd.Sum)[0].item())
    return hvd.rank()

def train_with_ray_train():
    import torch
    import torch.distributed as dist
    def add(number):
        tensor = torch.ones(8) * number
        dist.all_reduce(tensor)
        return tensor[0].item()
    meet(folder, factor, add)
"""

_MEETINGS = {
    "executor": """
        from horovod.ray import RayExecutor
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
        executor.start()
        assert executor.run(train) == [0, 1]
        executor.shutdown()
    """,
    "elastic executor": """
        from horovod.ray import ElasticRayExecutor
        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=120))
        executor.start()
        assert executor.run(train) == [0, 1]
    """,
    "ray train": """
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        from smdistributed.integrations.ray import SmdConfig
        TorchTrainer(
            train_with_ray_train, torch_config=SmdConfig(timeout_s=120),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="meeting", storage_path=folder),
        ).fit()
    """,
}

#: Arguments of `ray.init`. Ray shows this secret to all users of the host; the job's own one must replace it.
_OPTIONS = {"ray train": 'runtime_env={"env_vars": {"SMD_SECRET": "a-secret-that-Ray-shows"}}'}


def meet_at_once(
    places: Sequence[tuple[int, RayCluster, str]], watch: neighbours.Watch
) -> tuple[list[set[bytes]], list[str]]:
    """Lets jobs of two workers each meet at the same time, each in a session of its own.

    Args:
        places: The user, the cluster and the job, one of `_MEETINGS`, of each.
        watch: Looks for the secrets.

    Returns:
        The secrets of each job, and what it has printed.
    """
    folders, printed, found = [], [], []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        # On an error, so that the jobs end before the pool.
        stack.callback(lambda: [(folder / "go").touch() for folder in folders])
        for number, (user, cluster, job) in enumerate(places):
            folders.append(cluster.folder / f"job{number}")
            folders[-1].mkdir()
            os.chown(folders[-1], user, user)
            path = cluster.folder / f"meet{number}.py"
            main = f"ray.init({_OPTIONS.get(job, '')})\n{textwrap.dedent(_MEETINGS[job])}"
            main = f"if __name__ == '__main__':\n{textwrap.indent(main, '    ')}"
            path.write_text(neighbours.MEET + _MEETING + main)
            printed.append(pool.submit(cluster.run, path, folders[-1], 10**number, timeout=300))
        for folder, each in zip(folders, printed, strict=True):
            found.append(neighbours.wait_for_secrets(folder, each.done))
        watch.look((user, own) for (user, _, _), own in zip(places, found, strict=True))
    watch.look_at_files()
    neighbours.check_sessions([neighbours.text_of(folder) for folder in folders])
    return found, [each.result() for each in printed]
