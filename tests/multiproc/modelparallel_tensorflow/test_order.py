"""Order of execution in steps on partitions: side effects, failed assertions, messages, several steps in a function."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support import Forked, run_ranks
from support.keras_models import two_layers
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def _run_checks(folder):
    return _orders(folder), _assertions(), _several()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of all checks by rank, from one job."""
    folder = str(tmp_path_factory.mktemp("order"))
    return run_ranks(_run_checks, 2, folder, launcher=Forked("tensorflow"), env=ENV, timeout=280)


def _orders(folder):
    """Layers and a step with side effects that no data dependency orders; results equal those of plain Keras.

    Plain Keras runs the microbatches one after the other. Returns the names that the layers have written to a file.
    """
    import time

    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras

    class Noting(keras.layers.Layer):
        """Multiplies by a counter, and appends its name to a file after `seconds`."""

        def __init__(self, name, seconds, file):
            super().__init__(name=name)
            self.counter = self.add_weight(shape=(), initializer="ones", trainable=False, name="counter")
            self.seconds, self.file = seconds, file

        def call(self, x):
            def note():
                time.sleep(self.seconds)
                with open(self.file, "a") as file:
                    file.write(f"{self.name}\n")
                return np.float32(0)

            tf.numpy_function(note, (), tf.float32)
            return x * tf.convert_to_tensor(self.counter)

    def made(base, file):
        class Model(base):
            def __init__(self):
                super().__init__()
                self.one, self.two = Noting("one", 0.05, file), Noting("two", 0.0, file)
                self.norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")

            def call(self, x):
                with smp.partition(0):
                    one = self.one(x)
                with smp.partition(1):
                    return one + self.norm(self.two(x), training=True)

        return Model()

    def body(model, x):
        model.one.counter.assign(tf.reduce_mean(x))
        outputs = model(x)
        model.two.counter.assign_add(1.0)
        counter, mean = model.two.counter, model.norm.moving_mean
        return outputs, tf.convert_to_tensor(counter) + 0.0, tf.convert_to_tensor(mean) + 0.0

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    model, plain = made(smp.DistributedModel, f"{folder}/effects"), made(keras.Model, "/dev/null")
    step = smp.step(lambda x: body(model, x))
    for seed in range(2):
        x = tf.constant(np.random.default_rng(seed).normal(size=(8, 3)), tf.float32)
        expected = [body(plain, part) for part in tf.split(x, 4)]
        for ours, theirs in zip(step(x), zip(*expected, strict=True), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    smp.barrier()
    return Path(folder, "effects").read_text().split()


def test_effects_keep_the_order_of_the_script(found):
    for noted, *_ in found:
        assert len(noted) == 16
        for count in range(len(noted)):
            assert noted[:count].count("one") >= noted[:count].count("two"), noted


def _assertions():
    """Returns the values of a variable whose assignment depends on an assertion, after the assertion has failed.

    With one partition each rank has the whole model.
    """
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2})
    model, largest = two_layers(smp.DistributedModel), tf.Variable(0.0)

    @smp.step(non_split_inputs=["limit"])
    def step(x, limit):
        with tf.control_dependencies([tf.debugging.assert_less(x, limit)]):
            largest.assign(tf.reduce_max(tf.identity(x)))
        return model(x)

    step(tf.ones([4, 3]), tf.constant(10.0))
    found = [float(largest)]
    # TensorFlow cancels the other microbatch, and may report that one's error first.
    refusals = tf.errors.InvalidArgumentError, tf.errors.CancelledError
    for _ in range(5):
        with pytest.raises(refusals):
            step(tf.fill([4, 3], 50.0), tf.constant(10.0))
        found.append(float(largest))
    return found


def test_an_assignment_does_not_run_after_its_assertion_fails(found):
    for _, values, _ in found:
        assert values == [1.0] * 6


def _several():
    """Returns the outputs of several steps that one function calls; the first ones send their tensors late."""
    import time

    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = (tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2))

        def call(self, x):
            with smp.partition(0):
                hidden = self.one(x)
            with smp.partition(1):
                return self.two(hidden)

    def slow(x):
        time.sleep(0.05 if x.max() < 3 else 0.0)
        return x

    model = Model()
    step = smp.step(lambda x: model(tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), x.shape)))
    other = smp.step(lambda x: model(x) + 1.0)

    @tf.function
    def in_turn(x):
        return tf.stack([step(x).merge(), other(10.0 * x).merge(), step(100.0 * x).merge()])

    @tf.function
    def in_branches(x):
        first = step(x).merge() if tf.reduce_sum(x) > 0.0 else other(x).merge()
        return tf.stack([first, other(10.0 * x).merge(), step(100.0 * x).merge()])

    def both(x):
        return step(x).merge() + other(10.0 * x).merge()

    @tf.function
    def in_a_loop(x):
        return tf.map_fn(lambda factor: both(factor * x), tf.range(1.0, 9.0), parallel_iterations=8)

    x = tf.ones([4, 1])
    step(x), other(x)
    found = [np.squeeze(each(x), -1).tolist() for each in (in_turn, in_branches, in_a_loop)]
    smp.barrier()
    return found


def test_steps_of_one_function_run_one_after_the_other(found):
    """The steps' messages have the same tags, so steps that overlapped would receive wrong tensors."""
    for *_, outputs in found:
        three = [[1.0] * 4, [11.0] * 4, [100.0] * 4]
        assert outputs == [three, three, [[11.0 * factor + 1.0] * 4 for factor in range(1, 9)]]


def _in_channels():
    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow.runtime import channels
    from support.keras_models import compare

    channels.device = lambda: "/device:CPU:0"
    difference, _ = compare("mlp", "float64", 2, 4, "zero_bubble", "tape")
    return difference, sorted(smp.state.groups.channels)


def test_tensors_in_channels_arrive_in_order():
    """Runs on CPUs the channels that connect GPUs. They match tensors by order; messages between hosts do not."""
    for difference, channels in run_ranks(_in_channels, 2, launcher=Forked("tensorflow"), env=ENV, timeout=280):
        assert difference < 1e-10
        assert channels == [(0, 1), (1, 0)]
