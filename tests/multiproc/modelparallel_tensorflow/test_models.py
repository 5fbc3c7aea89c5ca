"""Keras models on partitions: nested partitions, XLA-compiled layers, structured inputs, and weights of a plain
model."""

from __future__ import annotations

import importlib.util

import pytest

from support import Forked, run_ranks
from support.keras_models import two_layers
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def _run_checks(folder):
    return _structured_model(folder), _weights(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of all checks by rank, from one job."""
    folder = str(tmp_path_factory.mktemp("models"))
    return run_ranks(_run_checks, 2, folder, launcher=Forked("tensorflow"), env=ENV, timeout=280)


def _structured_model(folder):
    """A model with structured inputs and outputs and a compiled layer; compares losses and gradients with plain
    Keras."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    found = {}

    class Compiled(keras.layers.Layer):
        """A layer with a function that XLA compiles, called in a `tf.cond`."""

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
    with model._smp_all_variables():
        mine = [id(each) in here for each in model.trainable_variables]
    expected_gradients = tape.gradient(whole, plain.trainable_variables)
    expected_gradients = [each for each, own in zip(expected_gradients, mine, strict=True) if own]
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours.accumulate(), theirs, atol=1e-6)
    assert sorted(smp.allgather(len(gradients))) == [3, 4]
    model.save_model(f"{folder}/saved")
    served = tf.saved_model.load(f"{folder}/saved").signatures["serving_default"]
    given = {"inputs_a": inputs["a"], "inputs_b": inputs["b"]}
    results = sorted(served(**given).items())
    for (_, ours), (_, theirs) in zip(results, sorted(expected.items()), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    found["served"] = [name for name, _ in results]

    # All methods of `accumulate`, and one with a given variable; an unknown method raises.
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


def test_structured_model_with_compiled_layer(found):
    expected = {"method": ("SMPValidationError", "'sum'")}
    for forms, _ in found:
        assert forms.pop("served") == ["output_0", "output_1"]
        assert set(forms) == set(expected), forms
        for name, (kind, text) in expected.items():
            assert forms[name][0] == kind, forms
            assert text in forms[name][1], forms


def _weights(folder):
    """Sets weights of a plain Keras model after partitioning, in float32 and in mixed_bfloat16."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)
    found = {}
    for policy, tolerance in (("float32", 1e-6), ("mixed_bfloat16", 2e-2)):
        keras.mixed_precision.set_global_policy(policy)
        keras.utils.set_random_seed(7)
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2})
        model, plain, other = two_layers(smp.DistributedModel), two_layers(keras.Model), two_layers(keras.Model)
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
            np.testing.assert_allclose(
                tf.cast(outputs.merge(), tf.float32), tf.cast(expected, tf.float32), atol=tolerance
            )
            for one, gradient in zip(gradients, theirs, strict=True):
                assert one[0].dtype == tf.float32
                np.testing.assert_allclose(one.reduce_mean(), gradient, atol=tolerance)
            found[policy] += [
                [int(tf.size(_held(variable))) for variable in model._smp_remote_variables()],
                len(model.get_weights()),
            ]
    keras.mixed_precision.set_global_policy("float32")
    return found


def _held(variable):
    import tensorflow as tf

    inner = getattr(variable, "value", variable)
    return tf.raw_ops.ReadVariableOp(resource=inner.handle, dtype=inner.dtype)


def test_partitioned_model_loads_weights_of_a_plain_one(found):
    for _, held in found:
        assert held == {policy: [[0, 0], 2, [0, 0], 2] for policy in ("float32", "mixed_bfloat16")}
