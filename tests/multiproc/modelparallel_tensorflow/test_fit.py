"""`fit`, `evaluate` and `predict` with a model on two partitions give the results of one process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from support import Forked, more, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def _compare_fits(folder, names):
    import tensorflow as tf

    from support import keras_fits

    tf.keras.backend.set_floatx("float64")
    _check_inputs()
    return [keras_fits.compare(name, Path(folder)) for name in names]


def _line(base):
    """Returns a model class of two `Dense(1)` layers that start as the identity."""
    import tensorflow as tf

    class Line(base):
        def __init__(self):
            super().__init__()
            self.one, self.two = (tf.keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2))

        def call(self, x):
            return self.two(self.one(x))

    return Line


def _compiled(kind, loss="mse", **options):
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    model = kind()
    model.compile(tf.keras.optimizers.SGD(0.1), loss, **options)
    return model


def _rows():
    import numpy as np

    return np.linspace(-1, 1, 20)[:, None]


def _check_inputs():
    """`fit` with arrays that each rank shuffles differently, and with different generators: rank 0's batches are used.

    The second `fit` runs eagerly.
    """
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2})
    x, model = _rows(), _compiled(_line(smp.DistributedModel))
    tf.random.set_seed(smp.rank())
    history = model.fit(x, 3 * x, batch_size=10, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 1e-3 < history[0], history
    assert len(set(smp.allgather(history[-1]))) == 1

    def batches():
        for _ in range(40):
            # Rank 1's batches are zeros and must be ignored.
            yield x[:10] * (1 - smp.rank()), 5 * x[:10] * (1 - smp.rank())

    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(batches(), epochs=1, verbose=0, steps_per_epoch=40)
    np.testing.assert_allclose(model.predict(x, verbose=0), 5 * x, atol=0.2)


def _errors():
    """Collects the errors of invalid calls; also trains with a custom `train_step`."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras, found, x = tf.keras, {}, _rows().astype("float32")
    smp.init({"partitions": 2, "microbatches": 2})
    line = _line(smp.DistributedModel)

    class Plain(line):
        def train_step(self, data):
            with tf.GradientTape():
                self(data[0], training=True)

    class Stepping(line):
        def train_step(self, data):
            gradients, loss = self.learn(*data)
            gradients = [each.accumulate() for each in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"of mine": loss.reduce_mean()}

        @smp.step
        def learn(self, x, y):
            loss = tf.reduce_mean(tf.square(self(x) - y))
            return self.optimizer.get_gradients(loss, self.trainable_variables), loss

    class Masked(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Embedding(3, 2, mask_zero=True), keras.layers.Dense(1)

        def call(self, x):
            y = self.two(self.one(x))
            return {"one": y, "two": y}

    def refused(name, call):
        try:
            call()
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def failing():
        for number in range(5):
            if number == 4 and smp.rank():
                raise KeyError("no such file")
            yield x[:10], x[:10]

    model = _compiled(Stepping)
    history = model.fit(x, 3 * x, batch_size=10, epochs=12, verbose=0, shuffle=False).history
    assert list(history) == ["of mine"]
    assert history["of mine"][-1] < 1e-3
    short = x[: 20 - 10 * smp.rank()]
    refused("lengths", lambda: model.fit(short, short, batch_size=10, verbose=0))
    refused("calls", lambda: (model.evaluate if smp.rank() else model.train_on_batch)(x, x))
    refused("batch", lambda: model.fit(failing(), verbose=0, steps_per_epoch=5))
    refused("no step", lambda: _compiled(Plain).fit(x, x, verbose=0))
    none = keras.losses.MeanSquaredError(reduction="none")
    refused("reduction", lambda: _compiled(line, none).fit(x, x, verbose=0))
    words = np.ones((4, 2), "int32")
    both = {"one": words[..., None], "two": words[..., None]}
    refused("masks", lambda: _compiled(Masked, {"one": "mse", "two": "mse"}).fit(words, both, verbose=0))
    with pytest.warns(UserWarning, match="jit_compile"):
        _compiled(line, jit_compile=True)
    found["XLA"] = _compiled_on_gpus(line)
    return found


def _compiled_on_gpus(line):
    """Returns the warnings of models for which Keras would choose XLA, and how many were counted."""
    import os
    import warnings

    import tensorflow as tf

    from smdistributed import _core

    devices, listed = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")], tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda device_type=None: devices
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for arguments in ({}, {"jit_compile": "auto"}, {"jit_compile": False}, {"run_eagerly": True}):
                _compiled(line, **arguments)
    finally:
        tf.config.list_physical_devices = listed
    counts = dict(_core.running_fallbacks(os.getpid())[0][2])
    return [str(one.message) for one in caught if "XLA" in str(one.message)], counts["without_xla"]


def _adds_epsilon():
    """Returns whether Keras adds 1e-7 to the number of unmasked elements that a loss is divided by (before 3.13)."""
    version = importlib.metadata.version("keras").split(".")
    return tuple(map(int, version[:2])) < (3, 13)


@pytest.mark.parametrize(
    ("keras", "names"),
    [
        pytest.param("keras", ("regression",), id="keras"),
        more("keras", ("classes", "words", "several"), id="keras, other models"),
        more("tf_keras", ("regression", "classes", "words", "several"), id="tf_keras"),
    ],
)
def test_models_learn_as_in_one_process(keras, names, tmp_path):
    older = keras == "tf_keras"
    env, launcher = ({**ENV, "TF_USE_LEGACY_KERAS": "1"}, "smdrun") if older else (ENV, Forked("tensorflow"))
    for differences in run_ranks(_compare_fits, 2, str(tmp_path), names, launcher=launcher, env=env, timeout=280):
        for name, difference in zip(names, differences, strict=True):
            assert difference < (1e-7 if name == "words" and not older and _adds_epsilon() else 1e-12), name


def _shortest(folder):
    import tensorflow as tf

    from support import keras_fits, keras_models

    tf.keras.backend.set_floatx("float64")
    stepped, variables = keras_models.compare("residual", "float64", 2, 2, "interleaved", "tape")
    assert variables > 0
    return stepped, keras_fits.compare("classes", Path(folder))


@pytest.mark.parametrize("keras", [more("keras"), "tf_keras"])
def test_the_shortest_training(keras, tmp_path):
    """One step and one `fit`, short enough for `make matrix`, which runs it with many versions."""
    env = {**ENV, "TF_USE_LEGACY_KERAS": str(int(keras == "tf_keras"))}
    for differences in run_ranks(_shortest, 2, str(tmp_path), launcher="smdrun", env=env, timeout=200):
        assert max(differences) < 1e-10, differences


def test_invalid_calls_raise_on_every_rank():
    first, second = run_ranks(_errors, 2, launcher=Forked("tensorflow"), env=ENV, timeout=280)
    expected = {
        "lengths": ("SMPMismatchError", "partition 0 batch 2 of `fit` is", "partition 1 `fit` has ended"),
        "calls": ("SMPMismatchError", "partition 0 batch 1 of `fit` is", "partition 1 batch 1 of `evaluate` is"),
        "no step": ("SMPUsageError", "in the body of a `smp.step` function only, also in a `train_step`"),
        "reduction": ("SMPUnsupportedError", "take a `reduction` other than None"),
        "masks": ("SMPUnsupportedError", "the model has other losses beside it"),
    }
    for name, (kind, *texts) in expected.items():
        for found in (first, second):
            assert found[name][0] == kind, (name, found[name])
            assert all(text in found[name][1] for text in texts), (name, found[name])
    for found, of_others in ((first, True), (second, False)):
        assert "no such file" in found["batch"][1], found["batch"]
        assert (found["batch"][0] == "SMPMismatchError") == of_others, found["batch"]
        (text,), times = found["XLA"]
        assert "because a step over microbatches is not one function" in text
        assert times == 2


def _replicas(name, key):
    from support import keras_fits

    return keras_fits.compare_replicas(name, key)


@pytest.mark.parametrize(("name", "key"), [("words", "ddp"), more("regression", "ddp"), more("regression", "horovod")])
def test_replicas_learn_as_one_process(name, key):
    for difference in run_ranks(_replicas, 4, name, key, launcher=Forked("tensorflow"), env=ENV, timeout=280):
        assert difference < (1e-7 if _adds_epsilon() else 1e-9)
