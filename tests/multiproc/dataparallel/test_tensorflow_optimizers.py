"""Distributed optimizers: after several steps the weights equal those of one process that trains on the whole batch."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import warnings

import pytest

from support import Forked, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(180),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""


class Problem:
    """A small classification of pairs of tokens.

    With `sparse` the first layer is an embedding, whose gradients are sparse. TensorFlow's norm of a sparse gradient
    counts a repeated row several times. Clipping by norm would then differ between one process and several, so the
    tests with clipping use dense gradients.
    """

    def __init__(self, sparse=False):
        import numpy as np

        import smdistributed.dataparallel.tensorflow as sdp

        rng = np.random.default_rng(0)
        self.sparse = sparse
        self.steps = 4
        self.x = rng.integers(0, 20, size=(self.steps, 8, 2))
        self.y = rng.integers(0, 3, size=(self.steps, 8))
        self.mine = slice(sdp.rank(), None, sdp.size())

    def model(self, keras):
        layers = keras.layers
        keras.utils.set_random_seed(3)
        first = layers.Embedding(20, 6) if self.sparse else layers.CategoryEncoding(20, output_mode="count")
        return keras.Sequential(
            [
                layers.Input((2,), dtype="int32"),
                first,
                layers.Flatten(),
                layers.Dense(5, activation="tanh"),
                layers.Dense(3),
            ]
        )

    def batches(self, distributed):
        for x, y in zip(self.x, self.y, strict=True):
            yield (x[self.mine], y[self.mine]) if distributed else (x, y)

    def trained(self, keras, optimizer, distributed, compiled):
        """Returns the weights after a custom training loop."""
        import tensorflow as tf

        model = self.model(keras)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                scaled = loss
                if hasattr(optimizer, "get_scaled_loss"):
                    scaled = optimizer.get_scaled_loss(loss)
                elif hasattr(optimizer, "scale_loss"):
                    scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            if hasattr(optimizer, "get_unscaled_gradients"):
                gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        step = tf.function(step) if compiled else step
        for x, y in self.batches(distributed):
            step(tf.constant(x), tf.constant(y))
        return model.get_weights()

    def fitted(self, keras, optimizer, distributed, **options):
        """Returns the weights after `model.fit`."""
        import numpy as np

        model = self.model(keras)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
        x, y = (np.concatenate(part) for part in zip(*self.batches(distributed), strict=True))
        model.fit(x, y, batch_size=len(x) // self.steps, shuffle=False, verbose=0)
        return model.get_weights()


def assert_close(got, expected, what):
    import numpy as np

    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6, err_msg=what)


class Reductions:
    """Counts calls of `reduce_gradients`: one for each eager step, and one for each trace of a function."""

    def __enter__(self):
        from smdistributed.dataparallel.tensorflow import optimizer

        self.count = 0
        self._module, self._reduce = optimizer, optimizer.reduce_gradients

        def counted(*args, **kwargs):
            self.count += 1
            return self._reduce(*args, **kwargs)

        optimizer.reduce_gradients = counted
        return self

    def __exit__(self, *_):
        self._module.reduce_gradients = self._reduce


def check_training_modes(problem, keras, make, distributed, eager_fit=False):
    """Trains with one optimizer in custom loops and in `fit`, and compares with a custom loop in one process."""
    expected = problem.trained(keras, make(), False, False)
    modes = {
        "eager": (problem.steps, lambda o: problem.trained(keras, o, True, False)),
        # A function reduces once for each trace.
        "compiled": (1, lambda o: problem.trained(keras, o, True, True)),
        "fit": (1, lambda o: problem.fitted(keras, o, True)),
    }
    if eager_fit:
        modes["eager fit"] = (problem.steps, lambda o: problem.fitted(keras, o, True, run_eagerly=True))
    for name, (count, train) in modes.items():
        with Reductions() as reductions:
            assert_close(train(distributed(make())), expected, name)
        # A function that creates variables may be traced twice.
        assert reductions.count in (count, count + (count == 1)), (name, reductions.count)


def keras3():
    import keras
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    assert tf.keras.optimizers.Adam is keras.optimizers.Adam
    problem = Problem()
    k = keras.optimizers
    check_training_modes(
        problem, keras, lambda: k.SGD(0.5, momentum=0.9, clipnorm=0.05), sdp.DistributedOptimizer, eager_fit=True
    )
    for make in [
        lambda: k.AdamW(k.schedules.ExponentialDecay(0.1, 1, 0.5), global_clipnorm=0.1),
        lambda: k.LossScaleOptimizer(k.SGD(0.5), initial_scale=64.0),
    ]:
        check_training_modes(problem, keras, make, sdp.DistributedOptimizer)
    # LossScaleOptimizer around the distributed optimizer, as with mixed precision.
    check_training_modes(
        problem,
        keras,
        lambda: k.SGD(0.5),
        lambda o: k.LossScaleOptimizer(sdp.DistributedOptimizer(o), initial_scale=64.0),
    )
    for distributed in (sdp.DistributedOptimizer, lambda o: sdp.DistributedOptimizer(o, sparse_as_dense=False)):
        sparse = Problem(sparse=True)
        expected = sparse.trained(keras, k.SGD(0.5), False, False)
        assert_close(sparse.trained(keras, distributed(k.SGD(0.5)), True, True), expected, "sparse")
    expected = problem.trained(keras, k.SGD(0.5), False, False)
    several = {"steps_per_execution": 2, "jit_compile": "auto"}
    assert_close(
        problem.fitted(keras, sdp.DistributedOptimizer(k.SGD(0.5)), True, **several), expected, "several steps"
    )
    more = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    smooth = problem.trained(keras, k.SGD(0.5, **more), False, False)
    got = problem.trained(keras, sdp.DistributedOptimizer(k.SGD(0.5, **more)), True, False)
    assert_close(got, smooth, "moving average")
    # Gradient accumulation: one reduction for each update, before clipping.
    more = {"gradient_accumulation_steps": 2, "clipnorm": 0.05}
    expected_updates = problem.trained(keras, k.SGD(0.5, **more), False, False)
    for compiled, count in ((False, problem.steps // 2), (True, 1)):
        with Reductions() as reductions:
            got = problem.trained(keras, sdp.DistributedOptimizer(k.SGD(0.5, **more)), True, compiled)
        assert_close(got, expected_updates, "accumulation")
        assert reductions.count in (count, count + compiled), reductions.count
    summed = sdp.DistributedOptimizer(k.SGD(0.5 / sdp.size()), op=sdp.ReduceOp.SUM)
    assert_close(problem.trained(keras, summed, True, False), expected, "sum")
    overflow_on_one_rank(keras, sdp)
    distributed_optimizer_is_a_view(keras, sdp)
    no_xla_unless_asked_for(keras, sdp)
    gradients_that_the_caller_reduced(keras, sdp)
    arguments(keras, sdp)


def overflow_on_one_rank(keras, sdp):
    """An overflow on one rank: all ranks skip the step."""
    import tensorflow as tf

    k = keras.optimizers
    for make in [
        lambda: k.LossScaleOptimizer(sdp.DistributedOptimizer(k.SGD(1.0))),
        lambda: sdp.DistributedOptimizer(k.LossScaleOptimizer(k.SGD(1.0))),
    ]:
        optimizer = make()
        variable = tf.Variable([1.0])
        optimizer.build([variable])
        apply = tf.function(lambda g, o=optimizer, v=variable: o.apply_gradients([(g, v)]))
        apply(tf.constant([float("inf") if sdp.rank() else 1.0]))
        assert variable.numpy() == 1.0
        apply(tf.constant([0.5 * float(optimizer.dynamic_scale)]))
        assert variable.numpy() == 0.5


def distributed_optimizer_is_a_view(keras, sdp):
    """A distributed optimizer is an instance of the given optimizer's class and shares its state."""
    plain = keras.optimizers.Adam(0.25)
    view = sdp.DistributedOptimizer(plain)
    assert isinstance(view, keras.optimizers.Adam)
    assert type(view).__name__ == "Adam"
    assert view.get_config() == plain.get_config()
    assert view.variables == plain.variables
    view.learning_rate = 0.125
    assert float(plain.learning_rate) == 0.125
    for another in (copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert type(another).__name__ == "Adam"
        assert float(another.learning_rate) == 0.125
        with pytest.raises(ValueError, match="already"):
            sdp.DistributedOptimizer(another)
    again = type(view).from_config(view.get_config())
    variable = keras.Variable([4.0])
    with Reductions() as reductions:
        again.apply_gradients([([1.0], variable)])
    assert reductions.count == 1
    assert int(again.iterations) == 1
    assert int(view.iterations) == 0
    # Errors of Keras for invalid calls are raised unchanged.
    with pytest.raises(ValueError, match="must already be built"):
        view.apply([[1.0]])
    with pytest.raises(ValueError, match="No gradients provided"):
        again.apply_gradients([(None, variable)])


def gradients_that_the_caller_reduced(keras, sdp):
    import tensorflow as tf

    for accumulation, expected in ((None, -1.0 - sdp.rank()), (2, -1.0 - sdp.rank())):
        optimizer = sdp.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulation))
        variable = keras.Variable(0.0)
        with Reductions() as reductions:
            for _ in range(accumulation or 1):
                gradient = tf.constant(1.0 + sdp.rank())
                optimizer.apply_gradients([(gradient, variable)], experimental_aggregate_gradients=False)
        assert reductions.count == 0
        assert float(variable) == expected
        with Reductions() as reductions:
            for _ in range(accumulation or 1):
                optimizer.apply_gradients([(tf.constant(0.0), variable)])
        assert reductions.count == 1


def no_xla_unless_asked_for(keras, sdp):
    """With a GPU, Keras compiles with XLA by default, which cannot compile our operations. A distributed optimizer
    turns that off, and says so."""
    import tensorflow as tf

    from smdistributed import _core

    def count():
        return dict(_core.running_fallbacks(os.getpid())[0][2])["without_xla"]

    devices = tf.config.list_physical_devices()
    with_gpu = [*devices, tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    listed = tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda device_type=None: with_gpu
    before = count()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer, compiles in [
                (keras.optimizers.SGD(), True),
                (sdp.DistributedOptimizer(keras.optimizers.SGD()), False),
                (keras.optimizers.LossScaleOptimizer(sdp.DistributedOptimizer(keras.optimizers.SGD())), False),
            ]:
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile(optimizer, "mse")
                assert model.jit_compile is compiles
            assert count() - before == 2
            model.compile(sdp.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
    finally:
        tf.config.list_physical_devices = listed
    (text,) = (str(one.message) for one in caught if "XLA" in str(one.message))
    assert "because XLA cannot compile the operations that reduce gradients. Parts of the model can be" in text
    # Without a GPU, Keras does not choose XLA.
    model.compile(sdp.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    assert count() - before == 2


def arguments(keras, sdp):
    sgd = keras.optimizers.SGD
    for device in ("device_dense", "device_sparse"):
        with pytest.raises(NotImplementedError, match="are not supported"):
            sdp.DistributedOptimizer(sgd(0.1), **{device: "/gpu:0"})
    for wrong in (0, -1, 0.00001, "25"):
        with pytest.raises(ValueError, match="bucket_cap_mb"):
            sdp.DistributedOptimizer(sgd(0.1), bucket_cap_mb=wrong)
    for op in (sdp.ReduceOp.MIN, sdp.ReduceOp.MAX, "sum"):
        with pytest.raises(ValueError, match="ReduceOp"):
            sdp.DistributedOptimizer(sgd(0.1), op=op)
    sdp.DistributedOptimizer(sgd(0.1), op=None, compression=sdp.Compression.fp16)
    for twice in (
        sdp.DistributedOptimizer(sgd(0.1)),
        keras.optimizers.LossScaleOptimizer(sdp.DistributedOptimizer(sgd())),
    ):
        with pytest.raises(ValueError, match="already"):
            sdp.DistributedOptimizer(twice)
    with pytest.raises(TypeError, match="not an optimizer"):
        sdp.DistributedOptimizer("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sdp.DistributedOptimizer(sgd(0.1), use_locking=True)
    assert "use_locking" in str(caught[0].message)


def test_keras_3():
    """The assertions are in `keras3`, which runs on each rank."""
    run_ranks(keras3, 2, launcher=Forked("tensorflow"), env=_ENV, timeout=170)


def legacy_keras():
    import tensorflow as tf
    import tf_keras

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    assert tf.keras.optimizers.Adam is tf_keras.optimizers.Adam
    problem = Problem()
    k = tf_keras.optimizers
    scaled = tf_keras.mixed_precision.LossScaleOptimizer
    check_training_modes(problem, tf_keras, lambda: k.SGD(0.5, momentum=0.9, clipnorm=0.05), sdp.DistributedOptimizer)
    legacy = lambda: k.legacy.SGD(0.5, momentum=0.9, global_clipnorm=0.1)  # noqa: E731
    check_training_modes(problem, tf_keras, legacy, sdp.DistributedOptimizer)
    for make in [lambda: k.Adam(0.1), lambda: k.legacy.Adam(0.1)]:
        for distributed in [
            lambda o: sdp.DistributedOptimizer(scaled(o, initial_scale=64.0)),
            lambda o: scaled(sdp.DistributedOptimizer(o), initial_scale=64.0),
        ]:
            expected = problem.trained(tf_keras, scaled(make(), initial_scale=64.0), False, False)
            assert_close(problem.trained(tf_keras, distributed(make()), True, True), expected, "loss scale")
    # Gradients that the script has reduced itself are not reduced again.
    for make, skip in [
        (lambda: k.SGD(1.0), {"skip_gradients_aggregation": True}),
        (lambda: k.SGD(1.0), {"experimental_aggregate_gradients": False}),
        (lambda: k.legacy.SGD(1.0), {"experimental_aggregate_gradients": False}),
    ]:
        variable = tf.Variable(0.0)
        with Reductions() as reductions:
            sdp.DistributedOptimizer(make()).apply_gradients([(tf.constant(1.0 + sdp.rank()), variable)], **skip)
        assert reductions.count == 0
        assert variable.numpy() == -1.0 - sdp.rank()
    # `minimize` reduces once.
    for make in (lambda: k.SGD(1.0), lambda: k.legacy.SGD(1.0)):
        variable = tf.Variable(0.0)
        with Reductions() as reductions:
            sdp.DistributedOptimizer(make()).minimize(lambda v=variable: v * (1.0 + sdp.rank()), [variable])
        assert reductions.count == 1
        assert variable.numpy() == -(1 + sdp.size()) / 2
    view = sdp.DistributedOptimizer(k.legacy.Adam(0.25))
    assert isinstance(view, k.legacy.Adam)
    assert type(view).from_config(view.get_config()).get_config() == view.get_config()


@pytest.mark.more
def test_tf_keras():
    """The assertions are in `legacy_keras`, which runs on each rank."""
    run_ranks(legacy_keras, 2, launcher=Forked("tensorflow"), env=_ENV | {"TF_USE_LEGACY_KERAS": "1"}, timeout=170)


def graphs_of_tf1(folder, every_kind=True):
    import numpy as np
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    v1 = tf.compat.v1
    sdp.init()
    problem = Problem()
    inputs = np.eye(20, dtype="float32")[problem.x].sum(2)  # counts of tokens

    def graph(optimizer, distributed, resource):
        v1.set_random_seed(4 + (sdp.rank() if distributed else 0))
        x = v1.placeholder(tf.float32, [None, 20])
        y = v1.placeholder(tf.int64, [None])
        with v1.variable_scope("model", use_resource=resource):
            w = v1.get_variable(
                "w",
                [20, 3],
                initializer=v1.random_normal_initializer(seed=4 if not sdp.rank() or not distributed else 99),
            )
            b = v1.get_variable("b", [3], initializer=v1.zeros_initializer())
        loss = v1.losses.sparse_softmax_cross_entropy(y, x @ w + b)
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=step)
        return x, y, train, (w, b), step

    def run(optimizer, distributed, resource=True):
        with tf.Graph().as_default():
            x, y, train, weights, step = graph(optimizer(), distributed, resource)
            hooks = [sdp.BroadcastGlobalVariablesHook(root_rank=0)] if distributed else []
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                for bx, by in zip(inputs, problem.y, strict=True):
                    if distributed:
                        bx, by = bx[problem.mine], by[problem.mine]
                    session.run(train, {x: bx, y: by})
                assert session.run(step) == problem.steps
                return session.run(weights)

    t = v1.train
    kinds = [
        (lambda: t.AdamOptimizer(0.1), True),
        (lambda: t.AdamOptimizer(0.1), False),
        (lambda: t.MomentumOptimizer(0.5, 0.9), True),
    ]
    for make, resource in kinds if every_kind else kinds[:1]:
        expected = run(make, False, resource)
        with Reductions() as reductions:
            got = run(lambda make=make: sdp.DistributedOptimizer(make(), use_locking=True), True, resource)
        assert reductions.count == 1
        assert_close(got, expected, "tf1")
    view = sdp.DistributedOptimizer(t.AdamOptimizer(0.1))
    assert isinstance(view, t.AdamOptimizer)

    # A TF1 optimizer in a tf.function, and eagerly.
    for compiled in (True, False):
        optimizer = sdp.DistributedOptimizer(t.MomentumOptimizer(1.0, 0.5))
        variable = tf.Variable(0.0)

        def step(optimizer=optimizer, variable=variable):
            optimizer.minimize(lambda: variable * (1.0 + sdp.rank()), var_list=[variable])

        step = tf.function(step) if compiled else step
        step()
        step()
        mean = (1 + sdp.size()) / 2
        assert variable.numpy() == pytest.approx(-mean * 2.5)

    # `broadcast_global_variables` in a graph: several dtypes, resource and reference variables.
    with tf.Graph().as_default(), v1.Session() as session:
        rank = sdp.rank()
        variables = [
            v1.Variable([1.0 + rank] * 3),
            v1.Variable([5 + rank], dtype=tf.int64, use_resource=True),
            v1.Variable(rank == 1, use_resource=True),
            v1.Variable([2.0 + rank], use_resource=False),
            v1.Variable(tf.fill([600, 600], float(rank)), use_resource=True),
        ]
        operation = sdp.broadcast_global_variables(1)
        session.run(v1.global_variables_initializer())
        session.run(operation)
        values = session.run(variables)
        assert [np.ravel(value)[0] for value in values] == [2.0, 6, True, 3.0, 1.0]
        with pytest.raises(ValueError, match=f"expected a rank, 0 to {sdp.size() - 1}"):
            sdp.broadcast_global_variables(sdp.size())
    # A graph without variables, and one that restores a checkpoint that only rank 0 has.
    with tf.Graph().as_default(), v1.train.MonitoredSession(hooks=[sdp.BroadcastGlobalVariablesHook(0)]):
        pass
    hook = sdp.BroadcastGlobalVariablesHook(0)
    for expected in (1, 2):
        with tf.Graph().as_default():
            step = v1.train.get_or_create_global_step()
            more = v1.assign_add(step, 1)
            where = os.path.join(folder, "checkpoints") if sdp.rank() == 0 else None
            with v1.train.MonitoredTrainingSession(checkpoint_dir=where, hooks=[hook]) as session:
                assert session.run(more) == expected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sdp.broadcast_global_variables(0) is None
    assert "eager mode" in str(caught[0].message)


def test_tf1(tmp_path):
    """The assertions are in `graphs_of_tf1`, which runs on each rank."""
    run_ranks(graphs_of_tf1, 2, str(tmp_path), launcher=Forked("tensorflow"), env=_ENV, timeout=170)


def check_on_four_ranks(folder):
    """Checks whose results depend on the number of ranks, on four ranks."""
    import keras

    import smdistributed.dataparallel.tensorflow as sdp

    graphs_of_tf1(folder, every_kind=False)
    assert sdp.size() == 4
    check_training_modes(Problem(), keras, lambda: keras.optimizers.SGD(0.5, momentum=0.9), sdp.DistributedOptimizer)
    logs = {"loss": float(sdp.rank())}
    sdp.keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": 1.5}


@pytest.mark.more
def test_four_ranks(tmp_path):
    """The assertions are in `four`, which runs on each rank."""
    run_ranks(check_on_four_ranks, 4, str(tmp_path), launcher=Forked("tensorflow"), env=_ENV, timeout=170)
