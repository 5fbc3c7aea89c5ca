"""Collectives in tf.data, py_function, user threads and XLA, and training with `fit`; one job runs all checks."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest

from support import Forked, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
DIGITS = Path(__file__).parents[3] / "examples" / "tensorflow_digits.py"


def calls():
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    for check in (xla, data_threads, python_functions, user_threads, a_failing_operation, fit, no_gradients_at_all):
        started = time.monotonic()
        check(tf, sdp)
        print(f"{check.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    sdp.shutdown()


def xla(tf, sdp):
    """XLA cannot compile the collectives: its error names the operation."""
    tape = sdp.DistributedGradientTape
    for function in (sdp.oob_allreduce, lambda x: sdp.broadcast(x, 0), lambda x: _gradient(tape(tf.GradientTape()), x)):
        with pytest.raises((tf.errors.OpError, ValueError), match=r"unsupported operations .* Smd[A-Z]"):
            tf.function(function, jit_compile=True)(tf.ones(3))
    # A collective works in a function that calls an XLA-compiled one.
    square = tf.function(tf.square, jit_compile=True)
    outer = tf.function(lambda x: sdp.oob_allreduce(square(x), op=sdp.ReduceOp.SUM))
    assert outer(tf.constant(3.0)).numpy() == 9.0 * sdp.size()


def _gradient(tape, x):
    with tape:
        tape.watch(x)
        loss = x * x
    return tape.gradient(loss, [x])[0]


def data_threads(tf, sdp):
    data = tf.data.Dataset.range(12).map(
        lambda i: sdp.oob_allreduce(i, op=sdp.ReduceOp.SUM, name="element"), num_parallel_calls=1
    )
    assert [int(i) for i in data.prefetch(2)] == [i * sdp.size() for i in range(12)]


def python_functions(tf, sdp):
    def call(x):
        return sdp.oob_allreduce(x, op=sdp.ReduceOp.SUM, name="from python")

    function = tf.function(lambda x: 2.0 * tf.py_function(call, [x], tf.float32))
    for turn in range(3):
        assert function(tf.constant(float(turn))).numpy() == 2.0 * turn * sdp.size()


def user_threads(tf, sdp):
    results = {}

    def train(which):
        variable = tf.Variable([1.0, 2.0])

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * (sdp.rank() + which))
            return tape.gradient(loss, variable), sdp.oob_allreduce(loss, name=f"loss.{which}")

        results[which] = [step()[1].numpy() for _ in range(5)]

    threads = [threading.Thread(target=train, args=(which,)) for which in range(3)]
    for thread in threads if sdp.rank() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    mean = (sdp.size() - 1) / 2
    assert results == {which: [3.0 * (mean + which)] * 5 for which in range(3)}


def a_failing_operation(tf, sdp):
    """A failing assertion in a function with collectives raises on all ranks, and the next call succeeds."""
    variables = [tf.Variable(tf.ones(4)) for _ in range(2)]

    @tf.function
    def step(x, fails):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            hidden = variables[1] * x
            with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["no good", x])]):
                loss = tf.reduce_sum(variables[0] * tf.identity(hidden))
        return tape.gradient(loss, variables)

    x = tf.constant(sdp.rank() + 1.0)
    for _ in range(2):
        for gradient in step(x, tf.constant(False)):
            assert gradient.numpy().tolist() == [(sdp.size() + 1) / 2] * 4
        with pytest.raises(tf.errors.InvalidArgumentError, match="no good"):
            step(x, tf.constant(True))


def fit(tf, sdp):
    import numpy as np

    keras = tf.keras
    x = np.random.default_rng(sdp.rank()).standard_normal((32, 6), dtype=np.float32)
    y = (x.sum(1) > 0).astype("float32")

    class Own(keras.Model):
        """A model with a custom `train_step`."""

        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x, training=None):
            return tf.cast(self.layer(x), tf.float32)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True)[:, 0] - y))
            tape = sdp.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": sdp.oob_allreduce(loss)}

    def build():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), keras.layers.Activation("linear")])

    for policy, make, wrap in (
        ("float32", Own, lambda optimizer: optimizer),
        ("mixed_float16", build, sdp.DistributedOptimizer),
        ("mixed_bfloat16", build, sdp.DistributedOptimizer),
    ):
        keras.mixed_precision.set_global_policy(policy)
        keras.utils.set_random_seed(sdp.rank())
        model = make()
        model(x[:1])
        sdp.broadcast_variables(model.variables, 0)
        before = [variable.numpy() for variable in model.trainable_variables]
        model.compile(wrap(keras.optimizers.SGD(0.05)), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        for variable, start in zip(model.trainable_variables, before, strict=True):
            everywhere = sdp.oob_allreduce(tf.convert_to_tensor(variable), op=sdp.ReduceOp.MAX)
            np.testing.assert_array_equal(everywhere, variable.numpy(), err_msg=policy)
            assert np.abs(variable.numpy() - start).max() > 1e-4, policy
    keras.mixed_precision.set_global_policy("float32")


def no_gradients_at_all(tf, sdp):
    """If one rank alone has no gradients, the error names the rank. If no rank has any, there is no error."""
    variables = [tf.Variable(tf.ones(3), name=name) for name in ("first", "second")]

    def gradients(connected):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variables[0] * variables[1]) if connected else tf.constant(0.0)
        return tape.gradient(loss, variables)

    odd = sdp.rank() == sdp.size() - 1
    with pytest.raises(Exception, match=r"has a gradient on rank 0 and none on rank"):
        gradients(not odd)
    assert [gradient.numpy().tolist() for gradient in gradients(True)] == [[1.0] * 3] * 2
    assert gradients(False) == [None, None]


def test_calls_from_everywhere():
    """The assertions are in `calls`, which runs on each rank."""
    run_ranks(calls, 2, launcher=Forked("tensorflow"), env=_ENV, timeout=180)


@pytest.mark.more
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_the_example(tmp_path):
    run_ranks(DIGITS, 2, "--epochs", "3", "--out", tmp_path, env=_ENV, timeout=180)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["replicas_are_equal"]
    assert results["accuracy"] > 0.9
    assert (tmp_path / "model.keras").exists()
