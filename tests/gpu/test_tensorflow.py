"""TensorFlow on CUDA devices: the CPU tests of operations and of the gradient tape, on GPU tensors, and tests for GPUs
only.

A job takes long to start, so each job makes many checks.
"""

from __future__ import annotations

import importlib.util
import time

import pytest

from support import devices, run_ranks, start_ranks
from support.devices import needs_one
from support.rank_main import announce


def _has_gpus():
    import tensorflow as tf

    return tf.test.is_built_with_cuda()


pytestmark = [
    pytest.mark.timeout(280),
    needs_one,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@pytest.fixture(autouse=True)
def _gpu_build():
    if not _has_gpus():
        pytest.skip("this TensorFlow is built for CPUs only")


def start():
    """Joins the job with this rank's GPU."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    # With TF32, matrix products would depend on the number of samples.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    sdp.init()
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[devices.own()], "GPU")
    return tf, sdp


class Failures:
    """Runs checks and keeps the failures. It does not keep ranks in step: a check must fail on all ranks alike."""

    def __init__(self):
        self.lines = []

    def __call__(self, name, check, *args):
        started = time.monotonic()
        try:
            check(*args)
        except BaseException as error:
            self.lines.append(f"{name}: {type(error).__name__}: {str(error)[-1500:]}")
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def on_gpus(tf, sdp):
    """The results of eager calls and of functions are on the GPU."""
    from smdistributed.dataparallel.tensorflow import collectives

    with tf.device("/GPU:0"):
        x = tf.ones([4, 3])
        results = [
            sdp.oob_allreduce(x),
            sdp.broadcast(x, 0),
            collectives.all_gather(x),
            collectives.reduce_scatter(x),
            collectives.all_to_all(x)[0],
            collectives.all_to_all(x, [2] * sdp.size())[0],
            *collectives.grouped_all_reduce([x, x]),
            collectives.call(collectives.ops.smd_reduce, tensor=x, op="sum", root=0),
            tf.function(sdp.oob_allreduce)(x),
            tf.function(collectives.all_gather)(x),
        ]
    assert all("GPU:0" in result.device for result in results), [result.device for result in results]
    # Reductions that NCCL lacks run in the library's kernels.
    size = sdp.size()
    for dtype, op, value in (("int16", "sum", 3 * size), ("int16", "max", 3), ("int32", "bit_or", 3)):
        reduced = collectives.call(collectives.ops.smd_all_reduce, tensor=tf.constant([3, 0, 3], dtype), op=op)
        assert reduced.numpy().tolist() == [value, 0, value], (dtype, op)
    mixed = collectives.call(collectives.ops.smd_all_reduce, tensor=tf.constant([sdp.rank() > 0, True]), op="product")
    assert mixed.numpy().tolist() == [False, True]
    variable = tf.Variable(x)
    with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(variable * 2.0)
    assert "GPU:0" in tape.gradient(loss, variable).device


def on_the_cpu(tf, sdp):
    """Tensors that are placed on the CPU stay there."""
    with tf.device("/CPU:0"):
        x = tf.fill([4], float(sdp.rank()))
        total = sdp.oob_allreduce(x, op=sdp.ReduceOp.SUM)
        variable = tf.Variable(x)
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * float(sdp.rank()))
        gradient = tape.gradient(loss, variable)
    assert "CPU" in total.device
    assert "CPU" in gradient.device
    assert total.numpy().tolist() == [float(sum(range(sdp.size())))] * 4
    assert gradient.numpy().tolist() == [(sdp.size() - 1) / 2] * 4


def large_gradients(tf, sdp):
    """Large gradients are reduced in place, small ones in a bucket. All must equal those of a single process."""
    rank, size = sdp.rank(), sdp.size()
    shapes = [(700, 600), (5,), (1000, 1000), (64, 64), (), (300_000,), (3, 3, 3), (2000, 300)]
    variables = [tf.Variable(tf.fill(shape, 0.5)) for shape in shapes]

    def gradients(factor, **options):
        with sdp.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.add_n([tf.reduce_sum(v * v * factor * (i + 1.0)) for i, v in enumerate(variables)])
        return tape.gradient(loss, variables)

    mean = (size + 1) / 2
    for options in ({}, {"bucket_cap_mb": 1}, {"compression": sdp.Compression.fp16}, {"op": sdp.ReduceOp.SUM}):
        scale = size if "op" in options else 1
        for function in (gradients, tf.function(gradients)):
            for step in range(6):
                results = function(tf.constant(rank + 1.0 + step), **options)
                for i, result in enumerate(results):
                    expected = (mean + step) * (i + 1.0) * scale
                    error = tf.reduce_max(tf.abs(result - expected)).numpy()
                    assert error <= 1e-3 * expected, (options, step, i, error, expected)


def on_both_devices(tf, sdp):
    """Some variables are on the CPU, others on the GPU."""
    rank, mean = float(sdp.rank()), (sdp.size() - 1) / 2
    with tf.device("/CPU:0"):
        on_cpu = tf.Variable(tf.ones([700, 700]))
    with tf.device("/GPU:0"):
        on_gpu = [tf.Variable(tf.ones([700, 700])), tf.Variable(tf.ones([3]))]
    variables = [on_gpu[0], on_cpu, on_gpu[1]]

    def gradients(factor):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n([tf.reduce_sum(v * factor * (i + 1.0)) for i, v in enumerate(variables)])
        return tape.gradient(loss, variables)

    for function in (gradients, tf.function(gradients)):
        for _ in range(3):
            for i, result in enumerate(function(tf.constant(rank))):
                assert bool(tf.reduce_all(tf.abs(result - mean * (i + 1.0)) < 1e-6)), i


def any_order(tf, sdp):
    """A function has named collectives and gradients, which the ranks queue in different orders."""
    rank, size = float(sdp.rank()), sdp.size()
    weights = [tf.Variable(tf.eye(512) * 0.5) for _ in range(6)]
    x = tf.ones([512, 512]) * (rank + 1.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.matmul(y, weight)
            loss = tf.reduce_mean(y)
        before = [sdp.oob_allreduce(tf.reduce_sum(x[: i + 1]), op=sdp.ReduceOp.SUM, name=f"n{i}") for i in range(5)]
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, weights)
        after = sdp.oob_allreduce(loss)
        return before, after, [tf.reduce_sum(g) for g in gradients]

    ones = size * (size + 1) / 2
    first = None
    for _ in range(40):
        before, after, sums = step(x)
        assert [round(float(each)) for each in before] == [int(ones * 512 * (i + 1)) for i in range(5)]
        assert abs(float(after) - 0.5**6 * (size + 1) / 2) < 1e-5
        sums = [float(each) for each in sums]
        first = first or sums
        assert sums == first


def memory_is_not_reused_too_early(tf, sdp):
    """TensorFlow's allocator reuses memory in the order of its compute stream; communication runs on another stream."""
    rank, size = float(sdp.rank()), sdp.size()
    from smdistributed.dataparallel.tensorflow.collectives import all_gather, grouped_all_reduce

    def step(i):
        x = tf.fill([1 << 20], rank + i)
        y = tf.fill([1 << 20], 2.0 * (rank + i))
        a, b = grouped_all_reduce([x * 1.0, y * 1.0], op=sdp.ReduceOp.SUM)
        # Temporary tensors of the same size, which would get memory that is freed too early.
        noise = tf.reduce_sum(tf.sqrt(tf.fill([1 << 20], 3.0)) * 0.0)
        rows = all_gather(tf.reshape(x * 3.0, [1024, 1024])[: 100 + int(rank)])
        return tf.reduce_max(a) + noise, tf.reduce_min(b), tf.reduce_sum(rows[:, 5])

    for function in (step, tf.function(step)):
        for i in range(30):
            a, b, c = function(tf.constant(float(i)))
            total = size * (size - 1) / 2 + size * i
            rows = sum(3.0 * (r + i) * (100 + r) for r in range(size))
            assert (float(a), float(b)) == (total, 2 * total)
            assert abs(float(c) - rows) <= 1e-5 * abs(rows)


def fit(tf, sdp):
    """Trains with Keras's `fit`."""
    import numpy as np

    tf.keras.utils.set_random_seed(7)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((64, 8), dtype=np.float32)
    y = generator.integers(0, 3, 64)

    def model():
        layers = tf.keras.layers
        made = tf.keras.Sequential([tf.keras.Input((8,)), layers.Dense(600, "tanh"), layers.Dense(3)])
        made.set_weights(
            [np.full(w.shape, 0.01, np.float32) + 0.01 * np.arange(w.shape[-1]) for w in made.get_weights()]
        )
        return made

    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ours, single = model(), model()
    ours.compile(sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), losses, jit_compile=False)
    single.compile(tf.keras.optimizers.SGD(0.1), losses, jit_compile=False)
    rank, size = sdp.rank(), sdp.size()
    ours.fit(x[rank::size], y[rank::size], batch_size=64 // size, epochs=4, shuffle=False, verbose=0)
    single.fit(x, y, batch_size=64, epochs=4, shuffle=False, verbose=0)
    for a, b in zip(ours.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def an_error_of_one_rank(tf, sdp):
    """One rank fails between the two gradients of a step. The reductions of the ranks then no longer match, and all
    ranks get an error with the cause.
    """
    from smdistributed import _core
    from smdistributed.dataparallel.tensorflow.collectives import ops

    rank, mean = float(sdp.rank()), (sdp.size() - 1) / 2
    described = [("a", [300_000], "float32"), ("b", [300_000], "float32")]

    @tf.function
    def step(fine):
        # The operations that the gradient tape would create, in sequence. Each gradient is larger than a bucket.
        plan = _core.plan_gradients(1 << 40, described, [], 128, None, False, True)
        (b,) = ops.smd_reduce_gradients(gradients=[tf.fill([300_000], rank)], plan=plan, params=[1], whole=False)
        with tf.control_dependencies([b]):
            checked = tf.debugging.Assert(fine, ["this rank's data are bad"])
        with tf.control_dependencies([checked]):
            a = tf.fill([300_000], 2 * rank)
        (a,) = ops.smd_reduce_gradients(gradients=[a], plan=plan, params=[0], whole=False)
        return a[0], b[0]

    for _ in range(3):
        assert [float(each) for each in step(tf.constant(True))] == [2 * mean, mean]
    bad = sdp.rank() == 1
    started = time.monotonic()
    with pytest.raises(tf.errors.OpError, match="data are bad" if bad else "rank 1 failed"):
        step(tf.constant(not bad))
    assert time.monotonic() - started < 20
    with pytest.raises(tf.errors.OpError, match="no longer fit together"):
        step(tf.constant(True))
    # Other operations still work.
    assert float(sdp.oob_allreduce(tf.constant(rank))) == mean


def operations():
    tf, sdp = start()
    from multiproc.dataparallel import test_tensorflow_ops as on_cpus

    # Neither NCCL nor the library's kernels can reduce int16 to one rank or with blocks of different sizes.
    on_cpus.NUMBERS.remove("int16")
    failures = Failures()
    rank, size = sdp.rank(), sdp.size()
    failures("on_gpus", on_gpus, tf, sdp)
    failures("on_the_cpu", on_the_cpu, tf, sdp)
    with tf.device("/GPU:0"):
        failures("values", on_cpus.check_values, sdp, rank, size)
        failures("gradients", on_cpus.check_gradients, sdp, rank, size)
        failures("order", on_cpus.check_order, sdp, rank, size)
    failures("memory", memory_is_not_reused_too_early, tf, sdp)
    return failures.lines


def test_operations_on_gpu_tensors():
    failures = run_ranks(operations, 2, env=_ENV, timeout=150)
    assert failures == [[], []], "\n".join(line for lines in failures for line in lines)


_CHECKS_OF_CPU_TESTS = (
    "equal_to_a_single_process",
    "first_batch",
    "options",
    "sparse",
    "none",
    "structures",
    "second_order",
    "several_tapes_in_a_graph",
    "loops",
    "types",
    "watched_tensors",
    "held_gradients",
    "sessions_of_old",
)


def tape():
    tf, sdp = start()
    from multiproc.dataparallel import test_tensorflow_tape as on_cpus

    failures = Failures()
    for check in (large_gradients, on_both_devices, any_order, fit):
        failures(check.__name__, check, tf, sdp)
    for name in _CHECKS_OF_CPU_TESTS:
        failures(name, getattr(on_cpus, name), tf, sdp)
    failures("an_error_of_one_rank", an_error_of_one_rank, tf, sdp)
    return failures.lines


def test_the_gradient_tape_on_gpu_tensors():
    failures = run_ranks(tape, 2, env=_ENV, timeout=210)
    assert failures == [[], []], "\n".join(line for lines in failures for line in lines)


def differing_steps():
    tf, sdp = start()
    from multiproc.dataparallel import test_tensorflow_tape as on_cpus

    # Only eager steps: in a function, one rank may learn of it late.
    on_cpus.steps_that_differ(tf, sdp, in_functions=False)


def test_eager_steps_that_differ_are_an_error_on_all_ranks():
    """Each rank asserts, in `differing_steps`."""
    run_ranks(differing_steps, 2, env=_ENV, timeout=150)


def train_until_a_death():
    tf, sdp = start()
    variable = tf.Variable(tf.ones(1_000_000))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 2.0)
        return sdp.DistributedGradientTape(tape).gradient(loss, variable)

    for _ in range(3):
        step()
    if sdp.rank() == 1:
        announce("ready")
        time.sleep(100)
    step()


def test_a_dead_rank_is_named_within_5_seconds():
    with start_ranks(train_until_a_death, 2, launcher="raw", env=_ENV, timeout=110) as job:
        job.wait_for("ready")
        time.sleep(0.5)
        killed = job.kill(1)
        outcome = job.wait()
    assert "rank 1 died" in outcome.ranks[0].error, outcome.describe()
    assert outcome.ranks[0].ended_at - killed < 5
