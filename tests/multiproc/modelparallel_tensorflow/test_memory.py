"""Memory of Keras models on partitions, and delayed initialization of their variables."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import Forked, more, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]
_BENCHES = Path(__file__).parents[3] / "benches" / "modelparallel"
#: The model whose memory is measured has 32 layers of 1 MiB each.
_LAYERS, _WIDTH = 32, 512
#: On CPUs, TensorFlow counts the bytes of tensors only in oneDNN's allocator, which is the default on some processors
#: only. The resident size of the process is not a substitute: it also grows with the graph, which contains every
#: microbatch.
_COUNTED = {**ENV, "TF_ENABLE_ONEDNN_OPTS": "1"}


def _peak(microbatches):
    sys.path.insert(0, str(_BENCHES))
    import keras_steps

    return keras_steps.peak(2, microbatches, layers=_LAYERS, width=_WIDTH, rows=8)


def _few_microbatches():
    # Measured first, so that no earlier test has allocated memory.
    peak = _peak(2)
    _check_delayed_initialization()
    return peak


@pytest.fixture(scope="module")
def few():
    return run_ranks(_few_microbatches, 2, launcher=Forked("tensorflow"), env=_COUNTED, timeout=280)


def _check_delayed_initialization():
    """A delayed variable is initialized at its first read: not when it is only recorded, again after a failure, and
    once for concurrent reads."""
    import tensorflow as tf

    from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import DelayedVariable
    from smdistributed.modelparallel.tensorflow.tracing.gradient_tracking import GradientTracker

    made = []

    def make():
        made.append(threading.get_ident())
        if len(made) == 1:
            raise MemoryError
        time.sleep(0.2)
        return tf.ones([2])

    variable = DelayedVariable(make, shape=[2], dtype=tf.float32)
    with tf.Graph().as_default():
        GradientTracker()._record([variable], [tf.constant(1.0)])
    assert not made
    with pytest.raises(MemoryError):
        variable.read_value()
    with ThreadPoolExecutor(4) as threads:
        values = list(threads.map(lambda _: variable.numpy().tolist(), range(4)))
    assert values == [[1.0, 1.0]] * 4
    assert len(made) == 2


def test_each_rank_has_a_part_of_the_variables(few):
    parts = [part for part, *_ in few]
    assert sum(parts) == 1
    assert max(parts) < 0.6


def test_more_microbatches_need_no_more_memory(few):
    many = run_ranks(_peak, 2, 16, launcher=Forked("tensorflow"), env=_COUNTED, timeout=280)
    for (part, _, tensors), (_, _, tensors_more) in zip(few, many, strict=True):
        if tensors is None:
            pytest.skip("TensorFlow's build for this processor does not count the bytes of tensors")
        assert tensors_more <= 1.2 * tensors, (few, many)
        # Held are the variables, their accumulated gradients, and a few gradients not yet added, but no gradient per
        # microbatch.
        variables = part * _LAYERS * _WIDTH**2 * 4
        assert all(2 * variables < each < 2.5 * variables for each in (tensors, tensors_more)), (few, many)


def _build_peaks():
    """Returns the peak memory of this rank (of four) while a model is built and partitioned, relative to the model's
    size.

    Two kinds of model are measured: one whose layers are built in the first step, and a functional one that is built in
    its constructor, with an optimizer. Also asserts that initial values equal those of one process, even for a variable
    that is read before the model is partitioned.
    """
    import ctypes
    import gc

    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    sys.path.insert(0, str(_BENCHES))
    import keras_steps

    keras = tf.keras
    width, layers = 1024, 24

    def row(width):
        return [keras.layers.Dense(width, use_bias=False, name=f"layer{i}") for i in range(layers)]

    def made(base, functional, width):
        class Model(base):
            def __init__(self):
                super().__init__()
                self.row = row(width)
                if functional:
                    inputs = outputs = keras.Input([width])
                    for layer in self.row:
                        outputs = layer(outputs)
                    self.whole = keras.Model(inputs, outputs)

            def call(self, x):
                if functional:
                    return self.whole(x)
                for layer in self.row:
                    x = layer(x)
                return x

        return Model()

    def divided(functional, width):
        smp.shutdown()
        smp.init({"partitions": 4, "microbatches": 1})
        keras.utils.set_random_seed(7)
        model, optimizer = made(smp.DistributedModel, functional, width), keras.optimizers.Adam(1e-3)
        if functional:
            optimizer.build(model.trainable_variables)
        return model, smp.step(lambda x: model(x)), optimizer

    class Calling(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(4, 4), initializer="ones", name="w")
            self.buffer = np.ones([4], np.float32)
            self.b = self.add_weight(shape=(4,), initializer=keras.initializers.Constant(self.buffer), name="b")
            self.buffer[:] = 5.0

        @tf.function
        def call(self, x):
            return self.build_graph(x)

        @tf.function
        def build_graph(self, x):
            return tf.matmul(x, tf.convert_to_tensor(self.w)) + self.b

    smp.shutdown()
    smp.init({"partitions": 4})
    # A layer whose `call` is a tf.function. Its bias keeps the value that the initializer's buffer had in `build`,
    # although the buffer changes before the variable is initialized.
    inputs = keras.Input([4])
    outputs = Calling()(inputs)
    np.testing.assert_array_equal(
        keras.Model(inputs, outputs).predict(np.ones([1, 4], np.float32), verbose=0), [[5.0] * 4]
    )
    for functional in (False, True):
        model, step, optimizer = divided(functional, 4)
        if functional:
            read = model.row[5].kernel.numpy()
            model.row[9].set_weights([read])
        step(tf.ones([1, 4]))
        keras.utils.set_random_seed(7)
        plain = made(keras.Model, functional, 4)
        plain(tf.ones([1, 4]))
        if functional:
            plain.row[9].set_weights([read])
            np.testing.assert_array_equal(read, plain.row[5].kernel)
        assert sum(smp.allgather(len(model.weights))) == layers
        names = [layer.name for layer in model.row if id(layer.weights[0]) in map(id, model.weights)]
        for layer in plain.row:
            if layer.name in names:
                np.testing.assert_array_equal(layer.kernel, model.row[int(layer.name[5:])].kernel)
    peaks = []
    for functional in (False, True):
        smp.shutdown()
        gc.collect()
        # Memory that the previous model has freed is not counted as resident.
        ctypes.CDLL(None).malloc_trim(0)
        base = keras_steps.resident("VmRSS")
        # Resets the kernel's peak of the resident size (VmHWM).
        Path("/proc/self/clear_refs").write_text("5")
        model, step, optimizer = divided(functional, width)
        step(tf.ones([1, width]))
        peaks.append((keras_steps.resident("VmHWM") - base) / (4 * layers * width**2))
        del model, step, optimizer
    return peaks


@pytest.mark.parametrize("keras", ["keras", more("tf_keras")])
def test_no_rank_has_the_whole_model_while_it_is_built(keras):
    older = keras == "tf_keras"
    env, launcher = ({**ENV, "TF_USE_LEGACY_KERAS": "1"}, "smdrun") if older else (ENV, Forked("tensorflow"))
    for plain, with_optimizer in run_ranks(_build_peaks, 4, launcher=launcher, env=env, timeout=280):
        # A rank holds a quarter of the model, and temporaries of the size of some layers, up to a third. Adam's slots
        # take twice as much again.
        assert 0.25 <= plain < 0.6, plain
        assert 0.4 <= with_optimizer < 1.1, with_optimizer
