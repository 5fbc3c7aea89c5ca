"""Loss scaling with Keras models on partitions: after an overflow all partitions skip the update."""

from __future__ import annotations

import importlib.util

import pytest

from support import Forked, more, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def _scaled():
    """Trains with a loss-scale optimizer and infinite gradients on one partition in one step; compares with plain
    Keras.

    Losses, scales and iteration counts are compared. Returns the scales of all steps.
    """
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


@pytest.mark.parametrize("keras", ["keras", more("tf_keras")])
def test_an_update_is_skipped_on_all_partitions_or_on_none(keras):
    older = keras == "tf_keras"
    env, launcher = ({**ENV, "TF_USE_LEGACY_KERAS": "1"}, "smdrun") if older else (ENV, Forked("tensorflow"))
    for is_older, found in run_ranks(_scaled, 2, launcher=launcher, env=env, timeout=280):
        assert (is_older, len(found)) == (older, 4 if older else 2)
        for scales in found:
            assert [scale / scales[0] for scale in scales] == [1, 1, 0.5, 0.5, 0.5, 1, 1], found
