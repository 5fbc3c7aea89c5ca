"""`horovod.keras` with Keras 3, and `horovod.tensorflow.keras` with tf_keras: optimizers, callbacks, saved models.

``python tests/multiproc/horovod/test_keras.py`` runs the checks on 2, 3 and 4 ranks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, more, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")

ENV = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def start():
    """Initializes the Horovod module for the selected Keras. Returns TensorFlow, Keras, the module, rank and size."""
    import tensorflow as tf

    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        import horovod.tensorflow.keras as hvd

        keras = tf.keras
        assert keras.__name__.startswith("tf_keras") or "tf_keras" in keras.Model.__module__
    else:
        import keras

        import horovod.keras as hvd
    hvd.init()
    return tf, keras, hvd, hvd.rank(), hvd.size()


def families(keras):
    """Yields SGD, and the legacy SGD if this Keras has one."""
    yield keras.optimizers.SGD
    if hasattr(keras.optimizers, "legacy") and "tf_keras" in keras.Model.__module__:
        yield keras.optimizers.legacy.SGD


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def values():
    tf, _, hvd, rank, size = start()
    assert float(hvd.allreduce(float(rank))) == sum(range(size)) / size
    assert float(hvd.allreduce(float(rank), op=hvd.Sum, name="a_sum")) == sum(range(size))
    assert hvd.allgather([rank]).numpy().tolist() == list(range(size))
    assert float(hvd.broadcast(float(rank), size - 1)) == size - 1
    assert hvd.reducescatter([float(rank)] * size, op=hvd.Sum).numpy().tolist() == [sum(range(size))]
    raises(RuntimeError, "does not support eager execution", lambda: hvd.broadcast_global_variables(0))
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
        assert hvd.allreduce(float(rank), op=hvd.Sum, name="in_a_graph") == sum(range(size))


def optimizers():
    tf, keras, hvd, rank, size = start()
    average = sum(range(1, size + 1)) / size
    for cls in families(keras):
        variable = tf.Variable([1.0])
        given = cls(learning_rate=1.0)
        optimizer = hvd.DistributedOptimizer(given)
        assert type(optimizer).__name__ == "SGD"
        assert type(optimizer).__module__ == "horovod._keras"
        assert isinstance(optimizer, cls)
        config = optimizer.get_config()
        assert config["name"] == "DistributedSGD"
        assert optimizer.from_config(config).get_config() == config
        assert type(optimizer).from_config(config).get_config() == config
        mine = tf.constant([float(rank + 1)])
        # Each way to apply gradients reduces exactly once: with `Sum` a second reduction would change the result.
        summing = hvd.DistributedOptimizer(cls(learning_rate=1.0), op=hvd.Sum)
        summing.apply_gradients([(mine, variable)])
        assert abs(float(variable[0]) - (1 - average * size)) < 1e-5
        variable.assign([1.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * mine)
        pairs = summing._compute_gradients(loss, [variable], tape=tape)
        assert abs(float(pairs[0][0][0]) - average * size) < 1e-5
        summing.apply_gradients(pairs)
        assert abs(float(variable[0]) - (1 - average * size)) < 1e-5
        variable.assign([1.0])
        summing.minimize(lambda variable=variable, mine=mine: tf.reduce_sum(variable * mine), [variable])
        assert abs(float(variable[0]) - (1 - average * size)) < 1e-5
        # Gradients of a distributed tape are reduced already, so the optimizer does not reduce them again.
        variable.assign([1.0])
        import horovod.tensorflow as hvd_tf

        with hvd_tf.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = tf.reduce_sum(variable * mine)
        summing.apply_gradients([(tape.gradient(loss, variable), variable)])
        assert abs(float(variable[0]) - (1 - average * size)) < 1e-5
        # The gradient of a local variable is not reduced, but divided by the number of ranks.
        local = tf.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(cls(learning_rate=1.0))
        optimizer.register_local_var(local)
        other = tf.Variable([1.0])
        optimizer.apply_gradients([(mine, local), (mine, other)])
        assert abs(float(local[0]) - (1 - (rank + 1) / size)) < 1e-5
        assert abs(float(other[0]) - (1 - average)) < 1e-5
        assert optimizer.variables() is not None
        # Groups, predivision and compression.
        for options in (
            {"groups": 1},
            {"gradient_predivide_factor": 2.0},
            {"compression": hvd.Compression.fp16},
            {"groups": [[local, other]]},
        ):
            local.assign([1.0])
            other.assign([1.0])
            hvd.DistributedOptimizer(cls(learning_rate=1.0), **options).apply_gradients([(mine, local), (mine, other)])
            assert abs(float(other[0]) - (1 - average)) < 1e-3, options
        raises(
            ValueError,
            "op currently only supports Average and Sum",
            lambda cls=cls: hvd.DistributedOptimizer(cls(), op=hvd.Adasum),
        )
        wrong = {"op": hvd.Sum, "gradient_predivide_factor": 2.0}
        raises(
            ValueError, "not supported with op", lambda cls=cls, wrong=wrong: hvd.DistributedOptimizer(cls(), **wrong)
        )
        raises(ValueError, "must be > 0", lambda cls=cls: hvd.DistributedOptimizer(cls(), backward_passes_per_step=0))
    if size > 1:
        own = hvd.add_process_set([0])
        variable = tf.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(next(families(keras))(learning_rate=1.0), process_set=own)
        optimizer.apply_gradients([(tf.constant([float(rank + 1)]), variable)])
        assert abs(float(variable[0]) - (1 - (rank + 1))) < 1e-5
        hvd.remove_process_set(own)


def aggregation():
    tf, keras, hvd, rank, size = start()
    passes = 4
    average = sum(range(size)) / size
    for cls in families(keras):
        for averaged in (True, False):
            variable = tf.Variable([0.0])
            optimizer = hvd.DistributedOptimizer(
                cls(learning_rate=-1.0), backward_passes_per_step=passes, average_aggregated_gradients=averaged
            )

            @tf.function
            def step(gradient, optimizer=optimizer, variable=variable):
                optimizer.apply_gradients([(gradient, variable)])

            per_step = average if averaged else average * passes
            for index in range(10):
                step(tf.constant([float(rank)]))
                assert abs(float(variable[0]) - (index + 1) // passes * per_step) < 1e-5, (cls, index, variable)
                assert int(optimizer.iterations) == index + 1
                assert int(optimizer._agg_helper.counter) == (index + 1) % passes
        # Gradients that the caller has reduced with `_allreduce`, as with the original. A value that is not finite
        # affects its own aggregation cycle only.
        variable = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(cls(learning_rate=-1.0), backward_passes_per_step=2)
        for index in range(4):
            gradients = optimizer._allreduce([tf.constant([float("inf") if index == 0 else 1.0])], [variable])
            if index == 1:
                # Not applied: it would make the variable infinite.
                assert float(gradients[0][0]) == float("inf")
                continue
            optimizer.apply_gradients(zip(gradients, [variable], strict=True), experimental_aggregate_gradients=False)
        assert float(variable[0]) == 2.0
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([2, 1]))
        optimizer = hvd.DistributedOptimizer(cls(), backward_passes_per_step=2)
        table = tf.Variable(tf.zeros([2, 1]))
        raises(
            ValueError,
            "IndexedSlices are not supported when",
            lambda optimizer=optimizer, slices=slices, table=table: optimizer.apply_gradients([(slices, table)]),
        )


def model_of(keras, units=8):
    layers = [
        keras.layers.Input((4,)),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ]
    return keras.Sequential(layers)


def data(rank, rows=64):
    import numpy as np

    draw = np.random.RandomState(rank)
    x = draw.rand(rows, 4).astype(np.float32)
    return x, (x.sum(1) * 0.7).astype(np.int64).clip(0, 2)


def fits():
    """`fit` with all callbacks, a saved model, and a variable that stays local."""
    import numpy as np

    tf, keras, hvd, rank, size = start()
    x, y = data(rank)
    for cls in families(keras):
        keras.utils.set_random_seed(100 + rank)
        model = model_of(keras)
        local = model.layers[-1].trainable_weights[-1]
        local = getattr(local, "value", local) if not isinstance(local, tf.Variable) else local
        local.assign(tf.fill([3], float(rank)))
        optimizer = hvd.DistributedOptimizer(cls(learning_rate=0.1 * size, momentum=0.9))
        optimizer.register_local_var(local)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        seen, rates = [], []

        class Recorder(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None, seen=seen):
                seen.append(dict(logs))

            def on_train_batch_end(self, batch, logs=None, rates=rates, optimizer=optimizer):
                rates.append(float(tf.convert_to_tensor(optimizer.learning_rate)))

        with tempfile.TemporaryDirectory() as folder:
            best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
            raises(ValueError, "filepath", lambda best=best, model=model: model.fit(x, y, callbacks=[best], verbose=0))
            best.filepath = os.path.join(folder, "best.keras")
            callbacks = [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * size, warmup_epochs=2, verbose=1),
                hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1 * size, multiplier=0.5, start_epoch=2),
                Recorder(),
                best,
            ]
            model.fit(x, y, batch_size=16, epochs=4, callbacks=callbacks, verbose=0, shuffle=False)
            assert os.path.exists(best.filepath)
            if cls is next(families(keras)):
                again = hvd.load_model(best.filepath)
                assert type(again.optimizer).__name__ == "SGD"
                assert type(again.optimizer).__module__ == "horovod._keras"
                assert abs(float(again.optimizer.momentum) - 0.9) < 1e-6
                rate = float(tf.convert_to_tensor(again.optimizer.learning_rate))
                assert min(abs(rate - each) for each in rates) < 1e-6
                assert int(again.optimizer.iterations) > 0
                again.fit(x, y, epochs=1, verbose=0)
                # `custom_objects` may map a class name to a function that creates the optimizer.
                mine = type("Mine", (cls,), {})
                again.compile(optimizer=mine(0.3), loss="mse")
                again.save(os.path.join(folder, "mine.keras"))
                made = {"Mine": lambda **options: hvd.DistributedOptimizer(mine(**options), op=hvd.Sum)}  # noqa: B023
                again = hvd.load_model(os.path.join(folder, "mine.keras"), custom_objects=made)
                assert isinstance(again.optimizer, mine)
                assert again.optimizer._smd_options.reduction.op == hvd.Sum
        expected = [0.1 * ((batch + 1) / 8 * (size - 1) * 1.0 + 1) if size > 1 else 0.1 for batch in range(8)]
        assert np.allclose(rates[:8], expected, atol=1e-6), (rates, expected)
        assert np.allclose(rates[8:], [0.1 * size] * 4 + [0.05 * size] * 4, atol=1e-6), rates
        assert seen[0].keys() >= {"loss", "accuracy", "lr"}
        # Averaged metrics and all variables except the local one are equal on all ranks.
        gathered = [hvd.allgather([logs["loss"]]).numpy() for logs in seen]
        assert all(np.ptp(losses) < 1e-6 for losses in gathered)
        weights = [
            np.concatenate([np.ravel(w) for w in layer.get_weights()]) for layer in model.layers if layer.get_weights()
        ]
        for place, flat in enumerate(weights):
            kept = flat if place == 0 else flat[:-3]
            assert np.ptp(hvd.allgather(kept[None]).numpy(), axis=0).max() < 1e-6
        assert np.ptp(hvd.allgather(weights[-1][None, -3:]).numpy(), axis=0).max() > 0.1
        assert seen[-1]["loss"] < seen[0]["loss"]
    raises(
        ValueError,
        "must be of tf.Variable type",
        lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1]),
    )
    raises(ValueError, "initial_lr", lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0))
    callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 1.0, staircase=False)
    callback.set_params({})
    raises(ValueError, "Could not autodetect the number of steps per epoch", callback.on_train_begin)


def partial_and_custom():
    import numpy as np

    tf, keras, hvd, rank, size = start()
    x, y = data(rank)
    model = model_of(keras)
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[-1])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    first, last = (np.ravel(layer.get_weights()[0])[None] for layer in model.layers if layer.get_weights())
    assert np.ptp(hvd.allgather(first).numpy(), axis=0).max() < 1e-6
    if size > 1:
        assert np.ptp(hvd.allgather(last).numpy(), axis=0).max() > 1e-6
    # Rank 0's optimizer is built before, so it has more variables than those of the other ranks.
    model = model_of(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "sparse_categorical_crossentropy")
    if rank == 0:
        given = keras.optimizers.Adam(0.01)
        given.build(model.trainable_variables)
        given.iterations.assign(7)
        model.compile(hvd.DistributedOptimizer(given), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert int(model.optimizer.iterations) == 9
    raises(
        ValueError,
        "All local layers must be of",
        lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["dense"]),
    )

    # A custom training step with aggregation: one reduction in every second batch.
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x)

        def train_step(self, batch):
            x, _ = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Model()
    model.build((None, 1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=2)
    model.compile(optimizer)
    ones = np.full((3, 1), rank + 1.0, np.float32)
    model.fit(ones, np.zeros((3, 1), np.float32), batch_size=1, epochs=1, verbose=0)
    assert int(optimizer.iterations) == 3
    assert abs(float(model.get_weights()[0][0, 0]) - (1 - 2 * sum(range(1, size + 1)))) < 1e-5


def mixed_precision():
    import numpy as np

    tf, keras, hvd, rank, size = start()
    x, y = data(rank)
    model = model_of(keras)
    optimizer = hvd.DistributedOptimizer(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    assert size == 1 or np.ptp(hvd.allgather(weights[None]).numpy(), axis=0).max() < 1e-6
    if size > 1 and os.environ["TF_USE_LEGACY_KERAS"] == "0":
        # Ranks outside the process set step with their own gradients.
        only = hvd.add_process_set([0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=only)
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=4.0)
        variable = keras.Variable([0.0])
        tf.function(lambda: optimizer.apply([tf.constant([4.0 * (rank + 1)])], [variable]))()
        assert float(variable[0]) == -(rank + 1.0)
        hvd.remove_process_set(only)


def unbuilt_models():
    """Callbacks of both modules, with a model whose layers create their variables in the first batch."""
    import importlib

    import numpy as np

    _, keras, _, rank, size = start()

    class State:
        batch, epoch, commits = 0, 0, 0

        def commit(self):
            self.commits += 1

    for name in ("horovod.keras", "horovod.tensorflow.keras"):
        hvd = importlib.import_module(name)
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(2)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        if name == "horovod.keras" and rank == 0:
            # Rank 0's model is built before, as after loading weights.
            model.build((None, 4))
        assert bool(model.built) == (name == "horovod.keras" and rank == 0)
        state = State()
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * size, warmup_epochs=1),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        x = np.random.default_rng(rank).normal(size=(32, 4)).astype("float32")
        model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        values = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
        assert np.ptp(hvd.allgather(values[None]).numpy(), axis=0).max() == 0, name
        assert (state.epoch, state.commits) == (2, 6)


PARTS = (values, optimizers, aggregation, fits, partial_and_custom, mixed_precision, unbuilt_models)


def check_all():
    for part in PARTS:
        part()


@pytest.mark.timeout(420)
@pytest.mark.parametrize("legacy", ["0", more("1")], ids=["keras3", "tf_keras"])
def test_training(legacy):
    """The assertions are in `check_all`, which runs on each rank."""
    if legacy == "1" and importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    run_ranks(check_all, 2, launcher=Forked("tensorflow"), env={**ENV, "TF_USE_LEGACY_KERAS": legacy}, timeout=400)


if __name__ == "__main__":
    for legacy in ("0", "1"):
        for ranks in (2, 3, 4):
            run_ranks(check_all, ranks, env={**ENV, "TF_USE_LEGACY_KERAS": legacy}, timeout=400)
            print(f"{ranks} ranks, TF_USE_LEGACY_KERAS={legacy}: all well")
