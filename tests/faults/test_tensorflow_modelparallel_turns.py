"""Ranks of a pipeline call different things, or an exception leaves `fit` on one of them. All ranks get an error
promptly, and the job continues.
"""

from __future__ import annotations

import importlib.util
import time

import pytest

from support import Forked, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def _errors_of_situations(size, folder):
    """Runs each situation; returns the error that it raised on this rank and the seconds that it took."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    smp.init({"partitions": size, "microbatches": 2})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.row = [keras.layers.Dense(4) for _ in range(size)]

        def call(self, x):
            for layer in self.row:
                x = layer(x)
            return x

    class Failing(keras.callbacks.Callback):
        def __init__(self, ranks, hook="on_train_batch_end"):
            super().__init__()
            self.ranks = ranks
            setattr(self, hook, self.fail)

        def fail(self, batch, logs=None):
            if smp.rank() in self.ranks and batch == 1:
                raise ValueError(f"bad luck of {smp.rank()}")

    model, x = Model(), np.ones([8, 4], "float32")
    model.compile("sgd", "mse")
    step = smp.step(lambda x: model(x))
    train = tf.function(lambda x: step(x).merge())

    def fit(callback, **options):
        model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[callback], **options)

    def save():
        model.save_weights(f"{folder}/some.weights.h5")

    situations = {
        "barrier": (lambda: step(x), smp.barrier),
        "a function": (smp.mp_barrier, lambda: train(x)),
        "save": (lambda: smp.allgather(1), save),
        "predict": (lambda: step(x), lambda: model.predict(x, verbose=0)),
        "callback": (lambda: fit(Failing([1])),) * 2,
        "evaluation": (lambda: fit(Failing([1], "on_test_batch_end"), validation_data=(x, x)),) * 2,
        "all callbacks": (lambda: fit(Failing(range(size))),) * 2,
    }
    train(x), save()
    found = {}
    for name, calls in situations.items():
        began = time.monotonic()
        try:
            calls[smp.rank() == 1]()
        except (RuntimeError, ValueError, tf.errors.OpError) as error:
            found[name] = f"{type(error).__name__}: {error}", time.monotonic() - began
        # The job still works after each error.
        assert step(x).merge().shape == [8, 4]
        smp.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_call_different_things_get_an_error(size, tmp_path):
    found = run_ranks(
        _errors_of_situations, size, size, str(tmp_path), launcher=Forked("tensorflow"), env=ENV, timeout=100
    )
    differ = {
        "barrier": "partition 0 runs a step, and partition 1 calls `smp.barrier()`",
        "a function": "partition 0 calls `smp.barrier()`, and partition 1 runs a step",
        "save": "partition 0 calls `smp.allgather()`, and partition 1 saves or loads",
        "predict": "partition 0 runs a step, and partition 1 runs `fit`, `evaluate` or `predict`",
    }
    for rank, texts in enumerate(found):
        for name, text in differ.items():
            assert text in texts[name][0], (rank, texts)
        for name, activity in (("callback", "fit"), ("evaluation", "evaluate")):
            left = f"SMPMismatchError: partition 1 left `{activity}`: rank 1: ValueError: bad luck of 1"
            assert texts[name][0] == ("ValueError: bad luck of 1" if rank == 1 else left), (rank, texts)
        assert texts["all callbacks"][0] == f"ValueError: bad luck of {rank}", (rank, texts)
        # Normally takes milliseconds. The limit allows for a busy machine.
        assert all(seconds < 20.0 for _, seconds in texts.values()), (rank, texts)
