"""Data-parallel replicas of Keras models on partitions: training equals one process; reduction overlaps the
backward."""

from __future__ import annotations

import importlib.util
import itertools
from unittest import mock

import pytest

from support import Forked, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]

#: Model, partitions, microbatches, schedule, and how gradients are computed; on 4 processes. As many cases as
#: processes.
CASES = [
    ("mlp", 2, 2, "interleaved", "tape"),
    ("words", 2, 2, "simple", "get"),
    ("shared", 2, 2, "zero_bubble", "graph"),
    ("branches", 1, 1, "interleaved", "pairs"),
]
_STEPS = 4


def _run_checks():
    import smdistributed.modelparallel.tensorflow as smp
    from support.keras_models import alone, compare

    smp.init({"partitions": 2})
    # Each rank computes the single-process reference of one case.
    name, partitions, microbatches, *_ = CASES[smp.rank()]
    plain = smp.allgather(alone(name, "float64", 4 // partitions * microbatches))
    differences = [
        compare(name, "float64", *case, plain[number], 4 // case[0])[0] for number, (name, *case) in enumerate(CASES)
    ]
    return differences, _step_output_methods(), _other_forms(), _different_steps()


def _step_output_methods():
    """Returns the largest error of the means that a `StepOutput` of gradients gives in eager code, by all its methods.

    One of the gradients is sparse, that of an embedding.
    """
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, "auto_partition": False, "default_partition": 0})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.rows = tf.keras.layers.Embedding(5, 3, embeddings_initializer="ones")
            self.head = tf.keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            x = self.rows(x)
            with smp.partition(1):
                return self.head(x)

    model = Model()

    @smp.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    x = np.array([[0], [1], [1], [4], [2], [2], [3], [1]], np.int32)
    gradients, _ = step(x[4 * smp.dp_rank() :][:4])
    # By hand: a row has two outputs, each 3; in its microbatch of 2 rows it counts 2 * 3 / (2 rows * 2 outputs) * 2.
    rows = np.zeros((5, 3))
    np.add.at(rows, x[:, 0], 6.0 / 8)
    expected = [rows] if smp.pp_rank() == 0 else [np.full((3, 2), 3.0), np.full(2, 3.0)]
    worst = 0.0
    for gradient, mean in zip(gradients, expected, strict=True):
        given = [gradient.accumulate(), gradient.accumulate("add_n"), gradient.reduce_mean(), gradient.reduce_sum() / 2]
        worst = max(worst, *(np.max(np.abs(tf.convert_to_tensor(each) - mean)) for each in given))
        own = smp.allgather(tf.convert_to_tensor(gradient.outputs[0]).numpy(), smp.CommGroup.DP_GROUP)
        if smp.pp_rank() == 0:
            # The outputs of a single microbatch are not reduced over replicas.
            assert not np.array_equal(*own), own
    return float(worst)


def _other_forms():
    """Steps that return gradients cast to another dtype, some of them, in a dict, or in a form that is not
    supported."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            same = {"kernel_initializer": "ones", "use_bias": False}
            self.row = [tf.keras.layers.Dense(3, name=f"layer{i}", **same) for i in range(3)]

        def call(self, x):
            for layer in self.row:
                x = layer(x)
            return x

    model = Model()

    def made(form):
        @smp.step
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            return form(tape.gradient(loss, model.trainable_variables)), loss

        return step

    def small(gradient):
        return tf.cast(gradient, tf.bfloat16)

    x = tf.fill([4, 3], 1.0 + smp.dp_rank())
    exact = [each.accumulate() for each in made(list)(x)[0]]
    # A list of the gradients of all variables has this partition's ones; other outputs are on all ranks.
    row = made(lambda found: [small(each) for each in found])(x)[0]
    (some,) = made(lambda found: [small(found[1])])(x)[0]
    named = made(lambda found: {"last": small(2 * found[2]), "norm": tf.norm(found[0])})(x)[0]
    made(
        lambda found: [
            tf.norm(found[0], axis=1),
            tf.reduce_max(found[0][:, :1], 1),
            tf.cast(found[1] > 0, tf.int32),
            # An output of the same operation as a gradient, but no gradient.
            tf.identity_n([found[0], tf.range(5.0)])[1],
        ]
    )(x)
    assert len(row) == len(exact) == len(model.trainable_variables)
    means = [*(each.accumulate() for each in row), some.accumulate(), named["last"].accumulate()]
    assert all(each.dtype == tf.bfloat16 for each in means)
    by_rank = smp.allgather([tf.cast(each, tf.float32).numpy().tolist() for each in means[-2:]])
    is_equal = all(each == by_rank[0] for each in by_rank)
    for one, other in zip(row, exact, strict=True):
        is_equal &= bool(tf.reduce_all(abs(tf.cast(one.accumulate(), other.dtype) / other - 1) < 0.02))
    own = smp.allgather(float(named["norm"].reduce_mean()), smp.CommGroup.DP_GROUP)
    found = {}
    for name, form in (
        ("flat", lambda found: tf.concat([tf.reshape(each, [-1]) for each in found[:2]], 0)),
        ("part", lambda found: found[2][:1] * 2),
        ("whole numbers", lambda found: [tf.cast(each, tf.int32) for each in found]),
    ):
        try:
            made(form)(x)
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return is_equal, own[0] != own[1], found


def _different_steps():
    """After equal steps on all ranks, one replica or one rank alone has no gradient for a variable.

    Returns for each case the error, and whether a step after it gives the gradients of the one before.
    """
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.row = [tf.keras.layers.Dense(4, name=f"layer{i}") for i in range(3)]

        def call(self, x):
            for layer in self.row:
                x = layer(x)
            return x

    model = Model()

    def made(keep):
        @smp.step
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            found = tape.gradient(loss, model.trainable_variables)
            return [each if index in keep else None for index, each in enumerate(found)]

        return step

    whole, part = made(range(6)), made((0, 1, 2, 4))
    x = tf.ones([4, 4])
    for step in (whole, part, whole):
        before = step(x)
    found = []
    for differs in (smp.dp_rank() == 1, smp.rank() == 3):
        try:
            (part if differs else whole)(x)
        except Exception as error:
            after = whole(x)
            same = [bool(tf.reduce_all(a.accumulate() == b.accumulate())) for a, b in zip(before, after, strict=True)]
            found.append((type(error).__name__, str(error), len(same) > 0 and all(same)))
    return found


@pytest.fixture(scope="module")
def ranks():
    """Results of all checks by rank, from one job."""
    return run_ranks(_run_checks, 4, launcher=Forked("tensorflow"), env=ENV, timeout=280)


def test_replicas_learn_as_one_process(ranks):
    for found, *_ in ranks:
        for case, difference in zip(CASES, found, strict=True):
            assert difference < 1e-10, (case, [found for found, *_ in ranks])


def test_transformed_gradients_are_averaged_or_rejected(ranks):
    for *_, (is_equal, own, found), _ in ranks:
        assert is_equal
        assert own
        for name, layers in {"flat": (0, 1), "part": (2,), "whole numbers": (0,)}.items():
            kind, text = found[name]
            assert kind == "SMPUsageError", found
            assert "in another form" in text, found
            assert all(f"layer{layer}/kernel" in text for layer in layers), found


def test_every_step_output_method_gives_the_mean_over_replicas(ranks):
    assert all(worst < 1e-6 for _, worst, *_ in ranks), [worst for _, worst, *_ in ranks]


def test_replicas_with_different_gradients_raise(ranks):
    for *_, errors in ranks:
        assert len(errors) == 2, ranks
        assert all(kind == "SMPMismatchError" for kind, *_ in errors), errors
        assert all(is_equal_after for *_, is_equal_after in errors), errors
        (_, different_replicas, _), (_, different_partitions, _) = errors
        assert "has `a gradient" in different_replicas, errors
        assert "has `no gradient of" in different_replicas, errors
        assert "the ranks of this pipeline run different steps: partition 0 has" in different_partitions, errors
    # The ranks of the other pipeline get the text from their replicas.
    for rank, replica in ((0, 2), (1, 3)):
        _, (_, text, _) = ranks[rank][-1]
        assert f"rank {replica} failed in its pipeline: the ranks of this pipeline run different" in text, ranks[rank]


def _parts():
    """Gradients in a dict or a tuple, clipped gradients, and a replica that returns none of its gradients."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPUsageError

    smp.init({"partitions": 1, "microbatches": 2, "ddp": True})

    class Shift(tf.keras.layers.Layer):
        def build(self, shape):
            self.parts = [self.add_weight(shape=(4,), name=f"part{i}") for i in range(2)]
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x):
            one, other = map(tf.convert_to_tensor, self.parts)
            return (x + (one + other)) * self.scale

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.rows, self.shift = tf.keras.layers.Embedding(5, 4), Shift()

        def call(self, x):
            return self.shift(self.rows(x))

    model = Model()

    def computed(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    @smp.step
    def clipped(x):
        found, norm = tf.clip_by_global_norm(computed(x)[0], 0.1)
        return {"rows": found[0], "some": (found[1], found[3])}, norm

    @smp.step
    def shared(x):
        found, _ = computed(x)
        return {"one": found[1], "other": found[2]}

    @smp.step
    def flat(x):
        found = [tf.convert_to_tensor(each) for each in computed(x)[0]]
        whole = tf.concat([tf.reshape(each, [-1]) for each in found], 0)
        return [tf.reshape(each, [4]) for each in tf.split(whole, [20, 4, 4, 1])[1:3]]

    x = tf.constant([[0], [1], [2], [2]]) + smp.rank()
    found, norm = clipped(x)
    gradients = [found["rows"], *found["some"], *shared(x).values()]
    assert [each.accumulate().shape.rank for each in gradients] == [2, 1, 0, 1, 1]
    for each in gradients:
        mean = sum(tf.convert_to_tensor(part) for part in each.outputs) / 2
        own = smp.allgather(mean.numpy())
        assert not np.array_equal(*own)
        np.testing.assert_allclose(each.accumulate(), np.mean(own, 0), atol=1e-7)
    assert len(set(smp.allgather(float(norm.reduce_mean())))) == 2
    with pytest.raises(SMPUsageError, match=r"Reshape.*whether it is the gradient of .*part0.* or .*part1"):
        flat(x)
    # A step without gradients may run on one replica only.
    if smp.rank() == 0:
        smp.step(lambda x: model(x))(x)
    step = smp.step(lambda x: computed(x)[smp.rank()])
    try:
        step(x)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_gradients_are_found_in_any_structure():
    for error in run_ranks(_parts, 2, launcher=Forked("tensorflow"), env=ENV, timeout=170):
        assert error is not None
        assert error[0] == "SMPMismatchError", error
        assert "where rank 1 has `nothing`" in error[1], error


def _reduced_during_backward():
    """Returns for each step whether a gradient was reduced before the last backward, which waits for that, has
    ended."""
    import threading

    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow import gradients

    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    reduced, backwards, found = threading.Event(), itertools.count(1), []

    def wait(gradient):
        if next(backwards) % 2 == 0:
            found.append(reduced.wait(30.0))
        return gradient

    def note(gradient):
        reduced.set()
        return gradient

    def through(function, x):
        # Declared stateless, because TensorFlow would call a segment with side effects as a whole.
        return tf.ensure_shape(tf.numpy_function(function, [x], x.dtype, stateful=False), x.shape)

    @tf.custom_gradient
    def hold(x):
        return tf.identity(x), lambda gradient: through(wait, gradient)

    over_replicas = gradients.over_replicas

    def over_replicas_with_note(*args):
        first, last = over_replicas(*args)
        return [first, through(note, last)]

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.row = [tf.keras.layers.Dense(512, use_bias=False, name=f"layer{i}") for i in range(4)]

        def call(self, x):
            for number, layer in enumerate(self.row):
                x = layer(x)
                if number % 2 == 0:
                    x = hold(x)
            return x

    model, optimizer = Model(), tf.keras.optimizers.SGD(0.01)

    @smp.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    with mock.patch.object(gradients, "over_replicas", over_replicas_with_note):
        for _ in range(_STEPS):
            means, _ = step(tf.random.normal([8, 512]))
            optimizer.apply_gradients(
                zip([each.accumulate() for each in means], model.trainable_variables, strict=True)
            )
            reduced.clear()
    return found


def test_gradients_are_reduced_while_the_rest_of_backward_runs():
    """Each partition has two layers. The backward of the first one waits until the second one's gradient is reduced."""
    for found in run_ranks(_reduced_during_backward, 4, launcher=Forked("tensorflow"), env=ENV, timeout=280):
        assert found == [True] * _STEPS
