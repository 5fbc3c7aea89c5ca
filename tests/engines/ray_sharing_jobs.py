"""Jobs on a Ray cluster whose resources others use, too: ``make test-engines``."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` installs it")
pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from cluster import RayCluster
from waiting import output_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(cpus=[1, 1, 1]) as running:
        yield running


#: An elastic job that ends once it has had a session of `size` workers for some steps. It returns the sizes of its sessions.
ELASTIC = """
    def train(size, pause=0.1):
        import horovod.torch as hvd
        hvd.init()

        @hvd.elastic.run
        def loop(state):
            state.sizes = [*state.sizes, hvd.size()]
            if hvd.rank() == 0:
                ray_logger.log(hvd.size())
            state.step = 0
            while hvd.size() < size or state.step < 20:
                state.step += 1
                time.sleep(pause)
                state.commit()

        state = hvd.elastic.TorchState(step=0, sizes=[])
        loop(state)
        return state.sizes

    def elastic(least, most, timeout=300):
        settings = ElasticRayExecutor.create_settings(
            min_num_proc=least, max_num_proc=most, elastic_timeout=timeout, timeout_s=120)
        return ElasticRayExecutor(settings)
"""


def script(cluster, name, *parts):
    path = cluster.folder / f"{name}.py"
    head = "import os, sys, threading, time, ray\nfrom horovod.ray import *\nfrom horovod.ray import ray_logger\n"
    path.write_text(head + "".join(map(textwrap.dedent, parts)))
    return path


def test_an_elastic_job_uses_the_slots_that_others_leave(cluster):
    """It waits for the smallest number, says once why, begins with that number, and takes a slot that becomes free."""
    body = """
        from horovod.ray import reservations
        from ray.util.placement_group import placement_group, remove_placement_group

        class Holder:
            def node(self):
                return ray.get_runtime_context().get_node_id()

        def free_later():
            time.sleep(8)
            print("FREED the group at", time.monotonic(), flush=True)
            remove_placement_group(group)

        def ends(size):
            print("SESSION of", size, "at", time.monotonic(), flush=True)
            if size == 2:
                ray.kill(holder)

        reservations._PATIENCE_SECONDS = 3
        ray.init()
        group = placement_group([{"CPU": 1}])
        holder = ray.remote(Holder).options(num_cpus=1).remote()
        ray.get([group.ready(), holder.node.remote()])
        threading.Thread(target=free_later).start()
        executor = elastic(2, None)
        executor.start()
        print("STARTED at", time.monotonic(), flush=True)
        print("SIZES", executor.run(lambda: train(3), callbacks=[ends]), flush=True)
        deadline = time.monotonic() + 30
        while ray.available_resources().get("CPU") != 3:
            assert time.monotonic() < deadline, ray.available_resources()
            time.sleep(0.1)
    """
    output = cluster.run(script(cluster, "leave", ELASTIC, body), timeout=60)
    freed, started = (float(re.search(rf"{word}.* at ([0-9.]+)", output)[1]) for word in ("FREED", "STARTED"))
    assert 0 < started - freed < 10, output
    assert "SIZES [[2, 3], [2, 3], [2, 3]]" in output, output
    assert (
        output.count("the elastic job waits for 2 slots of 1 CPU: the nodes have 3 such slots, and 1 can be used") == 1
    ), output


def test_two_elastic_jobs_that_both_need_more_than_half_follow_each_other(cluster):
    """Neither keeps a part of what the other one needs."""
    body = """
        ray.init()
        executor = elastic(2, 3)
        executor.start()
        print("STARTED at", time.monotonic(), flush=True)
        sizes = executor.run(lambda: train(2))
        print("ENDED at", time.monotonic(), flush=True)
        print("SIZES", sizes, flush=True)
    """
    path = script(cluster, "both", ELASTIC, body)
    jobs = [cluster.start(path) for _ in range(2)]
    try:
        outputs = [output_of(job, 60) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    times = [[float(re.search(rf"{word} at ([0-9.]+)", each)[1]) for word in ("STARTED", "ENDED")] for each in outputs]
    (_, end_of_first), (start_of_second, _) = sorted(times)
    assert start_of_second > end_of_first, outputs
    for each in outputs:
        assert re.search(r"SIZES (\[\[3\]|\[\[2\]|\[\[2, 3\])", each), each


#: An actor that starts jobs from inside of a placement group, which its children join.
DRIVER = """
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def train():
        import torch
        import horovod.torch as hvd
        hvd.init()
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        return hvd.rank(), total, ray.util.get_current_placement_group().id.hex(), ray.get_runtime_context().get_node_id()

    def drive(function, bundles):
        group = placement_group([{"CPU": 1}] * bundles)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        try:
            return ray.get(ray.remote(num_cpus=1, scheduling_strategy=strategy)(function).remote()), group.id.hex()
        finally:
            remove_placement_group(group)
"""


def test_an_executor_in_a_placement_group_uses_it(cluster):
    """The group has all CPUs of the cluster; Ray lends that of a task that waits. Where workers find no place in it, `start()` says so, and leaves none of them."""
    body = """
        def two():
            executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
            executor.start()
            lines = []
            results = executor.run(train, callbacks=[lines.append])
            executor.shutdown()
            return results

        def four():
            executor = RayExecutor(
                RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=15), num_workers=4)
            began = time.monotonic()
            try:
                executor.start()
            except TimeoutError as error:
                return f"{error} after {time.monotonic() - began:.0f} s"

        ray.init()
        results, group = drive(two, 3)
        assert [each[:3] for each in results] == [(rank, 2.0, group) for rank in range(2)], results
        assert len({each[3] for each in results}) == 2, results
        print("TWO ran in the group", flush=True)
        print("FOUR", drive(four, 3)[0], flush=True)
        deadline = time.monotonic() + 30
        while ray.available_resources().get("CPU") != 3:
            assert time.monotonic() < deadline, ray.available_resources()
            time.sleep(0.1)
    """
    output = cluster.run(script(cluster, "group", DRIVER, body), timeout=200)
    assert "TWO ran in the group" in output
    text = "FOUR 1 of 4 workers found no resources in the current placement group within 15 s: it has 3 CPU"
    found = re.search(rf"^{text}, and the workers need 4.* after (\d+) s$", output, re.MULTILINE)
    assert found, output
    assert int(found[1]) < 25, output


def test_a_placement_group_that_an_executor_does_not_use_is_named(cluster):
    body = """
        def start(**arguments):
            import warnings
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                RayExecutor(RayExecutor.create_settings(), min_workers=1, **arguments).start()
            return [str(each.message) for each in caught]

        ray.init()
        print("INSIDE", drive(start, 1)[0])
        print("CONFIRMED", drive(lambda: start(use_current_placement_group=False), 1)[0])
        print("OUTSIDE", ray.get(ray.remote(start).remote()))
    """
    output = cluster.run(script(cluster, "unused", DRIVER, body), timeout=200)
    assert "INSIDE ['workers do not use the current placement group: with `min_workers`" in output
    assert "CONFIRMED []" in output
    assert "OUTSIDE []" in output


def test_ray_train_from_inside_of_a_placement_group(cluster):
    """Ray Train places its workers itself; the backend finds them there."""
    body = """
        def fit():
            from ray.train import RunConfig, ScalingConfig
            from ray.train.torch import TorchTrainer
            from smdistributed.integrations.ray import SmdConfig

            def train():
                import torch
                import torch.distributed as dist
                total = torch.ones(1)
                dist.all_reduce(total)
                print("TOTAL", total.item(), "over", dist.get_backend(), flush=True)

            TorchTrainer(
                train, torch_config=SmdConfig(timeout_s=120),
                scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(name="group", storage_path=storage),
            ).fit()

        ray.init()
        storage = os.environ["STORAGE"]
        drive(fit, 1)
    """
    cluster.environment["STORAGE"] = str(cluster.folder)
    output = cluster.run(script(cluster, "train", DRIVER, body), timeout=200)
    # Each node of this machine shows what the workers of all of them have printed.
    assert len(set(re.findall(r"RayTrainWorker pid=(\d+).* TOTAL 2.0 over smddp", output))) == 2, output


def test_smddp_under_the_executor(cluster):
    """A function that knows nothing of Horovod: PyTorch's process group alone, and this library's own module."""
    body = """
        def torch_alone():
            import torch
            import torch.distributed as dist
            import smdistributed.dataparallel.torch.torch_smddp
            dist.init_process_group("smddp")
            total = torch.ones(1) * (dist.get_rank() + 1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            return dist.is_initialized(), total.item()

        def own():
            import torch
            import smdistributed.dataparallel.torch.distributed as dist
            dist.init_process_group()
            total = torch.ones(1) * (dist.get_rank() + 1)
            dist.all_reduce(total)
            return dist.get_world_size(), total.item()

        ray.init()
        for function in (torch_alone, own):
            executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
            executor.start()
            print("RESULT", function.__name__, executor.run(function), flush=True)
            executor.shutdown()
    """
    output = cluster.run(script(cluster, "smddp", body), timeout=200)
    assert "RESULT torch_alone [(False, 3.0), (False, 3.0)]" in output, output
    assert "RESULT own [(2, 3.0), (2, 3.0)]" in output, output


def test_slots_that_need_nothing_are_refused():
    from horovod.ray import RayHostDiscovery

    RayHostDiscovery(use_gpu=True, cpus_per_slot=0, gpus_per_slot=1)
    with pytest.raises(ValueError, match="a slot needs CPUs or GPUs"):
        RayHostDiscovery(use_gpu=False, cpus_per_slot=0)
