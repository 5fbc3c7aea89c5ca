"""Steps on partitions: sliced arguments, random numbers, retracing, leftover graphs, and the timeline."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
from unittest import mock

import pytest

from support import Forked, run_ranks
from support.keras_models import two_layers
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def _run_checks():
    _train()
    return _random_numbers(), _slices(), _arguments(), _conversions_and_graphs()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The timeline's path, and the results of all checks by rank, from one job."""
    trace = tmp_path_factory.mktemp("steps") / "trace.json"
    env = {**ENV, "SMD_TIMELINE": str(trace)}
    return trace, run_ranks(_run_checks, 2, launcher=Forked("tensorflow"), env=env, timeout=280)


def _train():
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2})
    model, optimizer = two_layers(smp.DistributedModel), tf.keras.optimizers.SGD(0.1)
    step = smp.step(lambda x: optimizer.get_gradients(tf.reduce_mean(model(x)), model.trainable_variables))
    # In the timeline a step ends when the next one starts, so two steps are needed.
    for _ in range(2):
        step(tf.ones([8, 3]))


def test_the_timeline_shows_each_partition_at_work(ranks):
    lines = ranks[0].read_text().splitlines()[1:]
    events = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    for rank in range(2):
        names = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == rank}
        assert {"forward", "backward", "send", "receive", "wait"} <= names, (rank, names)
    # Step 0 is that of `_train`, with one stage on each rank.
    command = [sys.executable, "-m", "smdistributed", "report", str(ranks[0]), "--step", "0"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "simulated from mean times:" in shown.stdout, shown.stdout


def _slices():
    """Arguments with their own `smp_slice`. Slices that differ in more than tensors raise, and so do differing
    steps."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPUsageError

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})

    class Ragged:
        """An argument with a tensor in a nested attribute and in the closure of a callable attribute."""

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

    model = two_layers(smp.DistributedModel)
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

    # Slices that exist before the step, also used inside a `tf.cond`.
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


def test_smp_slice_and_mismatched_steps(ranks):
    """Each microbatch gets its own slice. Ranks whose steps differ in a constant raise an error with both constants."""
    for _, found, *_ in ranks[1]:
        assert found[0] == "SMPMismatchError", found
        assert "Const[0.25]" in found[1], found
        assert "Const[0.5]" in found[1], found


def _random_numbers():
    """Random numbers with a seed equal those of one process; without one, all partitions use the same numbers."""
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

    # The same for numbers drawn in the step function, which both the model and the loss use.
    def add_noise(x):
        return x + tf.random.normal(tf.shape(x))

    def add_noise_twice(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, add_noise(x)), (0, x))[1]

    for draw in (add_noise, tf.function(add_noise_twice)):

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
    for found, *_ in ranks[1]:
        assert found[0] == found[1] > 0, found


def _arguments():
    """Returns the batch sizes of the traces of a step, for each of the arguments that it shares with `tf.function`."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    model, x = two_layers(smp.DistributedModel), tf.ones([8, 3])
    smp.step(lambda x: model(x))(x)
    # Segments are stateful calls, which TensorFlow does not fold when it optimizes the graph.
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


def test_a_step_is_retraced_as_a_tf_function_is(ranks):
    for *_, found, _ in ranks[1]:
        assert found == {
            "shapes": [1, 2, 3, 4],
            "input_signature": [None],
            "reduce_retracing": [1, None],
            "experimental_relax_shapes": [1, None],
            "numbers of Python": [4, 4],
            "tensors": [4],
        }


def _conversions_and_graphs():
    """Returns whether AutoGraph converts only this module while a step is traced (otherwise the modules that it
    converts), and how many trace graphs are left."""
    import tensorflow as tf
    from tensorflow.python.autograph.impl import api

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow.tracing.recording import TraceGraph

    def graphs():
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, TraceGraph)]

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    model, optimizer = two_layers(smp.DistributedModel), tf.keras.optimizers.SGD(0.1)
    before = graphs()

    def body(x):
        if tf.reduce_sum(x) < 0.0:
            x = -x
        return optimizer.get_gradients(tf.reduce_mean(model(x)), model.trainable_variables)

    step = smp.step(body)

    @tf.function
    def train(x):
        gradients = [each.accumulate() for each in step(x)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with mock.patch.object(api, "_convert_actual", wraps=api._convert_actual) as converting:
        for rows in (4, 8):
            train(tf.ones([rows, 3]))
    converted = {call.args[0].__module__ for call in converting.call_args_list}
    return converted == {_conversions_and_graphs.__module__} or converted, len(graphs()) - len(before)


def test_a_trace_converts_only_the_script_and_leaves_no_graph(ranks):
    for *_, found in ranks[1]:
        assert found == (True, 0)
