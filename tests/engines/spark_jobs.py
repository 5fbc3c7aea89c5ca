"""Jobs on a Spark cluster of two executors: ``make test-engines``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: `make test-engines` installs it")
pytest.importorskip("torch", reason="PyTorch is not installed")
if shutil.which("java") is None:
    pytest.skip("there is no Java: `make test-engines` installs openjdk-17-jre-headless", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import files_left, shared_memory, shared_memory_left
from spark import ROOT, SparkCluster
from waiting import VARIABLES, check_a_cut, output_of, write_training

from support import hosts, neighbours
from support.neighbours import NOBODY

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster():
    before = shared_memory()
    with SparkCluster() as running:
        yield running
        running.check_that_all_have_ended()
        assert files_left(running.folder / "tmp", before) == []


def test_run_trains_as_one_process(cluster):
    results = cluster.results("run_digits.py", "--epochs", "5")
    assert [(each["rank"], each["size"]) for each in results] == [(0, 2), (1, 2)]
    assert results[0]["losses"] == results[1]["losses"]
    code = (
        "import json, runpy; train = runpy.run_path('examples/spark/run_digits.py')['train']; "
        "print(json.dumps(train(5, 60, 0.1)))"
    )
    environment = {**cluster.environment, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout.splitlines()[-1])
    assert results[0]["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert results[0]["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)


def test_run(cluster):
    body = """
        from horovod.runner.util import peers

        keys, original = [], peers.PeerServer.__init__
        def noted(self, *args, **kwargs):
            original(self, *args, **kwargs)
            keys.append(self.key.hex())
        peers.PeerServer.__init__ = noted

        def train(word, fails=None):
            import torch
            import horovod.torch as hvd
            hvd.init()
            print("greetings", os.environ["EXTRA"])
            commands = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
            secret = os.environ["_HOROVOD_SECRET_KEY"]
            if hvd.rank() == fails:
                raise KeyError("no such thing")
            total = hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
            place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
            return word, place, total, secret, secret in commands, commands

        try:
            horovod.spark.run(train, ("early",))
        except RuntimeError as error:
            print("FAILED", error)
        context = spark().sparkContext
        results = horovod.spark.run(train, ("hello",), start_timeout=200, env={"EXTRA": "more"})
        assert [each[:3] for each in results] == [
            ("hello", (rank, 2, rank, 2, 0, 1), [2.0, 2.0]) for rank in range(2)
        ], results
        assert not any(each[4] for each in results)
        assert not any(key in each[5] for each in results for key in keys)
        print("SECRETS", results[0][3], *keys)
        for wrong in ({"num_proc": 0}, {"use_mpi": True, "use_gloo": True}):
            try:
                horovod.spark.run(train, ("x",), **wrong)
            except ValueError as error:
                print("REFUSED", error)
        try:
            horovod.spark.run(train, ("x", 1), num_proc=2, env={"EXTRA": "again"})
        except RuntimeError as error:
            assert isinstance(error.__cause__, KeyError)
            print("FAILED", error)
        try:
            horovod.spark.run(train, num_proc=3, start_timeout=5)
        except horovod.runner.common.util.timeout.TimeoutException as error:
            print("LATE", error)
        print("ACTIVE", context.statusTracker().getActiveJobsIds())
        print("READY", flush=True)
        time.sleep(3)
        context.stop()
    """
    process = cluster.start(cluster.script("run", body))
    output = ""
    try:
        for line in process.stdout:
            output += line
            if line.startswith("READY"):
                secrets = next(line for line in output.splitlines() if line.startswith("SECRETS")).split()[1:]
                texts = [secret.encode() for secret in secrets] + [bytes.fromhex(key) for key in secrets[1:]]
                assert cluster.files_with(*texts) == []
        assert process.wait() == 0, output
    finally:
        process.kill()
        process.wait()
    assert "[0]<stdout>:greetings more" in output
    assert "[1]<stdout>:greetings more" in output
    assert "FAILED there is no active SparkContext" in output
    assert "FAILED rank 1 on host" in output
    assert "KeyError('no such thing')" in output
    assert "LATE timed out after 5 s waiting for Spark tasks to start: 2 of 3 have" in output
    assert output.count("REFUSED") == 2
    assert "ACTIVE []" in output


@pytest.mark.parametrize("victim", ["process", "executor"])
def test_a_killed_worker_is_named_by_the_others(cluster, victim):
    body = f"""
        def parent(pid):
            with open(f"/proc/{{pid}}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        def train():
            import torch
            import horovod.torch as hvd
            hvd.init()
            for step in range(100000):
                if step == 5 and hvd.rank() == 1:
                    # The process, its Spark task, the daemon of its executor's Python workers, the executor.
                    pid = os.getpid() if "{victim}" == "process" else parent(parent(parent(os.getpid())))
                    os.kill(pid, signal.SIGKILL)
                before = time.monotonic()
                try:
                    hvd.allreduce(torch.ones(4), name="x")
                except hvd.HorovodInternalError as error:
                    print(f"SURVIVOR after {{time.monotonic() - before:.1f}} s: {{error}}", flush=True)
                    raise

        session = spark()
        started = time.monotonic()
        try:
            horovod.spark.run(train, num_proc=2, start_timeout=200)
        except RuntimeError as error:
            print("CALLER", error)
        assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and is_rank(pid)]
        print("GONE")
        session.stop()
    """
    is_rank = """
def is_rank(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file, open(f"/proc/{pid}/environ", "rb") as variables:
            return b"run_task" in file.read() and os.environ["SPARK_HOME"].encode() in variables.read()
    except OSError:
        return False
"""
    path = cluster.script("kill", body)
    path.write_text(is_rank + path.read_text())
    output = cluster.run(path)
    survivor = next(line for line in output.splitlines() if "SURVIVOR after" in line)
    assert "rank 1 died" in survivor
    # An executor's processes end a little after it.
    assert float(survivor.partition("after ")[2].split()[0]) < 10, output
    assert "CALLER rank 1 on host" in output
    assert "has died" in output
    assert "GONE" in output


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_a_job_that_is_cancelled_leaves_nothing(cluster, how):
    body = f"""
        folder = sys.argv[1]

        def train():
            import torch
            import horovod.torch as hvd
            hvd.init()
            print("TRAINING", flush=True)
            open(f"{{folder}}/training{{hvd.rank()}}", "w").close()
            while True:
                hvd.allreduce(torch.ones(4), name="x")

        session = spark()
        def end():
            while not all(os.path.exists(f"{{folder}}/training{{rank}}") for rank in range(2)):
                time.sleep(0.1)
            # Their output arrives.
            time.sleep(3)
            print("ENDING", flush=True)
            if "{how}" == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            session.sparkContext.cancelAllJobs()
        threading.Thread(target=end, daemon=True).start()
        try:
            horovod.spark.run(train, num_proc=2, start_timeout=200)
        except RuntimeError as error:
            print("CALLER", error)
        session.stop()
    """
    process = cluster.start(cluster.script("cancel", body), cluster.folder)
    output, num_ranks = "", 0
    try:
        for line in process.stdout:
            output += line
            num_ranks = max(num_ranks, len(cluster.ranks())) if "TRAINING" in line else num_ranks
            if line.startswith("ENDING"):
                break
        ending = time.monotonic()
        assert output.count("TRAINING") == num_ranks == 2, output
        # Ranks end when the driver is killed; those of a cancelled job end when Spark has ended their tasks.
        while cluster.ranks():
            assert time.monotonic() - ending < 10, cluster.ranks()
            time.sleep(0.1)
        output += process.communicate(timeout=300)[0]
    finally:
        process.kill()
        process.wait()
    if how == "cancel":
        assert process.returncode == 0, output
        assert "CALLER the Spark job has ended: " in output
        assert "cancelled" in output
    # Spark's own processes get more time: a worker may start executors again until it knows that the driver is gone.
    cluster.check_that_all_have_ended()


def test_an_elastic_job_that_loses_an_executor_sees_every_sample(cluster):
    body = """
        def parent(pid):
            with open(f"/proc/{pid}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        folder = sys.argv[1]

        def train(epochs):
            import torch
            import horovod.torch as hvd
            hvd.init()
            model = torch.nn.Linear(1, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
            sampler = hvd.elastic.ElasticSampler(range(200), shuffle=False)

            @hvd.elastic.run
            def loop(state):
                state.sizes = [*state.sizes, hvd.size()]
                while state.epoch < epochs:
                    for number, indices in enumerate(torch.utils.data.BatchSampler(state.sampler, 5, False)):
                        if hvd.rank() == 1 and number == 4 and not os.path.exists(f"{folder}/killed"):
                            open(f"{folder}/killed", "w").close()
                            os.kill(parent(parent(parent(os.getpid()))), signal.SIGKILL)
                        optimizer.zero_grad()
                        model(torch.tensor(indices).float().reshape(-1, 1) / 200).square().mean().backward()
                        optimizer.step()
                        seen = hvd.allgather(torch.tensor(indices)).tolist()
                        state.seen = [*state.seen[:-1], [*state.seen[-1], *seen]]
                        state.sampler.record_batch(number, len(indices))
                        time.sleep(0.3)
                        state.commit()
                    state.epoch += 1
                    state.seen = [*state.seen, []]
                    state.sampler.set_epoch(state.epoch)
                    state.commit()

            state = hvd.elastic.TorchState(
                model=model, optimizer=optimizer, sampler=sampler, epoch=0, seen=[[]], sizes=[])
            loop(state)
            return hvd.rank(), hvd.size(), state.seen[:epochs], state.sizes

        session = spark()
        results = horovod.spark.run_elastic(train, (2,), num_proc=2, min_num_proc=1, start_timeout=200)
        rank, size, seen, sizes = results[0]
        print("SIZES", sizes, "at the end", size)
        assert rank == 0 and len(results) == size and os.path.exists(f"{folder}/killed")
        assert sizes[0] == 2 and 1 in sizes, sizes
        for each in seen:
            assert sorted(set(each)) == list(range(200)), each

        def fail():
            import horovod.torch as hvd
            hvd.init()
            raise KeyError("no such thing")

        try:
            horovod.spark.run_elastic(fail, num_proc=2, start_timeout=200)
        except RuntimeError as error:
            print("FAILED", error)
        try:
            horovod.spark.run_elastic(fail, num_proc=2, min_num_proc=3)
        except ValueError as error:
            print("REFUSED", error)
        session.stop()
    """
    output = cluster.run(cluster.script("elastic", body), cluster.folder)
    assert "SIZES [2, 1" in output
    assert "FAILED the elastic job has ended with a failure" in output
    assert "KeyError('no such thing')" in output
    assert "REFUSED min_num_proc is 3, num_proc 2" in output


#: The ranks wait for a file in the folder of the first argument, and their sums depend on the second one.
MEETING = """
    from horovod.runner.util import peers

    folder, factor = sys.argv[1], int(sys.argv[2])
    original = peers.PeerServer.__init__
    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        with open(f"{folder}/keys", "a") as file:
            file.write(self.key.hex() + "\\n")
    peers.PeerServer.__init__ = noted

    def train():
        import torch
        import horovod.torch as hvd
        hvd.init()
        meet(folder, factor, lambda number: hvd.allreduce(torch.ones(8) * number, op=hvd.Sum)[0].item())
        return hvd.rank()

    os.mkdir(f"{folder}/events")
    session = spark(**{
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{folder}/events",
        "spark.executor.syncLogLevel.enabled": "true",
    })
    session.sparkContext.setLogLevel("DEBUG")
    assert horovod.spark.run(train, num_proc=2, start_timeout=200) == [0, 1]
    session.sparkContext.setLogLevel("ERROR")
    session.stop()
    assert os.listdir(f"{folder}/events")
"""


@pytest.mark.skipif(neighbours.missing() is not None, reason=str(neighbours.missing()))
@pytest.mark.parametrize("second", [0, NOBODY], ids=["one user", "two users"])
def test_two_applications_at_once_do_not_meet_and_keep_their_secrets(second):
    """Spark's folders and logs, in detail, contain no secret: neither that of the ranks, nor those of the driver's servers."""
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(SparkCluster())]
        clusters.append(stack.enter_context(SparkCluster(user=second)) if second else clusters[0])
        watch = stack.enter_context(neighbours.Watch(*{cluster.folder for cluster in clusters}))
        pool = stack.enter_context(ThreadPoolExecutor())
        folders, printed, found = [], [], []
        try:
            for number, (user, cluster) in enumerate(zip((0, second), clusters, strict=True)):
                folders.append(cluster.folder / f"job{number}")
                folders[-1].mkdir()
                os.chown(folders[-1], user, user)
                path = cluster.script(f"meet{number}", neighbours.MEET + textwrap.dedent(MEETING))
                process = cluster.start(path, folders[-1], 10**number)
                stack.callback(process.kill)
                printed.append(pool.submit(output_of, process, 300))
                # One after the other: two local clusters that start in the same second give their applications one name.
                found.append(neighbours.wait_for_secrets(folders[-1], printed[-1].done))
                assert len(found[-1]) == 9, "in several forms each: SMD_SECRET, Horovod's key, and those of two servers"
            watch.look(zip((0, second), found, strict=True))
        finally:
            for folder in folders:
                (folder / "go").touch()
        outputs = [each.result() for each in printed]
        watch.look_at_files()
        neighbours.check_sessions([neighbours.text_of(folder) for folder in folders])
    assert not found[0] & found[1]
    assert watch.places(outputs) == []


@pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
def test_every_rank_names_the_host_whose_link_is_cut(tmp_path):
    """On both sides of the cut, on a cluster of Spark's own master and workers. Spark itself gives the worker up later."""
    before = shared_memory()
    body = """
        def train(path):
            import runpy, socket
            import horovod.torch as hvd
            hvd.init()
            print("RANK", hvd.rank(), socket.gethostname(), flush=True)
            runpy.run_path(path)

        spark(spark_network_timeout="20s", spark_network_timeoutInterval="5s", spark_executor_heartbeatInterval="2s")
        try:
            horovod.spark.run(train, (os.environ["TRAINING"],), num_proc=2, env=dict(VARIABLES))
        except Exception as error:
            print("CALLER", str(error).replace("\\n", " "), flush=True)
    """
    with SparkCluster(has_hosts=True) as cluster:
        cluster.environment |= {"TRAINING": str(write_training(tmp_path))}
        output = check_a_cut(
            cluster, tmp_path, cluster.start(cluster.script("cut", body.replace("VARIABLES", repr(VARIABLES))))
        )
        assert re.search(r"^CALLER .*rank \d", output, re.MULTILINE), output
    assert shared_memory_left(before) == []
