"""Keras models on partitions on GPUs.

Models train as in one process, with `smp.step` and with `fit`; each rank's variables are on its GPU; replicas train
with averaged gradients; and the time of a step of equal partitions is printed. A job takes long to start, so each makes
many checks.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path

import pytest

from support import devices, run_ranks
from support.devices import NUM_RANKS, SHARED, needs_four, needs_one

pytestmark = [
    pytest.mark.timeout(280),
    needs_one,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}

#: Model, partitions, microbatches, schedule, and how the step computes gradients (see `support.keras_models.learn`).
IN_TWO = [
    ("mlp", 2, 8, "zero_bubble", "tape"),
    ("residual", 2, 4, "interleaved", "get"),
    ("attention", 2, 2, "zero_bubble", "tape"),
    ("two_outputs", 2, 4, "simple", "get"),
    ("words", 2, 2, "interleaved", "tape"),
]
IN_FOUR = [("mlp", 4, 8, "interleaved", "get"), ("attention", 4, 4, "zero_bubble", "tape")]
LAYERS, WIDTH, ROWS, MICROBATCHES = 12, 4096, 2048, 8


@pytest.fixture(autouse=True)
def _gpu_build():
    import tensorflow as tf

    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow is built for CPUs only")


def inner(variable):
    """Returns TensorFlow's variable: that of a variable of Keras 3, or the variable itself with tf_keras."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def row(base, partitions):
    """Makes a model of equal layers, and a function that trains one step; one process runs the same microbatches as the
    partitions.
    """
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    class Row(base):
        def __init__(self):
            super().__init__()
            self.row = [tf.keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(LAYERS)]

        def call(self, x):
            for number, layer in enumerate(self.row):
                with smp.partition(partitions * number // LAYERS):
                    x = layer(x)
            with smp.partition(partitions - 1):
                return tf.reduce_mean(tf.square(x), 1)

    model, optimizer = Row(), tf.keras.optimizers.SGD(1e-3)
    batch = tf.random.stateless_normal([ROWS * MICROBATCHES, WIDTH], [1, 2])

    def gradients_of(x):
        loss = tf.reduce_mean(model(x))
        return tf.gradients(loss, [inner(each) for each in model.trainable_variables]), loss

    step = smp.step(gradients_of) if base is smp.DistributedModel else None

    @tf.function
    def train():
        if step is not None:
            found, loss = step(batch)
            found = [each.accumulate() for each in found]
            optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
            return loss.reduce_mean()
        sums = None
        for part in tf.split(batch, MICROBATCHES):
            with tf.control_dependencies(sums or []):
                found, loss = gradients_of(tf.identity(part))
            sums = found if sums is None else [one + other for one, other in zip(sums, found, strict=True)]
        optimizer.apply_gradients(
            [(each / MICROBATCHES, v) for each, v in zip(sums, model.trainable_variables, strict=True)]
        )
        return loss

    return model, train


def on_its_gpu(tf, smp, model):
    """Checks that each rank holds its part of the variables, on its GPU."""
    sizes = []
    with model._smp_all_variables():
        for variable in model.trainable_variables:
            held = inner(variable)
            value = tf.raw_ops.ReadVariableOp(resource=held.handle, dtype=held.dtype)
            assert "GPU:0" in held.device, held.device
            assert "GPU:0" in value.device, value.device
            sizes.append(int(tf.size(value)) // WIDTH**2)
    assert sum(sizes) == len(model.trainable_variables) == LAYERS // smp.size(), sizes


def pipelining(tf, smp, schedule):
    """Measures steps on equal partitions; returns the ratio of predicted to measured time. The prediction has no cost
    for transfers.
    """
    count = smp.size()
    options = {"partitions": count, "microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0}
    smp.shutdown()
    smp.init({**options, "pipeline": schedule})
    model, train = row(smp.DistributedModel, count)
    _, alone = row(tf.keras.Model, count)
    times = {"alone": [], "divided": []}
    for number in range(6):
        for name, step in (("alone", alone), ("divided", train)):
            smp.barrier()
            start = time.perf_counter()
            if name == "divided" or smp.rank() == 0:
                for _ in range(3):
                    loss = step()
                float(loss)
            smp.barrier()
            if number:
                times[name].append((time.perf_counter() - start) / 3)
    on_its_gpu(tf, smp, model)
    single, divided = (statistics.median(times[name]) for name in ("alone", "divided"))
    # In the first and last time slots of the schedule some partitions are idle; in all others, every partition
    # computes.
    predicted = single / count * (MICROBATCHES + count - 1) / MICROBATCHES
    print(
        f"{schedule}: {1e3 * divided:.1f} ms on {count} GPUs, {1e3 * single:.1f} ms on one, "
        f"predicted {1e3 * predicted:.1f} ms: {predicted / divided:.3f} of the prediction",
        flush=True,
    )
    return predicted / divided


def replicas(tf, smp):
    """Checks that replicas train with the mean of their gradients."""
    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2, "ddp": True})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(700), tf.keras.layers.Dense(3, use_bias=False)

        def call(self, x):
            return self.two(self.one(x))

    model = Model()

    @smp.step
    def gradients(x):
        loss = tf.reduce_sum(model(x))
        return tf.gradients(loss, [inner(each) for each in model.trainable_variables]), loss

    mean = (smp.size() + 1) / 2
    for _ in range(4):
        found, _ = gradients(tf.fill([4, 900], smp.rank() + 1.0))
        found = [each.accumulate() for each in found]
        assert all("GPU:0" in each.device for each in found)
        wide = model.trainable_variables[2]
        expected = 2 * mean * tf.reduce_sum(tf.convert_to_tensor(wide), 1)
        error = float(tf.reduce_max(tf.abs(found[0][5] - expected)))
        assert error < 1e-3, error


def start():
    """Initializes with this rank's GPU."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from gpu.test_tensorflow import Failures

    devices.own()
    # With TF32, matrix products would depend on the number of rows.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    smp.init({"partitions": 1})
    return tf, smp, Failures()


def learning(failures, cases):
    """Checks that models learn as in one process."""
    import smdistributed.modelparallel.tensorflow as smp
    from support.keras_models import compare

    def check_equal(name, partitions, *case):
        difference, _ = compare(name, "float32", partitions, *case, replicas=smp.size() // partitions)
        assert difference < 1e-4, difference

    for case in cases:
        failures(" ".join(map(str, case)), check_equal, *case)


def in_two():
    tf, smp, failures = start()
    learning(failures, IN_TWO)
    failures("replicas", replicas, tf, smp)
    return failures.lines


def in_four():
    _, _, failures = start()
    # Without BatchNorm, whose moving averages are those of one replica.
    learning(failures, IN_FOUR + [case for case in IN_TWO if case[0] != "residual"])
    return failures.lines


def fits(folder):
    from support import keras_fits

    tf, smp, failures = start()
    tf.keras.backend.set_floatx("float64")

    of_replicas = smp.size() > 2

    def check_equal(name):
        difference = keras_fits.compare_replicas(name, "ddp") if of_replicas else keras_fits.compare(name, Path(folder))
        assert difference < 1e-10, difference

    for name in ("regression", "words") if of_replicas else ("regression", "classes", "words", "several"):
        failures(name, check_equal, name)
    return failures.lines


def measure_steps():
    tf, smp, failures = start()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    reached = {}
    for schedule in ("interleaved", "zero_bubble"):
        failures(schedule, lambda schedule: reached.update({schedule: pipelining(tf, smp, schedule)}), schedule)
    return failures.lines, reached


def _check(found):
    assert found == [[]] * len(found), "\n".join(line for lines in found for line in lines)


def test_models_on_two_partitions_learn_as_in_one_process():
    _check(run_ranks(in_two, 2, env=_ENV, timeout=270))


@needs_four
def test_models_on_four_ranks_learn_as_in_one_process():
    _check(run_ranks(in_four, 4, env=_ENV, timeout=270))


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=needs_four)])
def test_fit_learns_as_in_one_process(n, tmp_path):
    _check(run_ranks(fits, n, str(tmp_path), env=_ENV, timeout=270))


def test_steps_of_equal_partitions_reach_half_of_the_predicted_speed():
    ranks = run_ranks(measure_steps, NUM_RANKS, env=_ENV, timeout=270)
    _check([failures for failures, _ in ranks])
    if not SHARED:
        # On one shared GPU, tensors go through host memory, which takes longer than the computation.
        assert all(min(reached.values()) > 0.5 for _, reached in ranks), ranks
