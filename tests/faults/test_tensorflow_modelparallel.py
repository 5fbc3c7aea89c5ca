"""A failure within a model-parallel step of TensorFlow ends the step on every rank, with an error that names the rank.
Some cases of end_tensorflow_steps.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from pathlib import Path

import pytest

from support import Forked, start_ranks
from support.rank_main import announce
from support.tf_env import ENV

_spec = importlib.util.spec_from_file_location(
    "end_tensorflow_steps", Path(__file__).with_name("end_tensorflow_steps.py")
)
end_tensorflow_steps = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(end_tensorflow_steps)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    ("partitions", "replicas", "victim", "kind"),
    [(2, 1, 1, "dies"), (3, 1, 1, "differs"), (2, 2, 3, "dies"), (3, 1, 2, "raises"), (2, 1, 0, "raises first")],
)
def test_all_ranks_get_the_error_that_ends_a_step(partitions, replicas, victim, kind):
    # Normally takes milliseconds. The limit allows for a busy machine.
    end_tensorflow_steps.run(partitions, victim, kind, 0.03, limit=30.0, replicas=replicas)


def _train_in_a_function(kind):
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = (tf.keras.layers.Dense(32, "tanh") for _ in range(2))

        def call(self, x):
            with tf.control_dependencies([tf.debugging.assert_less(x, 2.0, message="too much")]):
                x = self.one(tf.identity(x))
            with smp.partition(1):
                return self.two(x)

    model = Model()

    @smp.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def train(x):
        gradients, loss = step(x)
        return [each.accumulate() for each in gradients], loss.reduce_mean()

    x = tf.ones([8, 32])
    for _ in range(3):
        train(x)
    announce("training")
    if kind == "fails":
        train(3 * x)
    while True:
        train(x)


@pytest.mark.parametrize(("kind", "victim"), [("dies", 1), ("fails", 0)])
def test_a_failure_in_a_traced_function_names_the_rank(kind, victim):
    """The step's Python code does not run again once `tf.function` has traced it, so TensorFlow raises the errors."""
    with start_ranks(_train_in_a_function, 2, kind, launcher=Forked("tensorflow"), env=ENV, timeout=100) as job:
        job.wait_for("training")
        began = job.kill(victim) if kind == "dies" else None
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    if kind == "fails":
        assert outcome.ranks[victim].error_types[:1] == ("InvalidArgumentError",), outcome.describe()
        assert "too much" in outcome.ranks[victim].error
    other = outcome.ranks[1 - victim]
    assert f"rank {victim} " in other.error, outcome.describe()
    # Normally takes milliseconds, or three seconds. The limit allows for a busy machine.
    assert began is None or other.ended_at - began < 30.0, outcome.describe()


def _model_that_asserts():
    """Makes a model of two partitions with one layer each; the second partition asserts that its input is less than 2."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = (tf.keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2))

        def call(self, x):
            x = self.one(x)
            with smp.partition(1), tf.control_dependencies([tf.debugging.assert_less(x, 2.0, message="too much")]):
                return self.two(tf.identity(x))

    return Model()


def _catch(kind):
    """Rank 1 catches the error of an operation and continues to a barrier. Rank 0 must still learn of the error, though
    it waits for no message of the step.
    """
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    model = _model_that_asserts()
    x = np.ones((4, 1), "float32")
    if kind.startswith("fit"):
        model.compile("sgd", "mse", run_eagerly=kind == "fit eagerly")

        def run():
            model.fit(x, x, batch_size=4, verbose=0)
    else:
        step = smp.step(lambda x: model(x))
        train = tf.function(lambda x: step(x).merge())

        def run():
            # An operation after the step may fail without ending the job: the step itself is complete on all ranks.
            with pytest.raises(tf.errors.InvalidArgumentError, match="afterwards"):
                checked(tf.constant(x))
            train(tf.constant(x))

        @tf.function
        def checked(x):
            with tf.control_dependencies([tf.debugging.assert_less(step(x).merge(), 0.0, message="afterwards")]):
                return tf.identity(x)

    run()
    # Longer than the time after which a failed step ends the job: a step that succeeded must not start that clock.
    time.sleep(1.5)
    run()
    announce("trained")
    # Only the last microbatch fails, so rank 0 has nothing left to receive.
    x[-1] = 30.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="too much") if smp.rank() else contextlib.nullcontext():
        train(tf.constant(x)) if kind == "function" else run()
    smp.barrier()
    raise AssertionError("no rank was told of the failed operation")


@pytest.mark.parametrize("kind", ["function", "fit", "fit eagerly"])
def test_all_ranks_learn_of_an_operation_error_that_was_caught(kind):
    with start_ranks(_catch, 2, kind, launcher=Forked("tensorflow"), env=ENV, timeout=60) as job:
        job.wait_for("trained")
        began = time.monotonic()
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    assert "rank 1 " in outcome.ranks[0].error, outcome.describe()
    if kind != "function":
        assert outcome.ranks[0].error.count("too much") == 1, outcome.describe()
    # Well before the timeouts of the waiting ranks.
    assert outcome.ranks[0].ended_at - began < 25.0, outcome.describe()
    assert "no rank was told" not in outcome.ranks[1].error, outcome.describe()
