"""Replicas that start from different values: rank 0 warns once, in the first step, and names the missing broadcast."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from support import Forked, start_ranks

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
WARNING = "every rank trains a model of its own"


def announce(part):
    print(f"<{part}>", file=sys.stderr, flush=True)


def warnings_by_part(body, size, framework, *args, timeout=100):
    """Returns how often rank 0 warned in each part of the body, and its output. Asserts that no other rank warned."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    with start_ranks(body, size, *args, launcher=Forked(framework), env=ENV, timeout=timeout) as job:
        outcome = job.wait()
    assert (outcome.exit_code, outcome.timed_out) == (0, False), outcome.output
    ranks = re.split(r"--- rank \d+ ---\n", outcome.output)[1:]
    assert all(WARNING not in output for output in ranks[1:]), outcome.output
    parts = re.split(r"<([\w ]+)>\n", ranks[0])
    return {part: text.count(WARNING) for part, text in zip(parts[1::2], parts[2::2], strict=True)}, ranks[0]


def torch_optimizers():
    import torch

    import horovod.torch as hvd

    for part in ("nothing", "broadcast", "equal", "adasum", "one rank alone"):
        announce(part)
        hvd.init(process_sets=[hvd.ProcessSet([1])])
        torch.manual_seed(0 if part == "equal" else hvd.rank())
        model = torch.nn.Linear(3, 2)
        if part == "broadcast":
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if part != "one rank alone":
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), op=hvd.Adasum if part == "adasum" else hvd.Average
            )
        elif hvd.rank() == 1:
            # Rank 1 sends a checksum and rank 0 sends none: rank 1 does not wait for it, and nothing is compared.
            replicas = importlib.import_module("smdistributed._common.replicas")
            replicas.report([()], [b"1"], [0, 1], "nothing", is_final=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        hvd.shutdown()


def test_optimizers_of_torch():
    counts, output = warnings_by_part(torch_optimizers, 2, "torch")
    assert counts == {"nothing": 1, "broadcast": 0, "equal": 0, "adasum": 1, "one rank alone": 0}, output
    assert "rank 1 has other values of the variables than rank 0" in output
    assert "Call `hvd.broadcast_parameters(model.state_dict(), root_rank=0)`" in output


def tapes(name):
    """Trains eagerly and in a `tf.function`, without a broadcast and with one before, in or after the first step."""
    import tensorflow as tf

    hvd = importlib.import_module(name)

    def step(variables, broadcasts):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0]) * variables[1]
        tape = hvd.DistributedGradientTape(tape)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        if broadcasts:
            hvd.broadcast_variables(variables, 0)

    for mode in ("eager", "function"):
        for part in ("nothing", "before", "after", "inside", "equal", "one step"):
            announce(f"{mode} {part}")
            hvd.init()
            seed = 1.0 if part == "equal" else 1.0 + hvd.rank()
            variables = [tf.Variable([seed, 2.0]), tf.Variable(seed)]
            call = tf.function(step, autograph=False) if mode == "function" else step
            if part == "before":
                hvd.broadcast_variables(variables, root_rank=0)
            for number in range(1 if part == "one step" else 3):
                call(variables, part == "inside" and number == 0)
                if part == "after" and number == 0:
                    hvd.broadcast_variables(variables, root_rank=0)
            hvd.shutdown()


@pytest.mark.parametrize("name", ["horovod.tensorflow", "smdistributed.dataparallel.tensorflow"])
def test_tapes(name):
    counts, output = warnings_by_part(tapes, 2, "tensorflow", name)
    warns = {"nothing": 1, "before": 0, "after": 0, "inside": 0, "equal": 0, "one step": 1}
    expected = {f"{mode} {part}": count for mode in ("eager", "function") for part, count in warns.items()}
    assert counts == expected, output
    assert ".broadcast_variables(model.variables, root_rank=0)`" in output


def fit_models(name):
    import numpy as np
    import tensorflow as tf

    hvd = importlib.import_module(name)
    callbacks = importlib.import_module(f"{name}.callbacks")
    for part in ("nothing", "callback", "callback of an unbuilt model"):
        announce(part)
        hvd.init()
        tf.keras.utils.set_random_seed(hvd.rank())
        first = [] if "unbuilt" in part else [tf.keras.layers.Input((3,))]
        model = tf.keras.Sequential([*first, tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
        x = np.ones((32, 3), "float32")
        used = [] if part == "nothing" else [callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=used)
        hvd.shutdown()


@pytest.mark.parametrize("name", ["horovod.tensorflow.keras", "smdistributed.dataparallel.tensorflow.keras"])
def test_fit(name):
    counts, output = warnings_by_part(fit_models, 2, "tensorflow", name)
    assert counts == {"nothing": 1, "callback": 0, "callback of an unbuilt model": 0}, output
    assert "BroadcastGlobalVariablesCallback(0)`" in output
