"""Jobs on a real Ray cluster of several raylets: ``make test-engines``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` installs it")
pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from cluster import ROOT, RayCluster
from leftovers import files_left, shared_memory, shared_memory_left
from ray_training import meet_at_once, train
from waiting import VARIABLES, check_a_cut, write_training

from support import hosts, launchers, neighbours

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(cpus=[1, 1]) as running:
        yield running


@pytest.fixture
def leaves_nothing(cluster):
    """Checks after the test that its jobs have left no process and no file. Ray ends workers a little after their job."""
    before = shared_memory()
    # TensorFlow leaves the code that it generates for functions.
    of_earlier_jobs = files_left(cluster.folder / "tmp", before)
    yield
    deadline = time.monotonic() + 10
    while workers := [
        command for _, command in cluster.processes() if "RankActor" in command or "TrainWorker" in command
    ]:
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)
    assert set(files_left(cluster.folder / "tmp", before)) <= set(of_earlier_jobs)


@pytest.fixture(scope="module")
def one_process():
    """The results of the training without Ray, in one process."""
    code = (
        "import json, runpy; train = runpy.run_path('examples/ray/horovod_digits.py')['train']; "
        "print(json.dumps(train(5, 60, 0.1)))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def script(cluster, name, body):
    path = cluster.folder / f"{name}.py"
    path.write_text("import os, signal, time, ray\nfrom horovod.ray import *\n" + textwrap.dedent(body))
    return path


def farthest(curve, other):
    assert len(curve) == len(other) > 100
    return max(abs(a - b) for a, b in zip(curve, other, strict=True))


def test_horovod_trains_as_one_process(cluster, one_process):
    results = cluster.results("horovod_digits.py", "--workers", "2", "--epochs", "5")
    assert [each["rank"] for each in results] == [0, 1]
    assert {each["size"] for each in results} == {2}
    assert results[0]["losses"] == results[1]["losses"]
    assert farthest(results[0]["losses"], one_process["losses"]) < 1e-4
    assert results[0]["accuracy"] == pytest.approx(one_process["accuracy"], abs=0.01)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_trains_as_one_process(cluster):
    """A tape with rank 0's weights on all workers: the loss of each step is that of one process."""
    body = """
        import json, sys

        def train(steps):
            import numpy as np
            import tensorflow as tf
            from sklearn.datasets import load_digits
            import horovod.tensorflow as hvd
            hvd.init()
            tf.keras.utils.set_random_seed(hvd.rank())
            digits = load_digits()
            images, labels = (digits.data / 16).astype(np.float32), digits.target
            share = slice(hvd.rank(), 1500, hvd.size())
            data = tf.data.Dataset.from_tensor_slices((images[share], labels[share])).repeat().batch(60 // hvd.size())
            model = tf.keras.Sequential([tf.keras.layers.Input((64,)), tf.keras.layers.Dense(32, "relu"),
                                         tf.keras.layers.Dense(10)])
            loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = tf.keras.optimizers.Adam(0.002)

            @tf.function
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = loss_of(y, model(x, training=True))
                tape = hvd.DistributedGradientTape(tape)
                gradients = tape.gradient(loss, model.trainable_variables)
                return loss, gradients

            losses = []
            for number, (x, y) in enumerate(data.take(steps)):
                if number == 0:
                    optimizer.build(model.trainable_variables)
                    hvd.broadcast_variables(model.variables, root_rank=0)
                    hvd.broadcast_variables(optimizer.variables, root_rank=0)
                loss, gradients = step(x, y)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                losses.append(float(hvd.allreduce(loss, name="loss")))
            return {"rank": hvd.rank(), "size": hvd.size(), "losses": losses}

        if __name__ == "__main__":
            if sys.argv[1:] == ["alone"]:
                results = [train(steps=60)]
            else:
                ray.init()
                executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
                executor.start()
                results = executor.run(train, kwargs={"steps": 60})
                executor.shutdown()
            print("RESULTS", json.dumps(results))
    """
    path = script(cluster, "tape", body)
    two = json.loads(cluster.run(path).rpartition("RESULTS ")[2].splitlines()[0])
    (one,) = json.loads(cluster.run(path, "alone").rpartition("RESULTS ")[2].splitlines()[0])
    assert [(each["rank"], each["size"]) for each in two] == [(0, 2), (1, 2)]
    assert one["size"] == 1
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert one["losses"][-1] < 0.7 * one["losses"][0]


def test_executor(cluster):
    body = """
        class Counter:
            def __init__(self, start, step=1):
                self.value, self.step = start, step
            def add(self):
                self.value += self.step
                return self.value, os.environ["EXTRA"]

        def places(word):
            import horovod.torch as hvd
            hvd.init()
            names = hvd.allgather_object(os.environ["HOROVOD_HOSTNAME"])
            place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
            hvd.shutdown()
            return word, place, names

        ray.init()
        settings = RayExecutor.create_settings(timeout_s=120)
        executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=1)
        try:
            executor.run(places, ["early"])
        except RuntimeError as error:
            assert "call `start()` first" in str(error)
        executor.start(Counter, executable_args=[5], executable_kwargs={"step": 2}, extra_env_vars={"EXTRA": "more"})
        assert executor.execute(lambda counter: counter.add()) == [(7, "more")] * 2
        assert executor.execute_single(lambda counter: counter.add()) == (9, "more")
        words = executor.run(places, args=["hello"])
        assert len(set(words[0][2])) == 2, words
        # Raylets of one machine are one host to the core.
        assert [word[:2] for word in words] == [("hello", (rank, 2, rank, 2, 0, 1)) for rank in range(2)], words
        assert ray.get(executor.run_remote(places, kwargs={"word": "again"})) == [("again", *word[1:]) for word in words]
        secret = executor.workers.settings.key.hex()
        assert secret not in str(ray.nodes()) and secret not in str(executor.workers.settings)
        try:
            executor.run(lambda: 1 // 0)
        except ZeroDivisionError:
            print("the exception of a worker")
        executor.shutdown()
        executor.shutdown()
        for wrong in ({}, {"num_workers": 1, "num_hosts": 1}, {"num_workers": 1, "min_workers": 1}):
            try:
                RayExecutor(settings, **wrong)
            except ValueError as error:
                print("refused:", error)
        little = RayExecutor.create_settings(placement_group_timeout_s=3)
        try:
            RayExecutor(little, num_workers=3).start()
        except TimeoutError as error:
            print(error)
    """
    output = cluster.run(script(cluster, "executor", body))
    assert "the exception of a worker" in output
    assert output.count("refused: ") == 3
    assert "`min_workers` and `num_workers` exclude each other" in output
    assert "within 3 s; available now" in output


def test_a_killed_worker_is_named_by_the_others(cluster, leaves_nothing):
    body = """
        def train():
            import torch
            import horovod.torch as hvd
            hvd.init()
            for step in range(1000):
                if step == 5 and hvd.rank() == 1:
                    started = time.monotonic()
                    os.kill(os.getpid(), signal.SIGKILL)
                before = time.monotonic()
                try:
                    hvd.allreduce(torch.ones(4), name="x")
                except hvd.HorovodInternalError as error:
                    raise RuntimeError(f"after {time.monotonic() - before:.1f} s: {error}") from None
            return "not reached"

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
        executor.start()
        references = executor.run_remote(train)
        try:
            ray.get(references[0])
        except RuntimeError as error:
            print("SURVIVOR", error)
        executor.shutdown()

        executor.start()
        try:
            executor.run(train)
        except RuntimeError as error:
            print("CALLER", error)
        executor.shutdown()
    """
    output = cluster.run(script(cluster, "kill", body))
    lines = output.splitlines()
    survivor = next(line for line in lines if "after" in line and "rank 1" in line)
    assert float(survivor.partition("after ")[2].split()[0]) < 10, output
    assert any(line.startswith("SURVIVOR") for line in lines), output
    assert any(line.startswith("CALLER rank 1 on host") and "has died" in line for line in lines), output
    assert [command for _, command in cluster.processes() if "RankActor" in command] == []


def test_an_elastic_job_sees_every_sample(cluster):
    results = cluster.results("elastic_digits.py", "--epochs", "3", "--min-workers", "2")
    assert [(each["rank"], each["size"]) for each in results] == [(0, 2), (1, 2)]
    assert results[0]["accuracy"] > 0.8
    for seen in results[0]["seen"]:
        assert sorted(seen) == list(range(1500))


def stop_the_node(cluster, number):
    cluster.remove(number)


def kill_the_node(cluster, number):
    cluster.kill(number)


def kill_the_worker(cluster, number):
    (pid,) = cluster.workers(number)
    os.kill(pid, signal.SIGKILL)


def cut_the_link(cluster, number):
    cluster.cut(number)


def check_that_an_elastic_job_goes_on(cluster, lose):
    """Training on two nodes goes on with what there is when one is lost, and with a node that joins. It loses no sample."""
    out = cluster.folder / "results.json"
    options = ("--epochs", "4", "--min-workers", "1", "--pause", "0.5", "--out", out)
    process = cluster.start(ROOT / "examples" / "ray" / "elastic_digits.py", *options)
    output = []

    def wait_for(session):
        for line in process.stdout:
            output.append(line)
            if session in line:
                return
        raise AssertionError("".join(output))

    try:
        wait_for("a session of 2 in epoch 0")
        time.sleep(3)
        lost = len(cluster.nodes) - 1
        lose(cluster, lost)
        left = time.monotonic()
        wait_for("a session of 1 in epoch")
        assert time.monotonic() - left < 60
        cluster.add(cpus=1)
        wait_for("a session of 2 in epoch")
        rest, _ = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    text = "".join(output) + rest
    cluster.remove(lost)
    assert process.returncode == 0, text
    assert re.search(r"the job goes on from the last commit: rank \d died", text), text
    results = json.loads(out.read_text())
    assert [(each["rank"], each["size"]) for each in results] == [(0, 2), (1, 2)], text
    assert results[0]["accuracy"] > 0.8
    assert len(results[0]["seen"]) == 4
    for seen in results[0]["seen"]:
        assert set(seen) == set(range(1500))
        # The last batch of a session is filled up so that all workers have as many samples.
        assert len(seen) <= 1500 + 3


@pytest.mark.parametrize("lose", [stop_the_node, kill_the_node, launchers.more(kill_the_worker)])
def test_an_elastic_job_goes_on_when_a_node_leaves_and_another_one_joins(cluster, leaves_nothing, lose):
    check_that_an_elastic_job_goes_on(cluster, lose)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_leaves_nothing(cluster, leaves_nothing, how):
    """`ray job stop` sends SIGTERM to the driver, and SIGKILL if it is still there some seconds later."""
    body = """
        def train():
            import torch
            import horovod.torch as hvd
            hvd.init()
            print("TRAINING", flush=True)
            while True:
                hvd.allreduce(torch.ones(4), name="x")

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
        executor.start()
        executor.run(train)
    """
    process = cluster.start(script(cluster, "driver", body))
    try:
        started, output = 0, ""
        while started < 2:
            line = process.stdout.readline()
            output += line
            assert line, output
            started += "TRAINING" in line
        process.send_signal(how)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0


def test_a_node_that_is_stopped_is_named_by_the_others(cluster, leaves_nothing):
    body = """
        def train():
            import torch
            import horovod.torch as hvd
            hvd.init()
            while True:
                try:
                    hvd.allreduce(torch.ones(4), name="x")
                except hvd.HorovodInternalError as error:
                    raise RuntimeError(f"SURVIVOR at {time.time()}: {error}") from None
                if not os.path.exists(f"{os.environ['STORAGE']}/training{hvd.rank()}"):
                    with open(f"{os.environ['STORAGE']}/training{hvd.rank()}", "w") as file:
                        file.write(str(os.getpid()))

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_hosts=2, num_workers_per_host=1)
        executor.start(extra_env_vars={"STORAGE": os.environ["STORAGE"]})
        references = executor.run_remote(train)
        for rank, reference in enumerate(references):
            try:
                ray.get(reference)
            except Exception as error:
                print(f"RANK {rank}", str(error).replace("\\n", " "), flush=True)
        executor.shutdown()
    """
    cluster.environment["STORAGE"] = str(cluster.folder)
    process = cluster.start(script(cluster, "stop", body))
    try:
        deadline = time.monotonic() + 300
        files = [cluster.folder / f"training{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in files]
        node = cluster.nodes[-1]
        node.send_signal(signal.SIGTERM)
        # Ray lets a node's workers go on for half a minute.
        ended = None
        while ended is None:
            running = [pid for pid, _ in cluster.processes()]
            ended = time.time() if set(pids) - set(running) else None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        output, _ = process.communicate(timeout=300)
        cluster.remove(len(cluster.nodes) - 1)
    finally:
        process.kill()
        process.wait()
        cluster.add(cpus=1)
    # The message of the exception follows its traceback, which shows the line of the code.
    (found,) = re.findall(r"^RANK (\d) .*SURVIVOR at (\d+\.\d+): (.*)$", output, re.MULTILINE)
    assert f"rank {1 - int(found[0])} died" in found[2], output
    assert float(found[1]) - ended < 10, output
    assert [command for _, command in cluster.processes() if "RankActor" in command] == []


def test_an_elastic_job_of_the_executor(cluster):
    body = """
        def train(word):
            import horovod.torch as hvd
            hvd.init()
            state = hvd.elastic.TorchState(step=0)
            @hvd.elastic.run
            def loop(state):
                while state.step < 3:
                    state.step += 1
                    state.commit()
            loop(state)
            return word, hvd.rank(), hvd.size()

        def fail():
            import horovod.torch as hvd
            hvd.init()
            raise KeyError("no such thing")

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), min_workers=2, max_workers=2)
        executor.start()
        assert executor.run(train, ["hello"]) == [("hello", 0, 2), ("hello", 1, 2)]
        try:
            executor.run(fail)
        except RuntimeError as error:
            print("FAILED", str(error).replace("\\n", " "))
        executor.shutdown()
    """
    output = cluster.run(script(cluster, "elastic", body))
    failed = next(line for line in output.splitlines() if line.startswith("FAILED"))
    assert "the elastic job has ended with a failure" in failed
    assert "no such thing" in failed


def test_settings_reach_the_workers_of_an_elastic_executor(cluster):
    body = """
        def train():
            import horovod.torch as hvd
            hvd.init()
            return os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"], os.environ.get("EXTRA")

        ray.init()
        for variables in (None, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "123", "EXTRA": "more"}):
            settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=122)
            executor = ElasticRayExecutor(settings, env_vars=variables)
            executor.start()
            print("RESULTS", executor.run(train))
    """
    output = cluster.run(script(cluster, "limits", body))
    assert "RESULTS [('122', None), ('122', None)]" in output
    assert "RESULTS [('123', 'more'), ('123', 'more')]" in output


def test_ray_train_over_smddp(cluster):
    body = """
        import json
        import ray.train.torch
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        from smdistributed.integrations.ray import SmdConfig

        def train(config):
            import torch
            import torch.distributed as dist
            context = ray.train.get_context()
            torch.manual_seed(0)
            model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
            inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
            rank, size = context.get_world_rank(), context.get_world_size()
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs[rank::size]).square().mean().backward()
                optimizer.step()
            weight = model.module.weight.detach().flatten()
            all_of_them = [torch.empty_like(weight) for _ in range(size)]
            dist.all_gather(all_of_them, weight)
            results = {
                "backend": dist.get_backend(), "rank": dist.get_rank(), "size": size,
                "has_secret": len(os.environ["SMD_SECRET"]) == 64,
                "equal": all(torch.equal(each, weight) for each in all_of_them), "weight": weight.tolist(),
            }
            with open(f"{config['out']}/result{rank}.json", "w") as file:
                json.dump(results, file)
            ray.train.report({"rank": rank})

        ray.init()
        trainer = TorchTrainer(
            train, train_loop_config={"lr": 0.1, "out": os.environ["STORAGE"]}, torch_config=SmdConfig(timeout_s=120),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="smd", storage_path=os.environ["STORAGE"]),
        )
        trainer.fit()
    """
    cluster.environment["STORAGE"] = str(cluster.folder)
    cluster.run(script(cluster, "train", body), timeout=400)
    results = [json.loads((cluster.folder / f"result{rank}.json").read_text()) for rank in range(2)]
    for rank, each in enumerate(results):
        assert (each["backend"], each["rank"], each["size"]) == ("smddp", rank, 2)
        assert each["has_secret"]
        assert each["equal"]
    result = results[0]

    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(result["weight"]), model.weight.detach().flatten())


def test_a_killed_worker_of_ray_train_is_named_by_the_others(cluster, leaves_nothing):
    """The worker is killed between two of Ray's checks: once a check has found it, Ray kills the others, within milliseconds."""
    body = """
        import json
        import ray.train.torch
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        from smdistributed.integrations.ray import SmdConfig

        def train(config):
            import torch
            import torch.distributed as dist
            for step in range(1000):
                if step == 5 and dist.get_rank() == 1:
                    time.sleep(3)
                    os.kill(os.getpid(), signal.SIGKILL)
                before = time.monotonic()
                try:
                    dist.all_reduce(torch.ones(4))
                except RuntimeError as error:
                    with open(f"{config['out']}/survivor.json", "w") as file:
                        json.dump([time.monotonic() - before, str(error)], file)
                    raise

        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "15"
        ray.init()
        trainer = TorchTrainer(
            train, train_loop_config={"out": os.environ["STORAGE"]}, torch_config=SmdConfig(timeout_s=120),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="killed", storage_path=os.environ["STORAGE"]),
        )
        try:
            trainer.fit()
        except Exception as error:
            print("CALLER", type(error).__name__, flush=True)
    """
    cluster.environment["STORAGE"] = str(cluster.folder)
    output = cluster.run(script(cluster, "train_killed", body), timeout=400)
    survivor = cluster.folder / "survivor.json"
    assert survivor.exists(), output
    seconds, text = json.loads(survivor.read_text())
    assert "rank 1 died" in text
    assert seconds < 10
    assert "CALLER" in output


needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))


@needs_network
@pytest.mark.parametrize("job", ["executor over hosts", launchers.more("ray train")])
def test_nodes_on_hosts_of_their_own_train_as_one_process(job):
    """Each node has a network and a host name of its own, so that the library sees two hosts."""
    before = shared_memory()
    with RayCluster(cpus=[1, 1], has_hosts=True) as cluster:
        assert [each["hosts"] for each in train(cluster, job, "cpu")] == [2, 2]
        assert files_left(cluster.folder / "tmp", before) == []


#: Ray gives a node up after at most 28 s without an answer.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}

#: Runs the script of `write_training` on two workers, and prints what Ray says of its end.
UNTIL_AN_ERROR = {
    "executor": """
        def train():
            import runpy
            import horovod.torch as hvd
            hvd.init()
            runpy.run_path(os.environ["TRAINING"])

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_hosts=2, num_workers_per_host=1)
        executor.start()
        try:
            executor.run(train)
        except Exception as error:
            print("CALLER", str(error).replace("\\n", " "), flush=True)
        executor.shutdown()
    """,
    "ray train": """
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        from smdistributed.integrations.ray import SmdConfig

        def train():
            import runpy
            runpy.run_path(os.environ["TRAINING"])

        ray.init()
        trainer = TorchTrainer(
            train, torch_config=SmdConfig(timeout_s=120),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="cut", storage_path=os.path.dirname(os.environ["TRAINING"])),
        )
        try:
            trainer.fit()
        except Exception as error:
            print("CALLER", str(error).replace("\\n", " "), flush=True)
    """,
}


@needs_network
@pytest.mark.parametrize("job", ["executor", launchers.more("ray train")])
def test_every_rank_names_the_host_whose_link_is_cut(job, tmp_path):
    """On both sides of the cut. Ray itself gives the node up later."""
    before = shared_memory()
    cluster = RayCluster(cpus=[1, 1], has_hosts=True)
    cluster.environment |= {**VARIABLES, **HEALTH_CHECKS, "TRAINING": str(write_training(tmp_path))}
    with cluster:
        output = check_a_cut(cluster, tmp_path, cluster.start(script(cluster, "cut", UNTIL_AN_ERROR[job])))
    assert re.search(r"^CALLER .*rank \d died", output, re.MULTILINE), output
    assert shared_memory_left(before) == []


@needs_network
@pytest.mark.more
def test_an_elastic_job_goes_on_without_a_host_whose_link_is_cut():
    before = shared_memory()
    cluster = RayCluster(cpus=[1, 1], has_hosts=True, joining=1)
    cluster.environment |= {**VARIABLES, **HEALTH_CHECKS}
    with cluster:
        check_that_an_elastic_job_goes_on(cluster, cut_the_link)
        assert files_left(cluster.folder / "tmp", before) == []
    assert shared_memory_left(before) == []


@pytest.mark.skipif(neighbours.missing() is not None, reason=str(neighbours.missing()))
@pytest.mark.parametrize("jobs", [("executor", "executor"), ("elastic executor", "ray train")], ids=" beside ".join)
def test_two_jobs_at_once_do_not_meet_and_keep_their_secrets(jobs):
    """Ray's logs, in detail, contain no secret. A cluster belongs to one user, so both jobs do."""
    cluster = RayCluster(cpus=[2, 2])
    cluster.environment["RAY_BACKEND_LOG_LEVEL"] = "debug"
    with cluster, neighbours.Watch(cluster.folder) as watch:
        found, outputs = meet_at_once([(0, cluster, job) for job in jobs], watch)
    assert watch.places(outputs) == []
    # SMD_SECRET as text and as bytes, and Horovod's key in one form more.
    assert [len(each) for each in found] == [2 if job == "ray train" else 5 for job in jobs]
    assert not found[0] & found[1]


@pytest.mark.skipif(neighbours.missing() is not None, reason=str(neighbours.missing()))
def test_clusters_of_two_users_at_once_keep_their_secrets():
    users = (0, neighbours.NOBODY)
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(RayCluster(cpus=[2], user=user)) for user in users]
        watch = stack.enter_context(neighbours.Watch(*(cluster.folder for cluster in clusters)))
        places = [(user, cluster, "executor") for user, cluster in zip(users, clusters, strict=True)]
        found, outputs = meet_at_once(places, watch)
    assert not found[0] & found[1]
    assert watch.places(outputs) == []
