"""Training with `model.fit` on two ranks: callbacks, saved models, and calls of scripts for TensorFlow 2.3."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support import Forked, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(180),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""


def run_checks(folder, name):
    """Runs all checks with `keras` or with `tf_keras`."""
    import importlib

    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    keras = importlib.import_module(name)
    sdp.init()
    assert tf.keras.Model is keras.Model
    broadcast_callback(keras, sdp)
    broadcast_callback_of_unbuilt_models(keras, sdp)
    metrics_are_averaged(sdp)
    devices_are_told(sdp)
    warmup(keras, sdp)
    momentum_correction(keras, sdp)
    saved_models(keras, sdp, Path(folder))
    deprecated_calls(keras, sdp)
    several_kinds_of_variables(keras, sdp)


def network(keras, seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def data(sdp, count=16, same=False):
    import numpy as np

    rng = np.random.default_rng(0 if same else sdp.rank())
    return rng.normal(size=(count, 4)).astype("float32"), rng.normal(size=(count, 1)).astype("float32")


def gather(sdp, value):
    import numpy as np
    import tensorflow as tf

    mine = tf.constant(np.ravel(value), tf.float64)
    zeros = tf.zeros([sdp.size(), len(mine)], tf.float64)
    slot = tf.tensor_scatter_nd_update(zeros, [[sdp.rank()]], mine[None])
    return sdp.oob_allreduce(slot, op=sdp.ReduceOp.SUM).numpy()


def flat(weights):
    import numpy as np

    return np.concatenate([np.ravel(weight) for weight in weights])


def broadcast_callback(keras, sdp):
    """Ranks start from different weights and train on with the root's. Layers in `local_variables` stay different."""
    import tensorflow as tf

    model = network(keras, seed=sdp.rank())
    own = keras.layers.Dense(1, name="own")
    model.add(own)
    own_before = own.get_weights()[0]
    optimizer = sdp.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse")
    started = {}

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            started.setdefault("weights", flat(model.layers[0].get_weights()))

    callback = sdp.keras.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=own.variables)
    model.fit(*data(sdp), batch_size=8, epochs=1, verbose=0, callbacks=[callback, Recorder()])
    for values in (started["weights"], flat(model.layers[0].get_weights())):
        gathered = gather(sdp, values)
        assert (gathered == gathered[0]).all()
    assert not (gather(sdp, own_before) == gather(sdp, own_before)[0]).all()
    assert not (gather(sdp, own.get_weights()[0]) == gather(sdp, own.get_weights()[0])[0]).all()
    for wrong in (3, ["w"], tf.constant(1.0)):
        with pytest.raises((ValueError, TypeError)):
            sdp.keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=wrong)


def broadcast_callback_of_unbuilt_models(keras, sdp):
    """Layers create their variables in the first batch; in the second case rank 0 has built its model before."""
    for loaded in (False, True):
        keras.utils.set_random_seed(sdp.rank())
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(sdp.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        if loaded and sdp.rank() == 0:
            model.build((None, 4))
        callback = sdp.keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*data(sdp), batch_size=8, epochs=1, verbose=0, callbacks=[callback])
        gathered = gather(sdp, flat(model.get_weights()))
        assert (gathered == gathered[0]).all()


def metrics_are_averaged(sdp):
    callback = sdp.keras.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + sdp.rank(), "a": sdp.rank(), "text": "as it is", "list": [1, 2]}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "a": 0.5, "text": "as it is", "list": [1, 2]}
    callback.on_epoch_end(1, None)
    callback.on_epoch_end(1, {})
    from smdistributed.dataparallel.exceptions import MismatchError

    mine = "accuracy" if sdp.rank() else "loss"
    with pytest.raises(
        MismatchError, match=rf"different metrics at the end of epoch 2: rank {sdp.rank()} has \['{mine}"
    ):
        callback.on_epoch_end(2, {mine: 1.0})
    # The job stays usable after the mismatch.
    assert sdp.oob_allreduce(1.0).numpy() == 1.0


def devices_are_told(sdp):
    import warnings

    callbacks = sdp.keras.callbacks
    for name, build in (
        ("BroadcastGlobalVariablesCallback", lambda *device: callbacks.BroadcastGlobalVariablesCallback(0, *device)),
        ("MetricAverageCallback", callbacks.MetricAverageCallback),
    ):
        with pytest.warns(UserWarning, match=f"`device` of {name} has no effect"):
            build("/cpu:0")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build()
            build("")


def warmup(keras, sdp):
    """The learning rate rises in each batch from that of one rank to that of all; then schedules set it."""
    rates = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(model.optimizer.learning_rate))

    model = network(keras, seed=0)
    model.compile(sdp.DistributedOptimizer(keras.optimizers.SGD(0.01 * sdp.size())), "mse")
    callback = sdp.keras.callbacks.LearningRateWarmupCallback(0.01 * sdp.size(), warmup_epochs=2, verbose=1)
    history = model.fit(*data(sdp), batch_size=4, epochs=3, verbose=0, callbacks=[callback, Recorder()])
    expected = [0.01 * (1 + (i + 1) / 8) for i in range(8)] + [0.02] * 4
    assert rates == pytest.approx(expected)
    assert history.history["lr"] == pytest.approx([rates[3], rates[7], rates[11]])
    callbacks = sdp.keras.callbacks
    rates.clear()
    steps = [
        callbacks.LearningRateScheduleCallback(0.1, 0.5, end_epoch=2),
        callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.01 * epoch, start_epoch=2),
    ]
    model.fit(*data(sdp), batch_size=8, epochs=4, verbose=0, callbacks=[*steps, Recorder()])
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.002, 0.002, 0.003, 0.003])
    with pytest.raises(ValueError, match="initial_lr"):
        callbacks.LearningRateWarmupCallback(None)


def momentum_correction(keras, sdp):
    """v = m v - lr g: momentum correction scales v by the same factor as the learning rate."""
    import tensorflow as tf

    from smdistributed.dataparallel.tensorflow.keras.callbacks import velocities

    makers = [keras.optimizers.SGD]
    if name_of(keras) == "tf_keras":
        makers.append(keras.optimizers.legacy.SGD)
    for make in makers:
        model = network(keras, seed=0)
        model.compile(sdp.DistributedOptimizer(make(0.1, momentum=0.5)), "mse")
        callback = sdp.keras.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0 if epoch < 1 else 0.25)
        callback.set_model(model)
        model.fit(*data(sdp), batch_size=16, epochs=1, verbose=0, callbacks=[callback])
        before = [tf.convert_to_tensor(velocity).numpy() for velocity in velocities(model.optimizer)]
        assert len(before) == 4
        callback.on_epoch_begin(1)
        callback.on_train_batch_begin(0)
        for old, velocity in zip(before, velocities(model.optimizer), strict=True):
            assert tf.convert_to_tensor(velocity).numpy() == pytest.approx(0.25 * old)
    assert velocities(sdp.DistributedOptimizer(keras.optimizers.Adam())) == []


def name_of(keras):
    return keras.__name__.split(".")[0]


def saved_models(keras, sdp, folder):
    """A model saved with a distributed optimizer loads with the plain one, or with a distributed one in `sdp.keras`."""
    import tensorflow as tf

    # All ranks have the same data, so training on all ranks ends at the weights of one process.
    x, y = data(sdp, same=True)
    legacy = name_of(keras) == "tf_keras"
    optimizers = [keras.optimizers.Adam] + ([keras.optimizers.legacy.Adam] if legacy else [])
    for make in optimizers:
        model = network(keras, seed=0)
        model.compile(sdp.DistributedOptimizer(make(0.01)), keras.losses.MeanSquaredError())
        model.fit(x, y, batch_size=8, verbose=0)
        # Keras 3 cannot continue training with an optimizer loaded from an HDF5 file or a SavedModel.
        for suffix in ("keras", "h5", "tf") if legacy else ("keras",):
            path = folder / f"{sdp.rank()}.{make.__module__}.{suffix}"
            model.save(str(path), save_format=suffix) if legacy else model.save(str(path))
            plain = keras.models.load_model(str(path))
            loaded = sdp.keras.load_model(str(path))
            assert type(plain.optimizer) is make
            assert isinstance(loaded.optimizer, make)
            assert type(loaded.optimizer) is not make
            # Both continue from the saved optimizer state with equal results.
            for one in (plain, loaded):
                one.fit(x, y, batch_size=16, verbose=0)
            assert flat(loaded.get_weights()) == pytest.approx(flat(plain.get_weights()), abs=1e-6)
            assert int(underlying(loaded.optimizer.iterations)) == int(underlying(plain.optimizer.iterations))
            if (make, suffix) == (keras.optimizers.Adam, "keras"):
                assert int(underlying(loaded.optimizer.iterations)) == 3
    model.save_weights(str(folder / f"{sdp.rank()}.weights.h5"))
    # tf.train.Checkpoint: saved with the distributed optimizer, restored into the plain one.
    prefix = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / f"checkpoint{sdp.rank()}"))
    other = network(keras, seed=1)
    plain = optimizers[-1](0.5)
    other.compile(plain, keras.losses.MeanSquaredError())
    other.fit(x, y, batch_size=16, verbose=0)
    tf.train.Checkpoint(model=other, optimizer=plain).restore(prefix).assert_existing_objects_matched()
    assert flat(other.get_weights()) == pytest.approx(flat(model.get_weights()))
    model = network(keras, seed=0)
    path = folder / f"{sdp.rank()}.plain.keras"
    model.save(str(path))
    with pytest.raises(ValueError, match="saved without an optimizer"):
        sdp.keras.load_model(str(path))


def underlying(variable):
    from smdistributed.dataparallel.tensorflow.keras_variable import underlying

    return underlying(variable)


def deprecated_calls(keras, sdp):
    """Calls of scripts for TensorFlow 2.3 and 2.4, such as `optimizer.lr` and `get_gradients`."""
    import tensorflow as tf

    optimizer = tf.optimizers.SGD(lr=0.5) if name_of(keras) == "keras" else tf.optimizers.SGD(0.5)
    for opt in (optimizer, sdp.DistributedOptimizer(optimizer)):
        assert float(opt.lr) == 0.5
        opt.lr = 0.25
        assert float(opt.learning_rate) == 0.25
        opt.lr = 0.5
        variable = tf.Variable(2.0)
        mean = 1 + (sdp.rank() if opt is optimizer else (sdp.size() - 1) / 2)
        fresh = type(opt).from_config(opt.get_config())
        fresh.minimize(lambda v=variable: v * (1.0 + sdp.rank()), [variable])
        assert variable.numpy() == 2.0 - 0.5 * mean
        assert len(fresh.variables()) == len(fresh.variables)
        assert list(map(id, fresh.variables())) == list(map(id, fresh.variables))

        fresh = type(opt).from_config(opt.get_config())
        variable = tf.Variable(2.0)

        @tf.function
        def step(opt=fresh, variable=variable):
            gradients = opt.get_gradients(variable * (1.0 + sdp.rank()), [variable])
            opt.apply_gradients(zip(gradients, [variable], strict=True), name="step")
            return gradients[0]

        assert step().numpy() == 1.0 + sdp.rank()
        assert variable.numpy() == 2.0 - 0.5 * mean
        with pytest.raises(RuntimeError, match="GradientTape"):
            fresh.get_gradients(tf.constant(1.0), [variable])
        with pytest.raises(ValueError, match="the loss does not depend on variable"):
            tf.function(lambda o=fresh, v=variable: o.get_gradients(tf.constant(1.0), [v]))()
    metric = tf.metrics.SparseCategoricalAccuracy()
    metric.update_state([1], [[0.0, 1.0]])
    assert metric.result() == 1.0
    metric.reset_states()
    assert metric.result() == 0.0


def several_kinds_of_variables(keras, sdp):
    import tensorflow as tf

    rank = sdp.rank()
    first = network(keras, seed=rank)
    variables = [
        tf.Variable([1.0 + rank] * 3),
        tf.Variable(7 + rank),
        tf.Variable([rank == 1]),
        tf.Variable(tf.fill([700, 600], 1.0 + rank)),
        tf.Variable([1.0 + rank], dtype=tf.float16),
        tf.Variable(5 + rank, dtype=tf.int64),
        tf.Variable(tf.zeros([0])),
        *[tf.Variable(tf.fill([1000, 100], float(rank))) for _ in range(4)],
    ]
    variables.append(variables[0])

    def maxima():
        return [float(tf.reduce_max(tf.cast(variable, tf.float64))) for variable in variables[:6]]

    def set_rank_values():
        for variable in variables[:6]:
            variable.assign(tf.cast(tf.fill(variable.shape, 3 + rank), variable.dtype))

    assert sdp.broadcast_variables(iter(variables), 1) is None
    assert maxima() == [2.0, 8.0, 1.0, 2.0, 2.0, 6.0]
    assert {float(variable[0, 0]) for variable in variables[7:11]} == {1.0}
    sdp.broadcast_variables(first.variables, root_rank=1)
    gathered = gather(sdp, flat(first.get_weights()))
    assert (gathered == gathered[0]).all()

    @tf.function
    def step(first_batch):
        if first_batch:
            sdp.broadcast_variables(variables, root_rank=0)

    for condition in (True, tf.constant(True)):
        set_rank_values()
        step(condition)
        assert maxima() == [3.0, 3.0, 1.0, 3.0, 3.0, 3.0]
    set_rank_values()
    step(tf.constant(False))
    assert maxima()[1] == 3.0 + rank
    single = tf.Variable(1.0 + rank)
    sdp.broadcast_variables(single, 1)
    assert single.numpy() == 2.0
    for root in (-1, 2, 0.0, None):
        with pytest.raises(ValueError, match="expected a rank, 0 to 1"):
            sdp.broadcast_variables(variables, root)
    for wrong in ([tf.constant(1.0)], [3]):
        with pytest.raises(TypeError, match="is not a variable"):
            sdp.broadcast_variables(wrong, 0)
    with pytest.raises(TypeError, match="is of string, which cannot be sent"):
        sdp.broadcast_variables([tf.Variable("text")], 0)
    layer = sdp.overlap(single * 2.0)
    with tf.GradientTape() as tape:
        value = sdp.overlap(single) * 3.0
    assert tape.gradient(value, single).numpy() == 3.0
    assert layer.numpy() == 4.0
    assert sdp.keras.allreduce([1.0 + rank]).numpy() == 1.5
    assert sdp.keras.broadcast(1.0 + rank, 1).numpy() == 2.0


def test_keras_3(tmp_path):
    """The assertions are in `both`, which runs on each rank."""
    run_ranks(run_checks, 2, str(tmp_path), "keras", launcher=Forked("tensorflow"), env=_ENV, timeout=170)


@pytest.mark.more
def test_tf_keras(tmp_path):
    """The assertions are in `both`, which runs on each rank."""
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    run_ranks(
        run_checks,
        2,
        str(tmp_path),
        "tf_keras",
        launcher=Forked("tensorflow"),
        env=_ENV | {"TF_USE_LEGACY_KERAS": "1"},
        timeout=170,
    )
