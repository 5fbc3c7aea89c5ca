"""DistributedGradientTape on several ranks. TensorFlow takes seconds to import, so one job runs many checks."""

from __future__ import annotations

import importlib
import importlib.util
import time

import pytest

from support import Forked, more, run_ranks, start_ranks
from support.rank_main import announce
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]


class Fixture:
    """A small model and its data, with gradients from a distributed tape (`reduced`) and a local one (`local`)."""

    def __init__(self, seed=0):
        import numpy as np
        import tensorflow as tf

        import smdistributed.dataparallel.tensorflow as sdp

        tf.keras.utils.set_random_seed(seed)
        self.tf, self.sdp = tf, sdp
        self.rank, self.size = sdp.rank(), sdp.size()
        layers = tf.keras.layers
        self.model = tf.keras.Sequential(
            [tf.keras.Input((6,)), layers.Dense(32, activation="relu"), layers.Dense(32), layers.Dense(3)]
        )
        sdp.broadcast_variables(self.model.variables, 0)
        self.variables = self.model.trainable_variables
        generator = np.random.default_rng(seed)
        self.x = generator.standard_normal((24, 6), dtype=np.float32)
        self.y = generator.integers(0, 3, 24)

    def part(self, rank=None, samples=None):
        each = 24 // self.size
        start = each * (self.rank if rank is None else rank)
        stop = start + (samples or each)
        return self.tf.constant(self.x[start:stop]), self.tf.constant(self.y[start:stop])

    def loss(self, x, y):
        tf = self.tf
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True)))

    def local(self, x, y):
        with self.tf.GradientTape() as tape:
            loss = self.loss(x, y)
        return tape.gradient(loss, self.variables)

    def reduced(self, x, y, **options):
        with self.tf.GradientTape() as tape:
            loss = self.loss(x, y)
        return self.sdp.DistributedGradientTape(tape, **options).gradient(loss, self.variables)

    def mean(self, parts):
        each = [self.local(*part) for part in parts]
        return [sum(gradients) / len(each) for gradients in zip(*each, strict=True)]


def close(got, expected, tolerance=1e-6):
    import numpy as np

    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=10 * tolerance, atol=tolerance)


def run_checks(keras, checks):
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    assert tf.keras.Model is importlib.import_module(keras).Model
    sdp.init()
    for name in checks:
        started = time.monotonic()
        globals()[name](tf, sdp)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def equal_to_a_single_process(tf, sdp):
    fixture = Fixture()
    expected = fixture.local(tf.constant(fixture.x), tf.constant(fixture.y))
    compiled = tf.function(fixture.reduced, reduce_retracing=True)
    for _ in range(3):
        close(fixture.reduced(*fixture.part()), expected)
        close(compiled(*fixture.part()), expected)
    # Rank 0's last batch has fewer samples, so rank 0 alone retraces its function.
    samples = 2 if fixture.rank == 0 else None
    expected = fixture.mean([fixture.part(rank, 2 if rank == 0 else None) for rank in range(fixture.size)])
    for _ in range(2):
        close(compiled(*fixture.part(samples=samples)), expected)
    again = tf.function(fixture.reduced)
    close(again(*fixture.part(samples=samples)), expected)


def first_batch(tf, sdp):
    """The training step of the guides, compared with a single process."""
    fixture, alone = Fixture(1), Fixture(1)
    alone.model.set_weights(fixture.model.get_weights())
    if fixture.rank != 0:
        for variable in fixture.variables:
            variable.assign(tf.zeros_like(variable))
    optimizer, of_one = tf.keras.optimizers.SGD(0.1, momentum=0.9), tf.keras.optimizers.SGD(0.1, momentum=0.9)

    @tf.function
    def training_step(x, y, first_batch):
        with tf.GradientTape() as tape:
            loss = fixture.loss(x, y)
        tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, fixture.variables)
        optimizer.apply_gradients(zip(gradients, fixture.variables, strict=True))
        return loss

    for step in range(4):
        if step == 0:
            sdp.broadcast_variables(fixture.model.variables, root_rank=0)
        training_step(*fixture.part(), step == 0)
        gradients = alone.local(tf.constant(alone.x), tf.constant(alone.y))
        of_one.apply_gradients(zip(gradients, alone.variables, strict=True))
        close(fixture.variables, alone.variables, 1e-5)


def options(tf, sdp):
    fixture = Fixture()
    expected = fixture.local(tf.constant(fixture.x), tf.constant(fixture.y))
    for function in (fixture.reduced, tf.function(fixture.reduced)):
        total = function(*fixture.part(), op=sdp.ReduceOp.SUM)
        close(total, [fixture.size * gradient for gradient in expected], 1e-5)
        close(function(*fixture.part(), op=None, bucket_cap_mb=1 / 1024), expected)
        close(function(*fixture.part(), compression=sdp.Compression.fp16), expected, 2e-3)
        close(function(*fixture.part(), compression=sdp.Compression.bf16), expected, 2e-2)
    with pytest.raises(ValueError, match="AVERAGE or"):
        fixture.reduced(*fixture.part(), op=sdp.ReduceOp.MAX)
    with pytest.raises(ValueError, match="`bucket_cap_mb`"):
        fixture.reduced(*fixture.part(), bucket_cap_mb=0)
    with pytest.raises(NotImplementedError):
        sdp.DistributedGradientTape(tf.GradientTape(), device_dense="/cpu:0")
    with pytest.raises(TypeError, match="expected a tf"):
        sdp.DistributedGradientTape(None)
    with pytest.raises(ValueError, match="twice"):
        sdp.DistributedGradientTape(sdp.DistributedGradientTape(tf.GradientTape()))


def sparse(tf, sdp):
    rank, size = sdp.rank(), sdp.size()
    table, other = tf.Variable(tf.ones((5, 3))), tf.Variable(tf.ones((4, 2)))

    def gradients(as_dense, rows):
        with sdp.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=as_dense) as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) + tf.reduce_sum(tf.gather(other, [rank % 4]))
        return tape.gradient(loss, [table, other])

    expected = [0.0] * 5
    for each in range(size):
        expected[each] += (each + 1) / size
    for function in (gradients, tf.function(gradients)):
        # Rank r gathers row r, r + 1 times.
        dense, _ = function(True, tf.fill([rank + 1], rank))
        close([dense[:, 0]], [expected])
        slices, of_other = function(False, tf.fill([rank + 1], rank))
        assert isinstance(slices, tf.IndexedSlices)
        close([tf.convert_to_tensor(slices)[:, 0]], [expected])
        close([tf.convert_to_tensor(of_other)[:size, 1]], [[1 / size] * size])


def none(tf, sdp):
    def gradients(use, variables):
        a, b, c = variables
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(a * 2.0) + (tf.reduce_sum(c * use) if use is not None else 0.0)
        return tape.gradient(loss, [a, b, c])

    def fresh(size):
        return [tf.Variable(tf.ones(size), name=name) for name in "abc"]

    for function in (gradients, tf.function(gradients)):
        of_a, of_b, of_c = function(1.0, fresh(4))
        assert of_b is None
        close([of_a, of_c], [[2.0] * 4, [1.0] * 4])
    with pytest.raises(Exception, match=r"`c \(number 2\)` has a gradient on rank 0 and none on rank 1"):
        gradients(None if sdp.rank() == 1 else 1.0, fresh(5))
    close([gradients(3.0, fresh(5))[2]], [[3.0] * 5])


def structures(tf, sdp):
    rank, size = sdp.rank(), sdp.size()
    mean = (size - 1) / 2
    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    x = tf.constant([float(rank), 1.0])
    with tf.GradientTape(persistent=True) as local:
        local.watch(x)
        y = v * x * w
    tape = sdp.DistributedGradientTape(local)
    assert isinstance(tape, tf.GradientTape)
    assert tape.watched_variables() == local.watched_variables()
    nested = tape.gradient(y, {"v": v, "more": (w, [v])})
    close([nested["v"], nested["more"][0], nested["more"][1][0]], [[3 * mean, 3.0], mean + 2.0, [3 * mean, 3.0]])
    close([tape.gradient(y, v, output_gradients=tf.constant([2.0, 0.5]))], [[6 * mean, 1.5]])
    unused = tf.Variable([5.0, 5.0])
    assert tape.gradient(y, unused) is None
    close([tape.gradient(y, unused, unconnected_gradients=tf.UnconnectedGradients.ZERO)], [[0.0, 0.0]])
    close([tape.gradient(y, x)], [[3.0, 6.0]])
    # Jacobians are not reduced.
    close([tape.jacobian(y, v)], [[[3.0 * rank, 0.0], [0.0, 3.0]]])

    class Counting(tf.GradientTape):
        calls = 0

        def gradient(self, *args, **kwargs):
            Counting.calls += 1
            return super().gradient(*args, **kwargs)

    with sdp.DistributedGradientTape(Counting()) as counting:
        z = w * float(rank)
    assert isinstance(counting, Counting)
    close([counting.gradient(z, w)], [mean])
    assert Counting.calls == 1
    with pytest.raises(RuntimeError, match="non-persistent"):
        counting.gradient(z, w)


def second_order(tf, sdp):
    mean = (sdp.size() - 1) / 2
    v = tf.Variable(3.0)

    def third_power(factor):
        with tf.GradientTape() as outer:
            with sdp.DistributedGradientTape(tf.GradientTape()) as inner:
                y = factor * v**3
            slope = inner.gradient(y, v)
        return slope, sdp.DistributedGradientTape(outer).gradient(slope, v)

    for function in (third_power, tf.function(third_power)):
        slope, curvature = function(tf.constant(float(sdp.rank())))
        close([slope, curvature], [27 * mean, 18 * mean], 1e-5)


def several_tapes_in_a_graph(tf, sdp):
    rank, mean = float(sdp.rank()), (sdp.size() - 1) / 2
    generator, critic, twin = (tf.Variable(tf.ones(shape)) for shape in ((300, 4), (4, 200), (300, 4)))

    @tf.function
    def step(noise):
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_critic, tf.GradientTape() as of_twin:
            made = noise @ generator
            judged = tf.reduce_sum(made @ critic)
            other = tf.reduce_sum(noise @ twin) * 2.0
        return (
            sdp.DistributedGradientTape(of_generator).gradient(judged, generator),
            sdp.DistributedGradientTape(of_critic).gradient(judged, critic),
            sdp.DistributedGradientTape(of_twin).gradient(other, twin),
        )

    for _ in range(5):
        a, b, c = step(tf.fill([1, 300], rank))
        close([a[0, 0], b[0, 0], c[7, 3]], [200 * mean, 300 * mean, 2 * mean], 1e-3)


def loops(tf, sdp):
    fixture, alone = Fixture(2), Fixture(2)

    @tf.function
    def steps(x, y, count):
        loss = 0.0
        for _ in tf.range(count):
            gradients = fixture.reduced(x, y)
            for variable, gradient in zip(fixture.variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            if tf.reduce_sum(gradients[0]) > 1e6:
                break
            loss = fixture.loss(x, y)
        return loss

    steps(*fixture.part(), tf.constant(4))
    for _ in range(4):
        gradients = alone.local(tf.constant(alone.x), tf.constant(alone.y))
        for variable, gradient in zip(alone.variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
    close(fixture.variables, alone.variables, 1e-5)

    @tf.function
    def sometimes(x, y, now):
        return fixture.reduced(x, y)[0] if now else tf.zeros_like(fixture.variables[0])

    expected = fixture.local(tf.constant(fixture.x), tf.constant(fixture.y))[0]
    for now in (True, False, True):
        close([sometimes(*fixture.part(), tf.constant(now))], [expected if now else 0 * expected])


def types(tf, sdp):
    mean = (sdp.size() - 1) / 2
    kinds = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.complex64]
    variables = [tf.Variable(tf.ones(shape, kind)) for shape in ([3], [2, 2], []) for kind in kinds]

    def gradients(factor):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n(
                [tf.math.real(tf.cast(tf.reduce_sum(v * tf.cast(factor, v.dtype)), tf.complex64)) for v in variables]
            )
        return tape.gradient(loss, variables)

    for function in (gradients, tf.function(gradients)):
        for got, variable in zip(function(tf.constant(float(sdp.rank()))), variables, strict=True):
            assert got.dtype == variable.dtype
            assert got.shape == variable.shape
            close([tf.reshape(tf.cast(got, tf.complex64), [-1])[0]], [mean])


def watched_tensors(tf, sdp):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def slope(x):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            y = tf.reduce_sum(x * float(sdp.rank()))
        return tape.gradient(y, x)

    for count in (3, 5):
        close([slope(tf.ones(count))], [[(sdp.size() - 1) / 2] * count])


def unknown_shapes(tf, sdp):
    """In functions, gradients without a static shape are reduced alone, which is counted and told."""
    import os
    import warnings

    from smdistributed import _core

    def count():
        return dict(_core.running_fallbacks(os.getpid())[0][2])["gradients_one_by_one"]

    unknown = [tf.Variable(tf.ones(3), shape=tf.TensorShape([None]), name=f"unknown_{at}") for at in "ab"]
    known = tf.Variable(tf.ones(3), name="known")

    def gradients(variables):
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n([(sdp.rank() + 1.0) * tf.reduce_sum(each) for each in variables])
        return tape.gradient(loss, variables)

    before, average = count(), (sdp.size() + 1) / 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for variables in ([known], [*unknown, known], unknown):
            function = tf.function(lambda variables=variables: gradients(variables))
            for _ in range(2):
                for each in function():
                    close(each, average * tf.ones(3))
        # Outside of functions, shapes are known.
        gradients(unknown)
    assert count() - before == 2
    (text,) = (str(one.message) for one in caught if "instead of in buckets" in str(one.message))
    assert text.startswith("the gradient of `unknown_a (number 0)` and 1 more is reduced alone"), text


def held_gradients(tf, sdp):
    fixture = Fixture()
    compiled = tf.function(fixture.reduced)
    held, copies = [], []
    for step in range(4):
        held.append(compiled(*fixture.part()))
        copies.append([gradient.numpy().copy() for gradient in held[-1]])
        for variable in fixture.variables:
            variable.assign_add(tf.fill(variable.shape, 0.1 * (step + 1)))
    assert abs(copies[0][0] - copies[-1][0]).max() > 0
    for gradients, copied in zip(held, copies, strict=True):
        close(gradients, copied, 0.0)


def sessions_of_old(tf, sdp):
    v1, mean = tf.compat.v1, (sdp.size() - 1) / 2
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(f"v{i}", [2], use_resource=True) for i in range(3)]
        factor = v1.placeholder(tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * factor * i) for i, v in enumerate(variables)])
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, variables)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            # Only one of the three gradients is fetched.
            got = session.run(gradients[2], {factor: float(sdp.rank())})
            close([got], [[2 * mean, 2 * mean]])


def an_error_of_one_rank(tf, sdp):
    """One rank fails between the two gradients of a step, after the first one has been reduced."""
    from smdistributed import _core
    from smdistributed.dataparallel.tensorflow.collectives import ops

    rank, mean = float(sdp.rank()), (sdp.size() - 1) / 2

    @tf.function
    def step(fine):
        # The operations that the tape creates, in order. Each gradient is larger than a bucket.
        plan = _core.plan_gradients(1 << 40, [("a", [64], "float32"), ("b", [64], "float32")], [], 128)
        (b,) = ops.smd_reduce_gradients(gradients=[tf.fill([64], rank)], plan=plan, params=[1], whole=False)
        with tf.control_dependencies([b]):
            checked = tf.debugging.Assert(fine, ["this rank's data are bad"])
        with tf.control_dependencies([checked]):
            a = tf.fill([64], 2 * rank)
        (a,) = ops.smd_reduce_gradients(gradients=[a], plan=plan, params=[0], whole=False)
        return a[0], b[0]

    for _ in range(3):
        close(step(tf.constant(True)), [2 * mean, mean])
        bad = sdp.rank() == 1
        started = time.monotonic()
        with pytest.raises(tf.errors.OpError, match="data are bad" if bad else "rank 1 failed"):
            step(tf.constant(not bad))
        assert time.monotonic() - started < 20
    close(step(tf.constant(True)), [2 * mean, mean])


def steps_that_differ(tf, sdp, in_functions=True):
    """Ranks run different steps at the same time, after each step has run on all ranks once.

    With `in_functions` the steps also run as `tf.function`; otherwise only eagerly.
    """
    rank, mean = sdp.rank(), (sdp.size() - 1) / 2
    odd = sdp.size() - 1
    weights = [tf.Variable(tf.ones(3), name="first"), tf.Variable(tf.ones(3), name="second")]

    def step(used):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight * float(rank)) for weight in weights[:used]])
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, weights)
        return [gradient for gradient in gradients if gradient is not None]

    @tf.function
    def late(fine):
        checked = tf.debugging.Assert(fine, ["this rank's data are bad"])
        with tf.control_dependencies([checked]), tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights[0] * float(rank))
        return [sdp.DistributedGradientTape(tape).gradient(loss, weights[0])]

    graph = tf.function(step)

    def agree():
        for _ in range(2):
            for run_step in (step, graph):
                for used in (1, 2):
                    for gradient in run_step(used):
                        close([gradient], [[mean] * 3])
            close(late(tf.constant(True)), [[mean] * 3])

    def differ(call, *expected):
        started = time.monotonic()
        with pytest.raises((RuntimeError, tf.errors.OpError)) as caught:
            call()
        took = time.monotonic() - started
        print(f"error after {took:.2f} s")
        assert took < 20
        for text in expected:
            assert text in str(caught.value), caught.value
        agree()

    agree()
    missing = f"parameter `second (number 1)` has a gradient on rank 0 and none on rank {odd}"
    for run_step in (step, graph) if in_functions else (step,):
        differ(
            lambda run_step=run_step: run_step(1 if rank == odd else 2),
            missing,
            f"rank {odd} waits for the gradients of `first",
        )
    if not in_functions:
        return
    # One rank reduces gradients while the others call another collective.
    differ(
        lambda: graph(1) if rank == odd else sdp.oob_allreduce(tf.ones(3), name="loss"),
        "`loss`",
        f"rank {odd} waits for the gradients of `first",
    )
    # A step that fails before its first gradient reduces nothing: that rank is one step behind the others.
    if rank == odd:
        with pytest.raises(tf.errors.OpError, match="data are bad"):
            late(tf.constant(False))
        differ(lambda: sdp.oob_allreduce(tf.ones(3), name="loss"), f"rank {odd} waits for `loss`")
    else:
        differ(lambda: late(tf.constant(True)), f"rank {odd} waits for `loss`", "for the gradients of `first")


def memory(tf, sdp):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    fixture = Fixture()
    for step in range(300):
        fixture.reduced(*fixture.part())
        if step == 100:
            before = resident()
    assert resident() < before * 1.02


_ON_ALL_SIZES = (
    "equal_to_a_single_process",
    "first_batch",
    "sparse",
    "none",
    "loops",
    "an_error_of_one_rank",
    "steps_that_differ",
)
_ON_TWO_RANKS = (
    "options",
    "structures",
    "second_order",
    "several_tapes_in_a_graph",
    "types",
    "watched_tensors",
    "unknown_shapes",
    "held_gradients",
    "sessions_of_old",
    "memory",
)


@pytest.mark.parametrize(
    ("n", "keras", "checks"),
    [(2, "keras", _ON_TWO_RANKS), (2, "keras", _ON_ALL_SIZES), more(4, "tf_keras", _ON_ALL_SIZES)],
)
def test_gradients(n, keras, checks):
    """The assertions are in `run_checks`, which runs on each rank."""
    env = ENV | {"TF_USE_LEGACY_KERAS": str(int(keras == "tf_keras"))}
    run_ranks(run_checks, n, keras, checks, launcher=Forked("tensorflow"), env=env, timeout=170)


def wait_for_killed_rank():
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    variable = tf.Variable(tf.ones(1000))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 2.0)
        return sdp.DistributedGradientTape(tape).gradient(loss, variable)

    step()
    if sdp.rank() == 1:
        announce("ready")
        time.sleep(100)
    step()


def test_a_dead_rank_is_named_within_5_seconds():
    with start_ranks(wait_for_killed_rank, 2, launcher=Forked("tensorflow"), env=ENV, timeout=110) as job:
        job.wait_for("ready")
        time.sleep(0.3)
        killed = job.kill(1)
        outcome = job.wait()
    assert "rank 1 died" in outcome.ranks[0].error, outcome.describe()
    assert outcome.ranks[0].ended_at - killed < 5
