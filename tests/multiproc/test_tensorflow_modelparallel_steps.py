"""Steps of Keras models on partitions: what ranks hold, their timeline, and what models may have in them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import Forked, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]
_BENCHES = Path(__file__).parents[2] / "benches" / "modelparallel"
#: Of the model whose memory is measured; each layer has 1 MiB.
_LAYERS, _WIDTH = 32, 512


def _peak(microbatches):
    sys.path.insert(0, str(_BENCHES))
    import keras_steps

    return keras_steps.peak(2, microbatches, layers=_LAYERS, width=_WIDTH, rows=8)


def _everything(folder):
    # Nothing else has taken memory before.
    peak = _peak(2)
    _beginnings()
    return (
        peak,
        _forms(folder),
        _orders(folder),
        _assertions(),
        _several(),
        _slices(),
        _draws(),
        _arguments(),
        _weights(folder),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """All of it in one job."""
    folder = tmp_path_factory.mktemp("steps")
    env = {**ENV, "SMD_TIMELINE": str(folder / "trace.json")}
    return folder, run_ranks(_everything, 2, str(folder), launcher=Forked("tensorflow"), env=env, timeout=280)


def _beginnings():
    """A variable waits until it has its value: whatever goes wrong, whoever asks, and whatever is only said about it."""
    import tensorflow as tf

    from smdistributed.modelparallel.tensorflow.delayed import DelayedVariable
    from smdistributed.modelparallel.tensorflow.derivatives import Derivatives

    made = []

    def make():
        made.append(threading.get_ident())
        if len(made) == 1:
            raise MemoryError
        time.sleep(0.2)
        return tf.ones([2])

    variable = DelayedVariable(make, shape=[2], dtype=tf.float32)
    with tf.Graph().as_default():
        Derivatives()._note([variable], [tf.constant(1.0)])
    assert not made
    with pytest.raises(MemoryError):
        variable.read_value()
    with ThreadPoolExecutor(4) as threads:
        values = list(threads.map(lambda _: variable.numpy().tolist(), range(4)))
    assert values == [[1.0, 1.0]] * 4
    assert len(made) == 2


def _in_channels():
    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow import channels
    from support.keras_models import compare

    channels.device = lambda: "/device:CPU:0"
    difference, _ = compare("mlp", "float64", 2, 4, "zero_bubble", "tape")
    return difference, sorted(smp.state.groups.channels)


def test_tensors_in_channels_come_in_the_order_in_which_they_are_made():
    """As between GPUs, on CPUs: what a device needs of the order, messages between hosts do not."""
    for difference, channels in run_ranks(_in_channels, 2, launcher=Forked("tensorflow"), env=ENV, timeout=280):
        assert difference < 1e-10
        assert channels == [(0, 1), (1, 0)]


def test_each_rank_has_its_part(ranks):
    parts = [part for (part, *_), *_ in ranks[1]]
    assert sum(parts) == 1
    assert max(parts) < 0.6


def test_gradients_of_more_microbatches_take_no_more_memory(ranks):
    many = run_ranks(_peak, 2, 16, launcher=Forked("tensorflow"), env=ENV, timeout=280)
    for ((part, *few), *_), (_, *more) in zip(ranks[1], many, strict=True):
        (grown, tensors), (grown_more, tensors_more) = few, more
        if tensors is None:
            assert grown_more <= 1.2 * grown, (few, more)
            continue
        assert tensors_more <= 1.2 * tensors, (few, more)
        # The variables, the sums of their gradients, and those that are not added yet: not one of each.
        variables = part * _LAYERS * _WIDTH**2 * 4
        assert all(2 * variables < each < 2.5 * variables for each in (tensors, tensors_more)), (few, more)


def _born():
    """What this rank of four held at most, in parts of the whole, while models were built, by themselves and in a step, and divided; and whether
    first values are those of one process, also of what is read before."""
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
    # Keras describes a layer that has functions, which are run later.
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
        base = keras_steps.resident("VmRSS")
        # The kernel counts the most anew.
        Path("/proc/self/clear_refs").write_text("5")
        model, step, optimizer = divided(functional, width)
        step(tf.ones([1, width]))
        peaks.append((keras_steps.resident("VmHWM") - base) / (4 * layers * width**2))
        del model, step, optimizer
    return peaks


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_no_rank_has_the_whole_model_while_it_is_built(keras):
    older = keras == "tf_keras"
    env, launcher = ({**ENV, "TF_USE_LEGACY_KERAS": "1"}, "smdrun") if older else (ENV, Forked("tensorflow"))
    for plain, with_optimizer in run_ranks(_born, 4, launcher=launcher, env=env, timeout=280):
        # A quarter, and of what has the size of a layer a few; the optimizer has twice as much again, partly in memory that was free.
        assert 0.25 <= plain < 0.5, plain
        assert 0.6 <= with_optimizer < 1.1, with_optimizer


def test_the_timeline_shows_each_partition_at_work(ranks):
    lines = (ranks[0] / "trace.json").read_text().splitlines()[1:]
    events = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    for rank in range(2):
        names = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == rank}
        assert {"forward", "backward", "send", "receive", "wait"} <= names, (rank, names)
    # Step 0 is the first one with two microbatches; one stage on each rank.
    command = [sys.executable, "-m", "smdistributed", "report", str(ranks[0] / "trace.json"), "--step", "0"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "simulated from mean times:" in shown.stdout, shown.stdout


def _forms(folder):
    """What is in models or around them; compared with plain Keras where it is made."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    found = {}

    class Compiled(keras.layers.Layer):
        """A layer that XLA compiles, with a branch of its own."""

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x):
            compiled = tf.function(lambda x, scale: tf.tanh(x * scale), jit_compile=True)
            scale = tf.convert_to_tensor(self.scale)
            return tf.cond(tf.reduce_sum(x) > -1e9, lambda: compiled(x, scale), lambda: x)

    def made(base):
        class Model(base):
            def __init__(self):
                super().__init__()
                one, two, three = (keras.initializers.GlorotUniform(seed=seed) for seed in range(3))
                self.left = keras.layers.Dense(6, kernel_initializer=one, name="left")
                self.compiled = Compiled(name="compiled")
                self.right = keras.layers.Dense(6, kernel_initializer=two, name="right")
                self.head = keras.layers.Dense(2, kernel_initializer=three, name="head")

            def call(self, inputs):
                with smp.partition(1):
                    right = self.right(inputs["b"])
                    with smp.partition(0):
                        left = self.compiled(self.left(inputs["a"]))
                    return {"sum": self.head(left + right), "left": left}

        return Model()

    rng = np.random.default_rng(0)
    inputs = {name: tf.constant(rng.normal(size=(8, size)), tf.float32) for name, size in (("a", 3), ("b", 5))}

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1})
    model, optimizer = made(smp.DistributedModel), keras.optimizers.SGD(0.1)

    @smp.step(non_split_inputs=["scale"])
    def step(inputs, scale):
        outputs = model(inputs)
        loss = tf.reduce_mean(tf.square(scale * outputs["sum"])) + tf.reduce_mean(outputs["left"])
        return optimizer.get_gradients(loss, model.trainable_variables), loss, outputs

    gradients, loss, outputs = step(inputs, tf.constant(2.0))
    plain = made(keras.Model)
    with tf.GradientTape() as tape:
        expected = plain(inputs)
        whole = tf.reduce_mean(tf.square(2.0 * expected["sum"])) + tf.reduce_mean(expected["left"])
    np.testing.assert_allclose(loss.reduce_mean(), whole, atol=1e-6)
    np.testing.assert_allclose(outputs["sum"].merge(), expected["sum"], atol=1e-6)
    here = [id(each) for each in model.trainable_variables]
    with model._smp_as_whole():
        mine = [id(each) in here for each in model.trainable_variables]
    there = tape.gradient(whole, plain.trainable_variables)
    there = [each for each, own in zip(there, mine, strict=True) if own]
    for ours, theirs in zip(gradients, there, strict=True):
        np.testing.assert_allclose(ours.accumulate(), theirs, atol=1e-6)
    assert sorted(smp.allgather(len(gradients))) == [3, 4]
    model.save_model(f"{folder}/saved")
    served = tf.saved_model.load(f"{folder}/saved").signatures["serving_default"]
    given = {"inputs_a": inputs["a"], "inputs_b": inputs["b"]}
    results = sorted(served(**given).items())
    for (_, ours), (_, theirs) in zip(results, sorted(expected.items()), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    found["served"] = [name for name, _ in results]

    # The three methods, and a variable that is given, with what is not divided evenly as an error.
    for gradient in gradients:
        mean = gradient.reduce_mean()
        for options in ({"method": "add_n"}, {"method": "accumulate_n"}, {}, {"var": tf.Variable(tf.zeros_like(mean))}):
            np.testing.assert_allclose(gradient.accumulate(**options), mean, atol=1e-6)

    def refused(name, call):
        try:
            call()
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    refused("method", lambda: loss.accumulate("sum"))
    return found


def test_models_may_have_these_in_them(ranks):
    expected = {"method": ("SMPValidationError", "'sum'")}
    for _, found, *_ in ranks[1]:
        assert found.pop("served") == ["output_0", "output_1"]
        assert set(found) == set(expected), found
        for name, (kind, text) in expected.items():
            assert found[name][0] == kind, found
            assert text in found[name][1], found


def _scaled():
    """Losses, scales and counts of updates with gradients that are not finite on one partition in one step, there and in plain Keras."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)
    factors = [1.0, 1.0, np.inf, 1.0, 1.0, 1.0, 1.0]
    older = hasattr(keras.optimizers, "legacy") and keras.__name__.startswith("tf_keras")

    def made(base, frozen):
        class Model(base):
            def __init__(self):
                super().__init__()
                one, two = (keras.initializers.GlorotUniform(seed=seed) for seed in range(2))
                self.one = keras.layers.Dense(6, "tanh", kernel_initializer=one, trainable=not frozen)
                self.two = keras.layers.Dense(2, kernel_initializer=two)

            def call(self, x):
                return self.two(self.one(x))

        return Model()

    def state_of(optimizer):
        scale = optimizer.dynamic_scale if hasattr(optimizer, "dynamic_scale") else optimizer.loss_scale
        return float(scale), int(optimizer.iterations)

    def plainly(model, optimizer):
        model(x)
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
        for factor in factors:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x)))
                scale = optimizer.scale_loss if hasattr(optimizer, "scale_loss") else optimizer.get_scaled_loss
                scaled = scale(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            if not hasattr(optimizer, "scale_loss"):
                gradients = optimizer.get_unscaled_gradients(gradients)
            gradients = [factor * each for each in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            yield float(loss), *state_of(optimizer)

    def divided(model, optimizer, pairs):
        @smp.step
        def step(x):
            loss = tf.reduce_mean(tf.square(model(x)))
            if pairs:
                found = optimizer.compute_gradients(loss, model.trainable_variables)
                return [gradient for gradient, _ in found], loss
            return optimizer.get_gradients(loss, model.trainable_variables), loss

        @tf.function
        def train(x, factor):
            gradients, loss = step(x)
            gradients = [factor * each.accumulate() for each in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss.reduce_mean()

        for factor in factors:
            loss = train(x, tf.constant(factor if smp.rank() == 1 else 1.0, tf.float32))
            yield float(loss), *state_of(optimizer)

    found = []
    for kind in [keras.optimizers, *([keras.optimizers.legacy] if older else [])]:
        for frozen in (False, True):
            smp.shutdown()
            smp.init({"partitions": 2, "microbatches": 2})
            one, two = (
                keras.mixed_precision.LossScaleOptimizer(kind.Adam(0.05), dynamic_growth_steps=3) for _ in range(2)
            )
            model = made(smp.DistributedModel, frozen)
            ours = list(divided(model, one, frozen))
            theirs = list(plainly(made(keras.Model, frozen), two))
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
            assert sorted(smp.allgather(len(model.trainable_variables))) == ([0, 2] if frozen else [2, 2])
            found.append([scale for _, scale, _ in ours])
    return older, found


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_an_update_is_skipped_on_all_partitions_or_on_none(keras):
    older = keras == "tf_keras"
    env, launcher = ({**ENV, "TF_USE_LEGACY_KERAS": "1"}, "smdrun") if older else (ENV, Forked("tensorflow"))
    for is_older, found in run_ranks(_scaled, 2, launcher=launcher, env=env, timeout=280):
        assert (is_older, len(found)) == (older, 4 if older else 2)
        for scales in found:
            assert [scale / scales[0] for scale in scales] == [1, 1, 0.5, 0.5, 0.5, 1, 1], found


def _orders(folder):
    """Layers and a body with effects that nobody's operands tell of; what plain Keras finds, microbatch after microbatch."""
    import time

    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras

    class Noting(keras.layers.Layer):
        """Scales by a counter, and appends its name to a file, slowly or not."""

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


def test_effects_keep_the_order_of_the_script(ranks):
    for _, _, noted, *_ in ranks[1]:
        assert len(noted) == 16
        for count in range(len(noted)):
            assert noted[:count].count("one") >= noted[:count].count("two"), noted


def _assertions():
    """What a variable is when an assertion that its change waits for has failed; both ranks have the whole model."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2})
    model, largest = _two_layers(smp.DistributedModel), tf.Variable(0.0)

    @smp.step(non_split_inputs=["limit"])
    def step(x, limit):
        with tf.control_dependencies([tf.debugging.assert_less(x, limit)]):
            largest.assign(tf.reduce_max(tf.identity(x)))
        return model(x)

    step(tf.ones([4, 3]), tf.constant(10.0))
    found = [float(largest)]
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.fill([4, 3], 50.0), tf.constant(10.0))
        found.append(float(largest))
    return found


def test_what_waits_for_an_assertion_does_not_happen_when_it_fails(ranks):
    for _, _, _, found, *_ in ranks[1]:
        assert found == [1.0] * 6


def _several():
    """What steps return that one function calls, the first of which take longer to send than the others."""
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


def test_steps_of_one_function_run_one_after_the_other(ranks):
    """Their messages have the same tags."""
    for _, _, _, _, found, *_ in ranks[1]:
        three = [[1.0] * 4, [11.0] * 4, [100.0] * 4]
        assert found == [three, three, [[11.0 * factor + 1.0] * 4 for factor in range(1, 9)]]


def _slices():
    """What a step finds in arguments that slice themselves; what differs in more than tensors."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPUsageError

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})

    class Ragged:
        """Rows in an attribute of an attribute, and in a call."""

        def __init__(self, rows, number=1.0):
            self.parts, self.rows, self.number = {"some": [rows]}, lambda: rows, number

        def smp_slice(self, num_mb, mb, axis):
            rows = self.rows()
            count = rows.shape[axis] // num_mb
            return Ragged(rows[mb * count : (mb + 1) * count], self.number if mb == 0 else self.of_others())

        def of_others(self):
            return self.number

    class Counting(Ragged):
        def of_others(self):
            return self.number + 1.0

    model = _two_layers(smp.DistributedModel)
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)

    @smp.step
    def step(ragged, y):
        outputs = model(ragged.parts["some"][0])
        return outputs, tf.reduce_sum(ragged.rows(), 1) + ragged.number * tf.reduce_sum(outputs + y, 1)

    y = tf.constant(np.random.default_rng(1).normal(size=(8, 2)), tf.float32)
    plain = smp.step(lambda x: model(x))
    outputs, sums = step(Ragged(x), y)
    expected = plain(x).merge()
    np.testing.assert_allclose(outputs.merge(), expected, atol=1e-6)
    np.testing.assert_allclose(sums.merge(), tf.reduce_sum(x, 1) + tf.reduce_sum(expected + y, 1), atol=1e-5)

    # Pieces that were there before, small ones, also in a branch.
    class Ready(Ragged):
        def __init__(self, pieces):
            self.pieces = pieces

        def smp_slice(self, num_mb, mb, axis):
            return Ragged(self.pieces[mb])

    @smp.step
    def branching(ragged):
        rows = ragged.rows()
        return model(rows) + tf.cond(rows[0, 0] < 9.0, lambda: tf.reduce_sum(ragged.rows()), lambda: 0.0)

    pieces = tf.split(x, 2)
    expected = [model_rows + tf.reduce_sum(piece) for model_rows, piece in zip(plain(x), pieces, strict=True)]
    np.testing.assert_allclose(branching(Ready(pieces)).merge(), tf.concat(expected, 0), atol=1e-5)
    with pytest.raises(SMPUsageError, match="with microbatch 1 and"):
        step(Counting(x), y)
    smp.barrier()

    @smp.step
    def differing(x):
        return model(x) * (0.5 if smp.rank() else 0.25)

    try:
        differing(x)
    except Exception as error:
        return type(error).__name__, str(error)


def test_what_slices_itself_gives_each_microbatch_its_own(ranks):
    """And ranks whose steps differ in a number are told."""
    for *_, found, _, _, _ in ranks[1]:
        assert found[0] == "SMPMismatchError", found
        assert "Const[0.25]" in found[1], found
        assert "Const[0.5]" in found[1], found


def _draws():
    """Random numbers: those of one process if they have a seed, and the same wherever they are used."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)

    def made(base):
        class Model(base):
            def __init__(self):
                super().__init__()
                one, two = (keras.initializers.GlorotUniform(seed=seed) for seed in range(2))
                self.one = keras.layers.Dense(6, kernel_initializer=one, name="one")
                self.drop = keras.layers.Dropout(0.5, seed=3, name="drop")
                self.two = keras.layers.Dense(2, kernel_initializer=two, name="two")

            def call(self, x):
                with smp.partition(0):
                    hidden = self.drop(self.one(self.drop(x, training=True)), training=True)
                with smp.partition(1):
                    return self.drop(self.two(self.drop(hidden, training=True)), training=True)

        return Model()

    found = []
    for by_script in (True, False):
        smp.shutdown()
        options = {"auto_partition": False, "default_partition": 0} if by_script else {}
        smp.init({"partitions": 2, "microbatches": 4, **options})
        model, plain, optimizer = made(smp.DistributedModel), made(keras.Model), keras.optimizers.SGD(0.1)

        @smp.step
        def step(x, model=model, optimizer=optimizer):
            outputs = model(x)
            loss = tf.reduce_mean(tf.square(outputs))
            return optimizer.get_gradients(loss, model.trainable_variables), outputs

        for _ in range(2):
            gradients, outputs = step(x)
            expected, theirs = [], []
            for part in tf.split(x, 4):
                with tf.GradientTape() as tape:
                    expected.append(plain(part))
                    loss = tf.reduce_mean(tf.square(expected[-1]))
                theirs.append(tape.gradient(loss, plain.trainable_variables))
            np.testing.assert_allclose(outputs.merge(), tf.concat(expected, 0), atol=1e-6)
            for ours, row in zip(gradients, [*zip(*theirs, strict=True)][2 * smp.rank() :], strict=False):
                np.testing.assert_allclose(ours.accumulate(), sum(row) / 4, atol=1e-6)
        found.append(sum(tf.reduce_sum(tf.cast(each == 0.0, tf.int32)).numpy() for each in outputs))

    class Noisy(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            same = {"kernel_initializer": "identity", "use_bias": False}
            self.one, self.two = (keras.layers.Dense(3, **same) for _ in range(2))

        def call(self, x):
            noise = tf.random.normal(tf.shape(x))
            one = self.one(x + noise)
            return one, self.two(0.0 * one + noise), noise

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    tf.random.set_seed(smp.rank())
    noisy = Noisy()
    one, two, noise = (each.merge() for each in smp.step(lambda x: noisy(x))(x))
    np.testing.assert_allclose(one, x + two, atol=1e-5)
    np.testing.assert_array_equal(*smp.allgather(noise.numpy()))

    # Also what the body draws, for the model and for what is compared with its results.
    def once(x):
        return x + tf.random.normal(tf.shape(x))

    def looped(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, once(x)), (0, x))[1]

    for draw in (once, tf.function(looped)):

        @smp.step
        def drawn(x, draw=draw):
            x = draw(x)
            one, _, noise = noisy(x)
            loss = tf.reduce_mean(tf.square(one - noise - x))
            return tf.gradients(loss, [getattr(each, "value", each) for each in noisy.trainable_variables]), loss

        gradients, loss = drawn(x)
        assert all(float(each) < 1e-10 for each in loss), draw
        present = [each for gradient in gradients if gradient is not None for each in gradient]
        assert all(float(tf.reduce_max(abs(each))) < 1e-5 for each in present), draw
    return found


def test_random_numbers_are_drawn_once(ranks):
    for *_, found, _, _ in ranks[1]:
        assert found[0] == found[1] > 0, found


def _two_layers(base):
    import tensorflow as tf

    keras = tf.keras

    class Model(base):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)

        def call(self, x):
            return self.two(self.one(x))

    return Model()


def _arguments():
    """How often a step is traced, by the arguments that it has from `tf.function`."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    model, x = _two_layers(smp.DistributedModel), tf.ones([8, 3])
    smp.step(lambda x: model(x))(x)
    # What TensorFlow does not try to compute when it optimizes the graph.
    drawing = smp.step(lambda x: [model(x), tf.random.normal([2])]).get_concrete_function(x).graph
    kinds = {op.type for op in drawing.get_operations() if op.type.endswith("PartitionedCall")}
    assert kinds == {"StatefulPartitionedCall"}, kinds

    def traces(calls, **options):
        shapes = []

        def body(x, factor):
            shapes.append(x.shape[0])
            if tf.reduce_sum(x) < 0.0:
                x = -x
            return model(x) * factor

        step = smp.step(body, non_split_inputs=["factor"], **options)
        for rows, factor in calls:
            assert step(x[:rows], factor).merge().shape == [rows, 2]
        return shapes

    one = tf.constant(1.0)
    sizes = [(rows, one) for rows in (2, 4, 6, 8)]
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([])]
    found = {
        "shapes": traces(sizes),
        "input_signature": traces(sizes, input_signature=signature),
        "reduce_retracing": traces(sizes, reduce_retracing=True),
        "experimental_relax_shapes": traces(sizes, experimental_relax_shapes=True),
        "numbers of Python": traces([(8, 1.0), (8, 1.0), (8, 2.0)]),
        "tensors": traces([(8, one), (8, one + 1.0)]),
    }
    with pytest.warns(UserWarning, match="`jit_compile` is ignored"):
        plain = smp.step(lambda x: model(x), autograph=False, jit_compile=True, experimental_attributes={})
    assert plain(x).merge().shape == [8, 2]
    with pytest.raises(TypeError, match="no_such_argument"):
        smp.step(lambda x: model(x), no_such_argument=1)
    return found


def test_a_step_is_traced_as_a_function_of_tensorflow_is(ranks):
    for *_, found, _ in ranks[1]:
        assert found == {
            "shapes": [1, 2, 3, 4],
            "input_signature": [None],
            "reduce_retracing": [1, None],
            "experimental_relax_shapes": [1, None],
            "numbers of Python": [4, 4],
            "tensors": [4],
        }


def _weights(folder):
    """Those of a plain Keras model, when the model has been divided; with numbers of two sizes, too."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)
    found = {}
    for policy, off in (("float32", 1e-6), ("mixed_bfloat16", 2e-2)):
        keras.mixed_precision.set_global_policy(policy)
        keras.utils.set_random_seed(7)
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2})
        model, plain, other = _two_layers(smp.DistributedModel), _two_layers(keras.Model), _two_layers(keras.Model)
        found[policy] = []
        smp.register_post_partition_hook(lambda model=model, plain=plain: model.set_weights(plain.get_weights()))

        @smp.step
        def step(x, model=model):
            outputs = model(x)
            loss = tf.reduce_mean(tf.square(tf.cast(outputs, tf.float32)))
            return tf.gradients(loss, [getattr(each, "value", each) for each in model.trainable_variables]), outputs

        for source in (plain, other):
            with tf.GradientTape() as tape:
                expected = source(x)
                loss = tf.reduce_mean(tf.square(tf.cast(expected, tf.float32)))
            if source is other:
                file = f"{folder}/{policy}-{smp.rank()}.weights.h5"
                other.save_weights(file)
                model.load_weights(file)
            gradients, outputs = step(x)
            theirs = tape.gradient(loss, source.trainable_variables)[2 * smp.rank() :][:2]
            np.testing.assert_allclose(tf.cast(outputs.merge(), tf.float32), tf.cast(expected, tf.float32), atol=off)
            for one, gradient in zip(gradients, theirs, strict=True):
                assert one[0].dtype == tf.float32
                np.testing.assert_allclose(one.reduce_mean(), gradient, atol=off)
            found[policy] += [
                [int(tf.size(_held(variable))) for variable in model._smp_elsewhere()],
                len(model.get_weights()),
            ]
    keras.mixed_precision.set_global_policy("float32")
    return found


def _held(variable):
    import tensorflow as tf

    inner = getattr(variable, "value", variable)
    return tf.raw_ops.ReadVariableOp(resource=inner.handle, dtype=inner.dtype)


def test_weights_of_a_plain_model_are_taken_by_the_divided_one(ranks):
    for *_, found in ranks[1]:
        assert found == {policy: [[0, 0], 2, [0, 0], 2] for policy in ("float32", "mixed_bfloat16")}
