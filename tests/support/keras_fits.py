"""Trains Keras models with `fit`, each as an `smp.DistributedModel` and in plain Keras, and compares both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Batches of 7 rows, which 4 microbatches do not divide evenly, and a last batch of 6. The last batch of PART rows has
#: 3, fewer than microbatches.
ROWS, PART, BATCH = 20, 10, 7


def _models(base: type, activity: float = 0.02) -> dict[str, Any]:
    import tensorflow as tf

    keras = tf.keras
    layers = keras.layers

    class Regression(base):
        def __init__(self):
            super().__init__()
            self.one = layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
            self.two = layers.Dense(5, "tanh", activity_regularizer=keras.regularizers.L2(activity))
            self.head = layers.Dense(1)

        def call(self, x):
            hidden = self.two(self.one(x))
            self.add_loss(0.01 * tf.reduce_mean(tf.square(hidden)))
            return self.head(hidden)

    class Classes(base):
        def __init__(self):
            super().__init__()
            self.one, self.two = layers.Dense(8, "tanh"), layers.Dense(3)

        def call(self, x):
            return self.two(self.one(x))

    class Words(base):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(9, 4, mask_zero=True)
            self.one = layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
            self.head = layers.Dense(9)

        def call(self, x):
            return self.head(self.one(self.embedding(x)))

    class Several(base):
        def __init__(self):
            super().__init__()
            self.left, self.right = layers.Dense(4, "tanh"), layers.Dense(4, "tanh")
            self.near, self.far = layers.Dense(1, name="near"), layers.Dense(3, name="far")

        def call(self, inputs):
            both = self.left(inputs["a"]) + self.right(inputs["b"])
            return {"near": self.near(both), "far": self.far(both)}

    return {"regression": Regression, "classes": Classes, "words": Words, "several": Several}


def data(name: str, rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Returns inputs and targets of a model."""
    import numpy as np

    rng = np.random.default_rng(seed)
    if name == "words":
        # Sequences have different lengths. The last row of a batch is a microbatch of its own; all of it is masked.
        words = rng.integers(1, 9, (rows, 6)) * (np.arange(6) < rng.integers(1, 7, (rows, 1)))
        words[BATCH - 1 :: BATCH] = 0
        return words, rng.integers(0, 9, (rows, 6))
    if name == "several":
        x = {"a": rng.normal(size=(rows, 3)), "b": rng.normal(size=(rows, 2))}
        return x, {"near": rng.normal(size=(rows, 1)), "far": rng.integers(0, 3, rows)}
    x = rng.normal(size=(rows, 4))
    return x, rng.integers(0, 3, rows) if name == "classes" else np.tanh(x[:, :1]) + x[:, 1:2]


def _compiled(model: Any, name: str, wrapped: Callable[[Any], Any] = lambda optimizer: optimizer) -> None:
    import tensorflow as tf

    keras = tf.keras
    crossentropy = keras.losses.SparseCategoricalCrossentropy
    if name == "regression":
        model.compile(wrapped(keras.optimizers.Adam(0.05)), "mse", metrics=["mae"], weighted_metrics=["mse"])
    elif name == "classes":
        # With `use_ema`, `fit` ends by setting the variables to their moving averages.
        inner = keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True, ema_momentum=0.8)
        optimizer = keras.mixed_precision.LossScaleOptimizer(inner)
        model.compile(optimizer, crossentropy(True, reduction="sum"), metrics=["accuracy"], steps_per_execution=2)
    elif name == "words":
        # SGD, because Adam treats sparse gradients of the embedding differently from dense ones, and replicas make them
        # dense.
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), crossentropy(True), weighted_metrics=["accuracy"])
    else:
        losses = {"near": lambda y, p: tf.reduce_mean(tf.square(y - p)), "far": crossentropy(True)}
        weights = {"near": 0.3, "far": 2.0}
        model.compile(keras.optimizers.SGD(0.1), losses, loss_weights=weights, metrics={"far": ["accuracy"]})


def fitted(base: type, name: str, folder: Path) -> dict[str, Any]:
    """Trains one model; returns its losses, predictions and weights."""
    import numpy as np
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(3)
    model = _models(base)[name]()
    _compiled(model, name)
    (x, y), valid = data(name, ROWS), data(name, PART, 1)
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"epochs": 3, "verbose": 0, "validation_data": valid}
    if name == "regression":
        weights = np.linspace(0.5, 2.0, ROWS)
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.9 if epoch else 1.0))
        saves = keras.callbacks.ModelCheckpoint(str(folder / "best.weights.h5"), save_weights_only=True)
        options |= {"callbacks": [rates, saves], "sample_weight": weights}
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, **options)
        found["on batch"] = [
            model.train_on_batch(x[:7], y[:7], sample_weight=weights[:7]),
            model.test_on_batch(x[:3], y[:3]),
            model.predict_on_batch(x[:3]),
        ]
        stops = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
        again = model.fit(x, y, batch_size=BATCH, epochs=5, verbose=0, shuffle=False, callbacks=[stops])
        found["stopped"] = len(again.epoch)
        found["evaluated"] = model.evaluate(*valid, batch_size=BATCH, verbose=0, return_dict=True)
        model.load_weights(str(folder / "best.weights.h5"))
        found["of best"] = model.evaluate(*valid, batch_size=BATCH, verbose=0, return_dict=True)
    elif name == "classes":
        batches, valid = (tf.data.Dataset.from_tensor_slices(each).batch(BATCH) for each in ((x, y), valid))
        swaps = [keras.callbacks.SwapEMAWeights()] if hasattr(keras.callbacks, "SwapEMAWeights") else []
        options |= {"callbacks": swaps, "validation_data": valid}
        history = model.fit(batches, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, **options)
    else:
        # Keras 3 does not weight the metrics of several outputs by the size of the batch; 14 rows are two full batches.
        count = 14 if name == "several" else ROWS
        x, y, valid = (tf.nest.map_structure(lambda each, count=count: each[:count], each) for each in (x, y, valid))
        options |= {"validation_data": valid, "validation_batch_size": PART}
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, **options)
    found["history"] = dict(history.history)
    inputs = valid if name == "classes" else valid[0]
    found["predicted"] = model.predict(inputs, None if name == "classes" else PART, verbose=0)
    found["weights"] = _weights(base, model)
    return found


def _weights(base: type, model: Any) -> dict[int, Any]:
    """Returns the trainable variables of this rank, by their index in the whole model."""
    import tensorflow as tf

    variables = model.trainable_variables
    with contextlib.nullcontext() if base is tf.keras.Model else model._smp_all_variables():
        places = {id(variable): place for place, variable in enumerate(model.trainable_variables)}
    return {places[id(variable)]: variable.numpy() for variable in variables}


def compare(name: str, folder: Path) -> float:
    """The function of a rank: returns the largest difference between `fit` on all partitions and in plain Keras."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 4})
    ours = smp.allgather(fitted(smp.DistributedModel, name, folder))
    weights = {place: value for each in ours for place, value in each.pop("weights").items()}
    if smp.rank() > 0:
        return 0.0
    theirs = fitted(tf.keras.Model, name, folder)
    assert sorted(weights) == sorted(theirs["weights"])
    pairs = [(weights, theirs.pop("weights")), *((each, theirs) for each in ours)]
    for one, other in pairs:
        tf.nest.assert_same_structure(one, other)
    flat = [zip(*map(tf.nest.flatten, pair), strict=True) for pair in pairs]
    differences = [np.max(np.abs(np.subtract(one, other))) for each in flat for one, other in each]
    return float(max(differences))


def compare_replicas(name: str, key: str) -> float:
    """The function of one of four ranks: trains two replicas with half of the rows each. Returns the largest difference
    of their weights from plain Keras.
    """
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    tf.keras.backend.set_floatx("float64")
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 4, key: True})
    found = []
    for base in (smp.DistributedModel, tf.keras.Model):
        tf.keras.utils.set_random_seed(3)
        # Before version 3.14, Keras 3 sums activity losses over rows, so they would differ for a replica with half of
        # the rows.
        model = _models(base, activity=0.0)[name]()
        x, y = data(name, 2 * BATCH)
        callbacks: list[Any] = []
        if base is tf.keras.Model:
            _compiled(model, name)
            rows = slice(None)
        else:
            if key == "horovod":
                import horovod.tensorflow.keras as hvd

                _compiled(model, name, hvd.DistributedOptimizer)
                callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
            else:
                _compiled(model, name)
            rows = slice(smp.dp_rank() * BATCH, (smp.dp_rank() + 1) * BATCH)
        options = {"batch_size": 2 * BATCH, "epochs": 3, "verbose": 0, "shuffle": False}
        history = model.fit(x[rows], y[rows], callbacks=callbacks, **options).history["loss"]
        if callbacks:
            assert len(set(smp.allgather(history[-1]))) == 1
        found.append(_weights(base, model))
    ours, theirs = found
    return float(max(np.max(np.abs(value - theirs[place])) for place, value in ours.items()))
