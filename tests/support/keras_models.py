"""Keras models of many forms, each as an `smp.DistributedModel` and in plain Keras; compares their training."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

ROWS, STEPS = 16, 5


def _models(base: type) -> dict[str, tuple[Any, Any]]:
    """For each name: a function that makes the model, and one that draws inputs and targets from a random generator."""
    import tensorflow as tf

    keras = tf.keras
    layers = keras.layers

    def dense_input(rng, *shape):
        return rng.normal(size=(ROWS, *shape)), rng.normal(size=(ROWS, 4))

    class Whole(base):
        """Wraps a functional or sequential model."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x, training=None):
            return self.inner(x, training=training)

    def mlp():
        return Whole(
            keras.Sequential([layers.Dense(24, "tanh"), layers.Dense(24, "tanh"), layers.Dense(24), layers.Dense(4)])
        )

    class Convolutions(base):
        def __init__(self):
            super().__init__()
            self.one = layers.Conv2D(4, 3, padding="same", activation="tanh")
            self.two = layers.Conv2D(4, 3, padding="same")
            self.flat = layers.Flatten()
            self.head = layers.Dense(4)

        def call(self, x):
            return self.head(self.flat(tf.nn.relu(self.two(self.one(x)))))

    class Residual(base):
        def __init__(self):
            super().__init__()
            self.stem = layers.Conv2D(4, 3, padding="same")
            self.norms = [layers.BatchNormalization() for _ in range(2)]
            self.convolutions = [layers.Conv2D(4, 3, padding="same") for _ in range(2)]
            self.pool = layers.GlobalAveragePooling2D()
            self.head = layers.Dense(4)

        def call(self, x, training=None):
            x = self.stem(x)
            for norm, convolution in zip(self.norms, self.convolutions, strict=True):
                x = x + convolution(tf.nn.relu(norm(x, training=training)))
            return self.head(self.pool(x))

    def branches():
        given = keras.Input((6,))
        left = layers.Dense(12, "tanh")(given)
        right = layers.Dense(12, "relu")(given)
        right = layers.Dense(12, "tanh")(right)
        both = layers.Concatenate()([left, right])
        return Whole(keras.Model(given, layers.Dense(4)(layers.Dense(12, "tanh")(both))))

    class Shared(base):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(8, "tanh")
            self.shared = layers.Dense(8, "tanh")
            self.middle = layers.Dense(8, "tanh")
            self.head = layers.Dense(4)

        def call(self, x):
            return self.head(self.shared(self.middle(self.shared(self.first(x)))))

    class Words(base):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(20, 8)
            self.memory = layers.LSTM(8)
            self.head = layers.Dense(4)

        def call(self, x):
            return self.head(self.memory(self.embedding(x)))

    class Attention(base):
        def __init__(self):
            super().__init__()
            self.into = layers.Dense(8)
            self.norms = [layers.LayerNormalization() for _ in range(2)]
            self.attention = layers.MultiHeadAttention(2, 4)
            self.up, self.down = layers.Dense(16, "gelu"), layers.Dense(8)
            self.head = layers.Dense(4)

        def call(self, x):
            x = self.into(x)
            seen = self.norms[0](x)
            x = x + self.attention(seen, seen)
            x = x + self.down(self.up(self.norms[1](x)))
            return self.head(tf.reduce_mean(x, 1))

    class Dictionary(base):
        def __init__(self):
            super().__init__()
            self.left, self.right = layers.Dense(8, "tanh"), layers.Dense(8, "tanh")
            self.head = layers.Dense(4)

        def call(self, inputs):
            return self.head(self.left(inputs["a"]) * self.right(inputs["b"]))

    class TwoOutputs(base):
        def __init__(self):
            super().__init__()
            self.trunk = layers.Dense(8, "tanh")
            self.early = layers.Dense(4)
            self.more = layers.Dense(8, "tanh")
            self.late = layers.Dense(4)

        def call(self, x):
            x = self.trunk(x)
            return self.early(x), self.late(self.more(x))

    class Scaled(layers.Layer):
        """Has a variable, plain operations and a loop of its own."""

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x):
            def body(count, value):
                return count + 1, tf.tanh(value * tf.cast(self.scale, value.dtype))

            return tf.while_loop(lambda count, _: count < 3, body, (tf.constant(0), x))[1]

    class Custom(base):
        def __init__(self):
            super().__init__()
            self.first, self.scaled, self.head = layers.Dense(8), Scaled(), layers.Dense(4)

        def call(self, x):
            x = tf.where(x > 0, x, 0.1 * x)
            return self.head(tf.sqrt(1.0 + tf.square(self.scaled(self.first(x)))))

    def words(rng):
        return rng.integers(0, 20, size=(ROWS, 5)), rng.normal(size=(ROWS, 4))

    def dictionary(rng):
        pair = {"a": rng.normal(size=(ROWS, 3)), "b": rng.normal(size=(ROWS, 5))}
        return pair, rng.normal(size=(ROWS, 4))

    return {
        "mlp": (mlp, lambda rng: dense_input(rng, 6)),
        "convolutions": (Convolutions, lambda rng: dense_input(rng, 6, 6, 2)),
        "residual": (Residual, lambda rng: dense_input(rng, 6, 6, 2)),
        "branches": (branches, lambda rng: dense_input(rng, 6)),
        "shared": (Shared, lambda rng: dense_input(rng, 6)),
        "words": (Words, words),
        "attention": (Attention, lambda rng: dense_input(rng, 5, 6)),
        "dictionary": (Dictionary, dictionary),
        "two_outputs": (TwoOutputs, lambda rng: dense_input(rng, 6)),
        "custom": (Custom, lambda rng: dense_input(rng, 6)),
    }


NAMES = (
    "mlp",
    "convolutions",
    "residual",
    "branches",
    "shared",
    "words",
    "attention",
    "dictionary",
    "two_outputs",
    "custom",
)


def two_layers(base: type) -> Any:
    """A model that maps 3 features to 2, with a hidden layer of 6."""
    import tensorflow as tf

    keras = tf.keras

    class Model(base):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)

        def call(self, x):
            return self.two(self.one(x))

    return Model()


def _loss(outputs: Any, targets: Any) -> Any:
    import tensorflow as tf

    parts = outputs if isinstance(outputs, tuple | list) else [outputs]
    return tf.add_n([tf.reduce_mean(tf.square(part - targets)) for part in parts])


def _cast(value: Any, kind: str) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(
        lambda each: each.astype(kind) if each.dtype.kind == "f" else each.astype("int32"), value
    )


def learn(
    base: type, name: str, kind: str, microbatches: int, method: str | None, replica: tuple[int, int] = (0, 1)
) -> dict[str, Any]:
    """Trains a model for `STEPS` steps.

    Args:
        method: How gradients are computed in an `smp.step` ("tape", "get", "pairs" or "graph"); None for plain Keras.
        replica: Index and number of replicas; the model trains on this replica's part of the rows.

    Returns:
        Losses and the outputs of the last step; by the index of each variable, its gradient in the first step and its
        last value.
    """
    import numpy as np
    import tensorflow as tf

    keras = tf.keras
    keras.backend.clear_session()
    keras.backend.set_floatx(kind)
    keras.utils.set_random_seed(7)
    make, given = _models(base)[name]
    model = make()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    rng = np.random.default_rng(3)
    place, replicas = replica
    rows = slice(place * ROWS // replicas, (place + 1) * ROWS // replicas)
    batches = [tf.nest.map_structure(lambda each: each[rows], _cast(given(rng), kind)) for _ in range(STEPS)]

    def with_tape(inputs, targets):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True) if name == "residual" else model(inputs)
            loss = _loss(outputs, targets)
        return tape.gradient(loss, model.trainable_variables), loss, outputs

    def with_optimizer(inputs, targets):
        outputs = model(inputs, training=True)
        loss = _loss(outputs, targets)
        return optimizer.get_gradients(loss, model.trainable_variables), loss, outputs

    def with_pairs(inputs, targets):
        outputs = model(inputs, training=True)
        loss = _loss(outputs, targets)
        pairs = optimizer.compute_gradients(loss, model.trainable_variables)
        return [gradient for gradient, _ in pairs], loss, outputs

    def with_graph(inputs, targets):
        outputs = model(inputs, training=True)
        loss = _loss(outputs, targets)
        # A variable of Keras 3 wraps one of TensorFlow.
        variables = [each if isinstance(each, tf.Variable) else each.value for each in model.trainable_variables]
        return tf.gradients(loss, variables), loss, outputs

    if method is not None:
        import smdistributed.modelparallel.tensorflow as smp

        methods = {"tape": with_tape, "get": with_optimizer, "pairs": with_pairs, "graph": with_graph}
        step = smp.step(methods[method])

        @tf.function
        def train(inputs, targets):
            gradients, loss, outputs = step(inputs, targets)
            gradients = [gradient.accumulate() for gradient in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            return gradients, loss.reduce_mean(), [output.merge() for output in outputs]
    else:

        @tf.function
        def train(inputs, targets):
            count = len(targets) // microbatches
            rows = [slice(index * count, (index + 1) * count) for index in range(microbatches)]
            parts = [with_tape(tf.nest.map_structure(lambda each, at=at: each[at], inputs), targets[at]) for at in rows]
            gradients = [
                sum(tf.convert_to_tensor(each) for each in row) / microbatches
                for row in zip(*(p[0] for p in parts), strict=True)
            ]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            loss = tf.add_n([part[1] for part in parts]) / microbatches
            outputs = [part[2] if isinstance(part[2], tuple) else (part[2],) for part in parts]
            return gradients, loss, [tf.concat(row, 0) for row in zip(*outputs, strict=True)]

    losses, first = [], None
    for inputs, targets in batches:
        gradients, loss, outputs = train(inputs, targets)
        losses.append(float(loss))
        first = first or [gradient.numpy() for gradient in map(tf.convert_to_tensor, gradients)]

    def numbers(variables, whole):
        places = {id(variable): place for place, variable in enumerate(whole)}
        return [places[id(variable)] for variable in variables]

    if method is None:
        trainable, everything = model.trainable_variables, model.weights
    else:
        with model._smp_all_variables():
            trainable, everything = list(model.trainable_variables), list(model.weights)
    return {
        "losses": losses,
        "outputs": [output.numpy() for output in outputs],
        "gradients": dict(zip(numbers(model.trainable_variables, trainable), first, strict=True)),
        "variables": {
            place: variable.numpy()
            for place, variable in zip(numbers(model.weights, everything), model.weights, strict=True)
        },
    }


@functools.cache
def alone(name: str, kind: str, microbatches: int) -> dict[str, Any]:
    """Trains with plain Keras. The result is cached, since it depends on neither partitions nor schedules."""
    import tensorflow as tf

    return learn(tf.keras.Model, name, kind, microbatches, None)


def compare(
    name: str,
    kind: str,
    partitions: int,
    microbatches: int,
    schedule: str,
    method: str,
    plain: Mapping[str, Any] | None = None,
    replicas: int = 1,
) -> tuple[float, int]:
    """The function of a rank: trains on all partitions and compares with plain Keras. Replicas share the rows; plain
    Keras processes their microbatches one after the other.

    Args:
        plain: The result of `alone`, if it is known.

    Returns:
        The largest difference, and the number of variables on this rank.
    """
    import numpy as np

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    ddp = {"ddp": True} if replicas > 1 else {}
    smp.init({"partitions": partitions, "microbatches": microbatches, "pipeline": schedule, **ddp})
    ours = learn(smp.DistributedModel, name, kind, microbatches, method, (smp.dp_rank(), smp.dp_size()))
    plain = plain or alone(name, kind, replicas * microbatches)
    losses = np.mean(smp.allgather(ours["losses"], smp.CommGroup.DP_GROUP), 0)
    differences = [np.max(np.abs(losses - plain["losses"]))]
    for one, other in zip(ours["outputs"], plain["outputs"], strict=True):
        other = np.split(other, replicas)[smp.dp_rank()]
        differences.append(np.max(np.abs(one - other)))
    for what in ("gradients", "variables"):
        for place, value in ours[what].items():
            differences.append(np.max(np.abs(value - plain[what][place])))
    here = smp.allgather(sorted(ours["gradients"]), smp.CommGroup.MP_GROUP)
    # Each variable is on one rank of the model-parallel group.
    assert sorted(number for each in here for number in each) == sorted(plain["gradients"]), here
    return float(max(differences)), len(ours["gradients"])
