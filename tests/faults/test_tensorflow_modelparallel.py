"""A rank of a TensorFlow pipeline that dies ends all others with an error that names it."""

from __future__ import annotations

import importlib.util

import pytest

from support import start_ranks
from support.rank_main import announce

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""


def _body(victim):
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 4})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(32), tf.keras.layers.Dense(32)

        def call(self, x):
            return self.two(self.one(x))

    model = Model()

    @smp.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables), loss

    for number in range(1 << 30):
        step(tf.ones([8, 16]))
        if number == 3 and smp.rank() == victim:
            announce("training")


@pytest.mark.timeout(200)
def test_a_killed_rank_is_named_by_the_other():
    victim = 1
    with start_ranks(_body, 2, victim, env=_ENV, timeout=180) as job:
        job.wait_for("training")
        killed = job.kill(victim)
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    survivor = outcome.ranks[0]
    assert survivor.error is not None, outcome.describe()
    assert survivor.error_types[0] == "SMPPeerFailedError", outcome.describe()
    assert f"rank {victim} " in survivor.error, outcome.describe()
    # 5 s on a machine at rest.
    assert survivor.ended_at - killed < 15.0, outcome.describe()
