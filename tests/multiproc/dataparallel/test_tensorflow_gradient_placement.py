"""Gradient placement: TensorFlow allocates gradients in the memory in which they are reduced."""

from __future__ import annotations

import importlib.util
import os

import pytest

from support import Forked, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# Rows and columns of each weight: large enough for its gradient to get a slot.
_WIDTH = 192


def _window_ranges():
    """Returns the address ranges at which the reducers' memory is mapped in this process."""
    with open("/proc/self/maps") as maps:
        return [
            tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in maps if "opensmd-window" in line
        ]


def placed(used_before):
    import numpy as np
    import tensorflow as tf

    if used_before:
        # TensorFlow creates its devices before the package is imported, and keeps their allocator.
        assert tf.reduce_sum(tf.ones((_WIDTH, _WIDTH))).numpy() == _WIDTH * _WIDTH
    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    rank, size = sdp.rank(), sdp.size()
    generator = np.random.default_rng(0)
    start = [generator.standard_normal((_WIDTH, _WIDTH), dtype=np.float32) / 14 for _ in range(4)]
    weights = [tf.Variable(value) for value in start]
    momentum = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
    data = generator.standard_normal((size, 16, _WIDTH), dtype=np.float32)
    addresses = {}

    def record_address(index, tensor):
        addresses[int(index)] = np.array(memoryview(tensor), copy=False).__array_interface__["data"][0]
        return index

    def watched(index, weight):
        """Returns the weight; its backward records the address of the gradient before the tape gets it."""

        @tf.custom_gradient
        def identity(value):
            def gradient(upstream):
                with tf.control_dependencies([tf.py_function(record_address, [index, upstream], tf.int32)]):
                    return tf.identity(upstream)

            return value, gradient

        return identity(weight)

    @tf.function
    def step(x):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            for index, weight in enumerate(weights):
                x = tf.tanh(x @ watched(index, weight))
            loss = tf.reduce_mean(x * x)
        gradients = tape.gradient(loss, weights)
        for weight, velocity, gradient in zip(weights, momentum, gradients, strict=True):
            # TensorFlow may compute this in the gradient's memory, which the variable then keeps for a step.
            velocity.assign(0.9 * velocity + -0.1 * gradient)
            weight.assign_add(velocity)
        return gradients

    alone, speed = [value.astype(np.float64) for value in start], [0.0] * 4
    held = None
    inside = []
    for number in range(12):
        gradients = step(tf.constant(data[rank]))
        # The gradients of one step are kept: later steps must not overwrite them.
        if number == 7:
            held = [gradient.numpy() for gradient in gradients], gradients
        ranges = _window_ranges()
        inside.append(sum(any(low <= at < high for low, high in ranges) for at in addresses.values()))
        expected = _by_hand(alone, data)
        for i in range(4):
            np.testing.assert_allclose(gradients[i].numpy(), expected[i], rtol=2e-3, atol=2e-6)
            speed[i] = 0.9 * speed[i] - 0.1 * expected[i]
            alone[i] = alone[i] + speed[i]
        del gradients
    for kept, tensor in zip(*held, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), kept)
    bits = tf.concat([tf.reshape(weight, [-1]) for weight in weights], 0)
    everywhere = sdp.oob_allreduce(tf.bitcast(bits, tf.int32), op=sdp.ReduceOp.MIN)
    assert tf.reduce_all(everywhere == tf.bitcast(bits, tf.int32)).numpy(), "weights are not bitwise equal on all ranks"
    sdp.shutdown()
    return inside


def _by_hand(weights, data):
    """Returns the gradients averaged over the ranks, in double precision."""
    import numpy as np

    total = [np.zeros_like(weight) for weight in weights]
    for part in data.astype(np.float64):
        layers = [part]
        for weight in weights:
            layers.append(np.tanh(layers[-1] @ weight))
        back = 2 * layers[-1] / layers[-1].size
        for i in reversed(range(len(weights))):
            back = back * (1 - layers[i + 1] ** 2)
            total[i] += layers[i].T @ back / len(data)
            back = back @ weights[i].T
    return total


@pytest.mark.parametrize("used_before", [False, True])
def test_placed_gradients_are_correct(used_before):
    for inside in run_ranks(placed, 2, used_before, launcher=Forked("tensorflow"), env=_ENV, timeout=180):
        # With GPUs, TensorFlow keeps its own CPU device, and gradients are not placed.
        can_place = not used_before and not os.path.exists("/proc/driver/nvidia/version")
        assert max(inside) == (4 if can_place else 0), inside
