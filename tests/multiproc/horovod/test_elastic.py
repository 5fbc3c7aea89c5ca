"""Elastic states, and training that continues after torchrun or a driver has restarted workers."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from support import Forked, run_ranks


def _torch_aggregated_gradients(torch, hvd):
    """`sync` and `restore` drop gradients that are accumulated but not applied, because a new rank has none."""
    rank, size = hvd.rank(), hvd.size()
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    for reload in (state.sync, state.restore):
        state.sync()
        start = model.weight.detach().clone()
        if rank == 0:
            model(torch.ones(1, 2)).sum().backward()
        reload()
        for _ in range(2):
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
        assert torch.allclose(start - model.weight, torch.tensor(size + 1.0)), reload


def _torch_state_that_is_no_tensor(torch, hvd):
    class Counting(torch.nn.Linear):
        count = hvd.rank() + 5

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model = Counting(2, 1)
    hvd.elastic.TorchState(model=model, step=0).sync()
    assert model.count == 5


def _keras_aggregated_gradients(tf, keras, hvd, hvd_tf):
    """As `_torch_aggregated_gradients`, for gradients aggregated in TensorFlow, eagerly and in a graph."""
    rank = hvd.rank()
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.build((None, 2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    step = tf.function(lambda: optimizer.apply([tf.ones([2, 1])], model.trainable_variables))
    variable = tf.Variable(0.0)
    for state in (hvd.elastic.KerasState(model, optimizer), hvd_tf.elastic.TensorFlowState([variable])):
        for reload in (state.sync, state.restore):
            if rank == 0:
                step()
            hvd.allreduce(0.0)
            reload()
            start = model.get_weights()[0]
            step()
            assert (model.get_weights()[0] == start).all(), reload
            step()
            assert (model.get_weights()[0] == start - 2.0).all(), reload
            state.save()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=0.0, use_resource=True)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd_tf.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        step = optimizer.minimize(variable * 1.0, var_list=[variable])
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        state = hvd_tf.elastic.TensorFlowState(session=session)
        for at, reload in enumerate((state.sync, state.restore)):
            session.run([step] if rank == 0 else [])
            reload()
            session.run(step)
            session.run(step)
            assert session.run(variable) == -2.0 * (at + 1)
            state.save()


def _torch_states():
    import torch

    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=rank, seen=[rank])
    state.sync()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    found = {"synced": (weights[0].tolist(), optimizer.param_groups[0]["lr"], state.batch, list(state.seen))}

    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sampler.record_batch(0, 2)
    state.batch, found["moved"] = 7, not torch.equal(weights[0], model.weight)
    state.seen.append(9)
    state.restore()
    found["restored"] = state.batch, list(state.seen), sampler.processed_num, torch.equal(weights[0], model.weight)
    sampler.record_batch(0, 2)
    sampler.reset()
    found["left"] = sampler.processed_num, list(sampler)
    sampler.record_batch(1, 2)
    sampler.record_indices(1)
    sampler.reset()
    found["padded"] = len(sampler), list(sampler)
    state.model = torch.nn.Linear(2, 1)
    state.restore()
    without = hvd.elastic.TorchState(model=state.model, optimizer=None)
    assert (without.model, without.optimizer) == (state.model, None)

    calls = []

    def reset():
        calls.append("reset")

    state.register_reset_callbacks([lambda: calls.append("callback")])
    raised = [HorovodInternalError("lost"), HostsUpdatedInterrupt(True), HostsUpdatedInterrupt(False)]

    def train(state, value):
        calls.append("train")
        if raised:
            raise raised.pop(0)
        return value

    from horovod.common.elastic import run_fn

    found["result"] = run_fn(train, reset)(state, 5), calls
    # Only the last rank has received the host update; `commit` still raises on all ranks.
    if rank == hvd.size() - 1:
        state.on_hosts_updated(1.0, 2)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    found["skip"] = interrupt.value.skip_sync
    state.commit()
    _torch_aggregated_gradients(torch, hvd)
    _torch_state_that_is_no_tensor(torch, hvd)
    return found


def _keras_states():
    import keras
    import numpy as np
    import tensorflow as tf

    import horovod.keras as hvd
    import horovod.tensorflow as hvd_tf

    hvd.init()
    rank = hvd.rank()
    variable = tf.Variable([float(rank), 1.0])
    state = hvd_tf.elastic.TensorFlowState([variable], epoch=rank)
    state.sync()
    found = {"variable": variable.numpy().tolist()}
    variable.assign([5.0, 5.0])
    state.epoch = 8
    state.restore()
    found["restored"] = variable.numpy().tolist(), state.epoch

    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="Model must be built first"):
        hvd.elastic.KerasState(model)
    model.build((None, 2))
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    synced = [np.array(value) for value in model.get_weights()]
    found["synced"] = synced[0].tolist()
    commits = []
    state.register_reset_callbacks([])
    commit = state.commit
    state.commit = lambda: commits.append((state.epoch, state.batch)) or commit()
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    x = np.ones((12, 2), np.float32)
    model.fit(x, np.ones(12), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    found["commits"] = list(commits)
    trained = model.get_weights()[0].tolist()
    model.set_weights(synced)
    state.restore()
    found["kept"] = model.get_weights()[0].tolist() == trained

    @hvd_tf.elastic.run
    def train(state):
        commits.append("train")
        if commits.count("train") == 1:
            raise tf.errors.UnknownError(None, None, "HorovodAllreduce failed: Horovod has been shut down.")
        raise tf.errors.UnknownError(None, None, "something else")

    with pytest.raises(tf.errors.UnknownError, match="something else"):
        train(state)
    found["session"] = hvd.size()
    _keras_aggregated_gradients(tf, keras, hvd, hvd_tf)
    return found


@pytest.mark.timeout(240)
def test_states_of_pytorch():
    pytest.importorskip("torch")
    first, second = run_ranks(_torch_states, 2, timeout=200, launcher=Forked("torch"))
    assert first["synced"] == second["synced"]
    assert second["synced"][1:] == (0.1, 0, [0])
    for found in (first, second):
        assert found["moved"]
        assert found["restored"] == (0, [0], 0, True)
        calls = ["train", "reset", "callback"] * 3 + ["train"]
        assert found["result"] == (5, calls)
        assert found["skip"] is False
    assert (first["left"], second["left"]) == ((4, [4, 6, 8]), (4, [5, 7, 9]))
    assert (first["padded"], second["padded"]) == ((1, [9]), (1, [9])), (
        "with fewer samples left than ranks, a sample is repeated"
    )


@pytest.mark.more
@pytest.mark.timeout(240)
def test_states_of_tensorflow_and_keras():
    pytest.importorskip("tensorflow")
    results = run_ranks(_keras_states, 2, timeout=200, launcher=Forked("tensorflow"))
    for found in results:
        assert found["variable"] == [0.0, 1.0]
        assert found["restored"] == ([0.0, 1.0], 0)
        assert found["synced"] == results[0]["synced"]
        assert found["commits"] == [(0, 1), (1, 0), (1, 1), (2, 0)]
        assert found["kept"]
        assert found["session"] == 2


TORCHRUN = """
    import json, os, sys, torch
    import horovod.torch as hvd
    hvd.init()
    model = torch.nn.Linear(1, 1)

    @hvd.elastic.run
    def train(state):
        started = state.step
        while state.step < 6:
            if state.step == 4 and hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os._exit(5)
            # Synchronizes the ranks, so that no rank commits this step before the others have reached it.
            hvd.allreduce(torch.ones(1), name="step")
            with torch.no_grad():
                model.weight.fill_(state.step)
            state.step += 1
            state.commit()
        return started, model.weight.item()

    result = train(hvd.elastic.TorchState(model=model, step=0))
    with open(os.path.join(sys.argv[1], f"{hvd.rank()}.json"), "w") as file:
        json.dump(result, file)
"""


@pytest.mark.more
@pytest.mark.timeout(240)
def test_torchrun_restarts_all_workers(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TORCHRUN))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results == [[4, 5.0]] * 2, "training resumes from the last commit, which is step 4"


_DRIVEN = """
import json, os, sys, time
import torch
import horovod.torch as hvd

hvd.init()
host = os.environ["HOROVOD_HOSTNAME"]
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, sizes=[])

@hvd.elastic.run
def train(state):
    while 3 not in state.sizes or state.sizes[-2:] != [2, 2]:
        assert state.epoch < 1000, "the update about the second host has not arrived"
        if state.sizes.count(3) == 2 and host == "b":
            os._exit(7)
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
        state.sizes.append(hvd.size())
        state.epoch += 1
        # From now on the test's discovery reports a second host.
        open(sys.argv[1] + "/trains", "w").close()
        time.sleep(0.02)
        state.commit()
    return state.sizes, state.epoch

print(json.dumps([host, hvd.rank(), train(state)]), file=open(sys.argv[1] + f"/{host}{hvd.local_rank()}.json", "w"))
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_an_elastic_driver_in_a_script(tmp_path):
    """A script starts the workers of an `ElasticDriver` itself; `hvd.init()` gets its rank from the driver's store.

    A second host appears: the workers are notified, and the next session includes it. Then its worker dies, and the
    others continue.
    """
    from horovod.runner import gloo_run
    from horovod.runner.elastic.discovery import HostDiscovery
    from horovod.runner.elastic.settings import ElasticSettings

    class Hosts(HostDiscovery):
        def find_available_hosts_and_slots(self):
            return {"a": 2, "b": 1} if (tmp_path / "trains").exists() else {"a": 2}

    (tmp_path / "train.py").write_text(_DRIVEN)
    outputs, codes = [], {}

    def start(line, slot, events):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        worker = subprocess.Popen(
            ["sh", "-c", f"exec env {line}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while worker.poll() is None:
            if any(event.wait(0.05) for event in events):
                worker.kill()
        outputs.append(worker.communicate()[0])
        codes[f"{slot.hostname}[{slot.local_rank}]"] = worker.returncode
        return worker.returncode, time.time()

    settings = ElasticSettings(
        discovery=Hosts(),
        min_num_proc=1,
        max_num_proc=None,
        elastic_timeout=60,
        reset_limit=None,
        num_proc=2,
        nics=["lo"],
    )
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    try:
        gloo_run.launch_gloo_elastic(command, start, settings, {}, None, None, None)
    except RuntimeError as error:
        pytest.fail("\n".join([str(error), *outputs]))
    assert codes == {"a[0]": 0, "a[1]": 0, "b[0]": 7}, outputs
    warned = [line for text in outputs for line in text.splitlines() if "Warning" in line]
    assert warned, outputs
    assert all("the job goes on from the last commit: rank " in line for line in warned), outputs
    for number in (0, 1):
        host, rank, (sizes, epochs) = json.loads((tmp_path / f"a{number}.json").read_text())
        before = sizes.index(3)
        assert (host, rank, epochs) == ("a", number, len(sizes))
        assert before > 0
        assert sizes == [2] * before + [3, 3, 2, 2]
