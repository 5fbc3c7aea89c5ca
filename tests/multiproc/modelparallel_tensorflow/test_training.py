"""Keras models on two partitions: training equals one process, errors are raised on every rank, checkpoints restore."""

from __future__ import annotations

import importlib.util
import json
import time
from unittest import mock

import pytest

from support import Forked, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(500),
]

#: A sample of the cases of `tests/e2e/modelparallel_tensorflow.py`: model, microbatches, schedule, gradient method.
SAMPLE = [("two_outputs", 4, "interleaved", "get")]
OTHERS = [
    ("attention", 2, "zero_bubble", "tape"),
    ("residual", 4, "simple", "get"),
    ("words", 2, "interleaved", "tape"),
]


def _models(cases):
    from support.keras_models import compare

    return [compare(name, "float64", 2, *case) for name, *case in cases]


def _run_checks(folder):
    import smdistributed.modelparallel.tensorflow as smp

    errors = _errors()
    smp.shutdown()
    checkpoints = _checkpoints(folder)
    _calls(folder)
    return errors, checkpoints, _models(SAMPLE), _parts()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The checkpoint folder, and the results of all checks by rank, from one job, because TensorFlow is slow to
    import."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(_run_checks, 2, str(folder), launcher=Forked("tensorflow"), env=ENV, timeout=490)


def test_models_learn_as_in_one_process(ranks):
    _assert_equal(SAMPLE, [models for _, _, models, _ in ranks[1]])


@pytest.mark.more
def test_other_models_learn_as_in_one_process():
    _assert_equal(OTHERS, run_ranks(_models, 2, OTHERS, launcher=Forked("tensorflow"), env=ENV, timeout=290))


def _assert_equal(cases, found_by_rank):
    for case, *found in zip(cases, *found_by_rank, strict=True):
        for difference, variables in found:
            assert difference < 1e-10, (case, found)
            assert variables > 0, (case, found)


def _errors():
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.tensorflow.runtime import agreement
    from smdistributed.modelparallel.tensorflow.tracing import operations

    found = {}

    def refused(name, call):
        try:
            call()
        except Exception as error:
            found[name] = [kind.__name__ for kind in type(error).__mro__], str(error)

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(4, use_bias=False), tf.keras.layers.Dense(4)

        def call(self, x):
            return self.two(self.one(x))

    # The cost model counts a loop as its body's cost times `maximum_iterations`.
    def looped(x):
        return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x @ x), (0, x), maximum_iterations=5)

    traced = tf.function(looped).get_concrete_function(tf.TensorSpec([8, 8])).graph
    assert 5 * 2 * 8**3 <= max(map(operations._flops, traced.get_operations())) < 10 * 2 * 8**3

    refused("before init", Model)
    smp.init({"partitions": 2, "microbatches": 2})
    model = Model()
    x = tf.ones([4, 3])

    @smp.step
    def forward(x):
        return model(x)

    @smp.step
    def independent(x):
        model(x)
        return x

    @smp.step
    def differing(x):
        y = model(x)
        return tf.exp(y) if smp.rank() else tf.sin(y)

    refused("outside", lambda: model(x))
    refused("rows", lambda: forward(tf.ones([3, 3])))
    refused("independent", lambda: independent(x))
    plain = forward(x).merge().numpy()
    refused("differing", lambda: differing(x))
    # The job stays usable after errors.
    assert (forward(x).merge().numpy() == plain).all()

    @smp.step
    def late(x):
        if smp.rank() == 0:
            raise KeyError("no such thing")
        return model(x)

    smp.barrier()
    if smp.rank():
        time.sleep(3.0)
    with mock.patch.object(agreement, "TRACING_SECONDS", 0.1):
        start = time.monotonic()
        refused("late", lambda: late(x))
        assert smp.rank() or time.monotonic() - start < 2.9
    assert (smp.step(lambda x: model(x))(x).merge().numpy() == plain).all()
    made = []

    @smp.step
    def growing(x):
        made.append(tf.Variable(2.0, name="unguarded"))
        return model(x) * made[-1]

    assert (growing(x).merge().numpy() == 2 * plain).all()
    refused("again", lambda: growing(tf.ones([8, 3])))

    @smp.step
    def updating(x):
        loss = tf.reduce_sum(model(x))
        optimizer.apply_gradients(
            zip(optimizer.get_gradients(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    optimizer = tf.keras.optimizers.SGD(0.0)
    refused("updating", lambda: updating(x))
    refused("output", lambda: forward(x).numpy())
    gradients = smp.step(lambda x: optimizer.get_gradients(tf.reduce_sum(model(x)), model.trainable_variables))(x)
    refused("each", lambda: optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True)))
    refused("partition", lambda: smp.partition(2).__enter__())
    refused("groups", smp.get_mp_process_group)
    # Variables of the other partition take no memory on this rank.
    sizes = []
    with model._smp_all_variables():
        for variable in model.weights:
            inner = getattr(variable, "value", variable)
            sizes.append(int(tf.size(tf.raw_ops.ReadVariableOp(resource=inner.handle, dtype=inner.dtype))))
    objects = smp.allgather({"rank": smp.rank(), "tensor": tf.constant([1, 2])})
    assert [each["rank"] for each in objects] == [0, 1]
    smp.barrier()
    return found, sizes, smp.mp_rank()


def test_errors_are_raised_on_every_rank(ranks):
    expected = {
        "before init": ("SMPNotInitializedError", "smp.init()"),
        "outside": ("SMPUsageError", "smp.step"),
        "rows": ("ValueError", "3 rows"),
        "independent": ("SMPUsageError", "must depend"),
        "differing": ("SMPMismatchError", "Sin(", "Exp("),
        "late": ("SMPMismatchError", "partition 0", "no such thing"),
        "again": ("ValueError", "`unguarded`", "first call"),
        "updating": ("StagingError", "SMPUsageError", "return the gradients"),
        "output": ("AttributeError", "no `numpy`", "merge()"),
        "each": ("SMPUsageError", "accumulate()"),
        "partition": ("SMPPartitionError", "partition 2 does not exist"),
        "groups": ("NotImplementedError", "torch.distributed"),
    }
    for (found, sizes, rank), *_ in ranks[1]:
        assert set(found) == set(expected), found
        if rank == 0:
            assert "KeyError" in found.pop("late")[0], found
        for name, (kinds, text) in found.items():
            kind, *texts = expected[name]
            assert kind in kinds, (name, kinds, text)
            assert all(each in text for each in texts), (name, text)
        assert sizes == ([12, 0, 0] if rank == 0 else [0, 16, 4])


def _checkpoints(folder):
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras

    def made(base):
        class Model(base):
            def __init__(self):
                super().__init__()
                self.one, self.two = keras.layers.Dense(4, "tanh"), keras.layers.Dense(4)

            def call(self, x):
                return self.two(self.one(x))

        return Model(), keras.optimizers.Adam(0.05)

    x, y = tf.constant(np.linspace(-1, 1, 12).reshape(4, 3), tf.float32), tf.ones([4, 4])

    def started():
        model, optimizer = made(smp.DistributedModel)

        @smp.step
        def gradients(x, y):
            loss = tf.reduce_mean(tf.square(model(x) - y))
            return optimizer.get_gradients(loss, model.trainable_variables), loss

        @tf.function
        def train():
            found, loss = gradients(x, y)
            optimizer.apply_gradients(
                zip([each.accumulate() for each in found], model.trainable_variables, strict=True)
            )
            return loss.reduce_mean()

        return tf.train.Checkpoint(model=model, optimizer=optimizer), train

    smp.init({"partitions": 2, "microbatches": 2})
    checkpoint, train = started()
    manager = smp.CheckpointManager(checkpoint, folder, max_to_keep=2, checkpoint_name="mine")
    assert manager.restore() is None
    for _ in range(3):
        train()
        path = manager.save()
    # The same state, saved with TensorFlow's own call and in the sharded format.
    direct = checkpoint.save(f"{folder}.direct/ckpt")
    sharded = smp.CheckpointManager(checkpoint, f"{folder}.sharded", max_to_keep=2, format="sharded")
    assert sharded.restore() is None
    with pytest.raises(ValueError, match="'tensorflow' or 'sharded'"):
        smp.CheckpointManager(checkpoint, folder, format="no such format")
    saved = [sharded.save(number) for number in (7, 8, 9)]
    assert sharded.checkpoints == saved[1:]
    assert sharded.latest_checkpoint == saved[-1]
    expected = [float(train()) for _ in range(3)]

    def restored(checkpoint, source):
        if source == "manager":
            assert smp.CheckpointManager(checkpoint, folder, checkpoint_name="mine").restore() == path
        elif source == "sharded":
            assert smp.CheckpointManager(checkpoint, folder).restore(saved[0].removesuffix("-7") + "-8") == saved[1]
        else:
            checkpoint.restore(direct).assert_existing_objects_matched()

    # Restored after the first step and before it, each in a new session; also with one partition.
    found = {}
    for when, source, partitions in (
        ("after", "manager", 2),
        ("before", "manager", 2),
        ("after", "direct", 2),
        ("before", "direct", 2),
        ("before", "sharded", 2),
        ("before", "manager", 1),
        ("before", "sharded", 1),
    ):
        smp.shutdown()
        smp.init({"partitions": partitions, "microbatches": 2})
        checkpoint, train = started()
        if when == "after":
            train()
        restored(checkpoint, source)
        found[when, source, partitions] = [float(train()) for _ in range(3)]
    # Plain TensorFlow, in one process.
    model, optimizer = made(keras.Model)
    model(x)
    optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path).assert_existing_objects_matched()
    plain = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        plain.append(float(loss))
    return expected, found, plain, path, manager.checkpoints


def test_checkpoints_restore_as_in_one_process(ranks):
    folder, found_by_rank = ranks
    for _, (expected, found, plain, path, kept), *_ in found_by_rank:
        assert path == str(folder / "mine-3")
        assert kept == [str(folder / "mine-2"), path]
        for source, losses in found.items():
            assert losses == pytest.approx(expected, abs=0 if source[2] == 2 else 1e-6), source
        assert plain == pytest.approx(expected, abs=1e-6)
    assert sorted(each.name for each in folder.iterdir() if each.suffix == ".index") == [
        "mine-2.index",
        "mine-3.index",
    ]


def _calls(folder):
    """Other calls of scripts around steps: clipping, metrics, saving, partition files, hooks, Horovod, object
    messages."""
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPUsageError

    keras = tf.keras
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.integers(0, 20, size=(8, 5))), tf.constant(rng.normal(size=(8, 4)), tf.float32)

    def made(base, seeded=True, frozen=False):
        class Model(base):
            def __init__(self):
                super().__init__()
                one = keras.initializers.RandomUniform(seed=1 if seeded else None)
                two = keras.initializers.GlorotUniform(seed=2 if seeded else None)
                self.one = keras.layers.Embedding(20, 6, embeddings_initializer=one, name="one", trainable=not frozen)
                self.two = keras.layers.Dense(4, kernel_initializer=two, name="two")

            def call(self, x):
                return self.two(tf.reduce_mean(self.one(x), axis=1))

        return Model()

    def loss_of(outputs):
        return tf.reduce_mean(tf.square(outputs - y))

    def plain(optimizer, clip, frozen=False):
        model, losses = made(keras.Model, frozen=frozen), []
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = loss_of(model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = tf.clip_by_global_norm(gradients, clip)[0] if clip else gradients
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            losses.append(float(loss))
        return losses

    def started(optimizer, clip=None, seeded=True, frozen=False, **config):
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2, **config})
        model = made(smp.DistributedModel, seeded, frozen)

        @smp.step(input_signature=[tf.TensorSpec([None, 5], x.dtype), tf.TensorSpec([None, 4])])
        def step(x, y):
            loss = tf.reduce_mean(tf.square(model(x) - y))
            pairs = optimizer.compute_gradients(loss, model.trainable_variables)
            return [gradient for gradient, _ in pairs], loss

        @tf.function
        def train(x, y):
            gradients, loss = step(x, y)
            gradients = [each.accumulate() for each in gradients]
            if clip:
                gradients, _ = smp.clip_by_global_norm(gradients, clip)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss.reduce_mean()

        return model, train

    def sgd(**options):
        return keras.optimizers.SGD(0.1, **options)

    def check(train, expected):
        np.testing.assert_allclose([float(train(x, y)) for _ in range(3)], expected, rtol=0, atol=1e-5)

    # Clipping by the norm over all partitions, with a sparse gradient; evaluation and a saved model.
    file = f"{folder}.json"
    model, train = started(sgd(), 0.05, partition_file=file)
    clipped = plain(sgd(), 0.05)
    check(train, clipped)
    metric = keras.metrics.MeanSquaredError()

    @smp.step
    def evaluate(x, y):
        outputs = model(x, training=False)
        metric.update_state(y, outputs)
        return outputs

    outputs = evaluate(x, y).merge()
    assert float(metric.result()) == pytest.approx(float(loss_of(outputs)), abs=1e-6)
    model.save_model(f"{folder}.saved")
    served = tf.saved_model.load(f"{folder}.saved").signatures["serving_default"](inputs=x)
    np.testing.assert_allclose(*served.values(), outputs, rtol=0, atol=1e-6)

    # A partition file that swaps the two partitions.
    rank, swapped = smp.rank(), f"{folder}.{smp.rank()}.json"
    smp.barrier()
    with open(file) as text, open(swapped, "w") as other:
        places = json.load(text)
        json.dump({path: 1 - place for path, place in places.items()}, other)
    before = len(model.trainable_variables)
    model, train = started(sgd(global_clipnorm=0.05), partition_file=swapped, load_partition=True)
    check(train, clipped)
    assert {before, len(model.trainable_variables)} == {1, 2}

    # The partition file also records manual partitions. A step may be a method, and `get_concrete_function` traces it.
    smp.shutdown()
    smp.init(
        {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1, "partition_file": file}
    )

    class ByHand(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.ones = [keras.layers.Dense(4, kernel_initializer="ones", name="one") for _ in range(2)]

        def call(self, x):
            with smp.partition(0):
                x = self.ones[0](x)
            return self.ones[1](x)

    class Steps:
        def __init__(self, model):
            self.model = model

        @smp.step
        def forward(self, x):
            return self.model(x)

    # A post-partition hook that fails runs again in the next call. The hooks after it still run, each of them only
    # once.
    steps, called, given = Steps(ByHand()), [], {}
    smp.register_post_partition_hook(lambda: called.append("one") if rank == 0 else given["one"])
    smp.register_post_partition_hook(lambda: called.append("two"))
    for _ in range(2):
        with pytest.raises((KeyError, SMPUsageError), match=r"'one'|partition 1: KeyError"):
            steps.forward(y)
    assert called == ["one", "two"][rank:]
    given["one"] = True
    concrete = steps.forward.get_concrete_function(y)
    np.testing.assert_allclose(concrete(y).merge(), steps.forward(y).merge())
    assert called == ["one", "two"][rank:]

    # The loss depends on no variable, so no partition has gradients.
    optimizer = sgd()

    @smp.step
    def apart(x):
        outputs = steps.model(x)
        return optimizer.get_gradients(tf.reduce_sum(x), steps.model.trainable_variables), outputs

    pairs = list(zip(apart(y)[0], steps.model.trainable_variables, strict=False))
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients(pairs)
    smp.barrier()
    with open(file) as text:
        assert json.load(text) == {"one": 0, "one:1": 1}
    rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 3]), tf.constant([5, 4]))
    kept = tf.Variable(tf.ones([5, 4]))
    smp.StepOutput([rows, rows]).accumulate(var=kept)
    assert kept.numpy().sum(axis=1).tolist() == [0.0, 8.0, 0.0, 8.0, 0.0]

    # A partition without trainable variables: its optimizer still counts the iterations that are saved.
    optimizer = sgd(momentum=0.9)
    model, train = started(optimizer, 0.05, frozen=True)
    check(train, plain(sgd(momentum=0.9), 0.05, frozen=True))
    assert sorted(smp.allgather(len(model.trainable_variables))) == [0, 2]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    path = smp.CheckpointManager(checkpoint, f"{folder}.new/folder").save()
    counted = [tf.train.load_variable(path, name) for name, shape in tf.train.list_variables(path) if "iter" in name]
    assert counted == [3]

    # Replicas with different initial weights get equal ones.
    tf.random.set_seed(rank)
    model, train = started(sgd(), seeded=False, partitions=1, ddp=True)
    rows = slice(4 * rank, 4 * rank + 4)
    train(x[rows], y[rows])
    one, other = smp.allgather([tf.convert_to_tensor(each).numpy() for each in model.trainable_variables])
    assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))

    # Gradients in a dict are averaged over replicas; a gradient with respect to outputs is not.
    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2, "ddp": True})
    model = made(smp.DistributedModel)

    @smp.step
    def named(x, y):
        outputs = model(x)
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            loss = tf.reduce_mean(tf.square(outputs - y))
        variables = [getattr(each, "value", each) for each in model.trainable_variables]
        found = zip(variables, tf.gradients(loss, variables), strict=True)
        return {
            each.name: 2.0 * gradient if len(each.shape) == 1 else gradient for each, gradient in found
        }, tape.gradient(loss, outputs)

    found, by_outputs = named(x[rows], y[rows])
    assert by_outputs.merge().shape == [4, 4]
    one, other = smp.allgather({name: tf.convert_to_tensor(each.accumulate()).numpy() for name, each in found.items()})
    assert all(np.array_equal(each, other[name]) for name, each in one.items())
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    keras.utils.set_random_seed(0)

    class Square(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = (keras.layers.Dense(4, use_bias=False) for _ in range(2))

        def call(self, x):
            return self.two(self.one(x))

    model = Square()
    outputs = smp.step(lambda x: [model(x), 2.0 * model(x)])(y)
    assert [each.merge().shape for each in outputs] == [[8, 4], [8, 4]]

    # Horovod's optimizer reduces gradients when it applies them, not in the step.
    from horovod.tensorflow import keras as hvd

    optimizer = hvd.DistributedOptimizer(sgd())
    model, train = started(optimizer, partitions=1, horovod=True)
    train(x[rows], y[rows])
    expected = made(keras.Model)
    with tf.GradientTape() as tape:
        loss = loss_of(expected(x))
    plainly = sgd()
    plainly.apply_gradients(
        zip(tape.gradient(loss, expected.trainable_variables), expected.trainable_variables, strict=True)
    )
    for ours, theirs in zip(model.trainable_variables, expected.trainable_variables, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)

    # Messages with Python objects.
    if rank == 0:
        smp.send({"tensor": tf.constant([1, 2])}, 1, smp.RankType.DP_RANK)
        assert smp.recv_from(1) == "back"
        smp.broadcast([3])
    else:
        assert smp.recv_from(0)["tensor"].numpy().tolist() == [1, 2]
        smp.send("back", 0)
        assert smp.recv_from(0) == [3]


def _parts():
    """Trains plain Keras and a partitioned model whose layers have optimizers of their own; returns both results.

    All partitions hold the variable `shift`, which belongs to no layer. Also returns the error of applying a gradient
    to another variable.
    """
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    keras.backend.set_floatx("float64")
    x = tf.constant(np.random.default_rng(4).normal(size=(4, 3)))

    def learn(base):
        keras.utils.set_random_seed(5)

        class Model(base):
            def __init__(self):
                super().__init__()
                self.one, self.two = keras.layers.Dense(3, "tanh"), keras.layers.Dense(3)
                self.shift = self.add_weight(shape=(3,), initializer="ones", name="shift")

            def call(self, x):
                return self.two(self.one(x) * self.shift)

        model, outside = Model(), tf.Variable(0.5, dtype=tf.float64)
        near, far = keras.optimizers.Adam(0.1, global_clipnorm=0.1), keras.optimizers.SGD(0.1, global_clipnorm=0.1)
        whole = keras.optimizers.SGD(0.1, momentum=0.9)

        def body(x):
            with tf.GradientTape(persistent=True) as tape:
                outputs = model(x)
                loss = tf.reduce_mean(tf.square(outputs - outside))
            parts = model.one.trainable_variables, [model.shift, *model.two.trainable_variables]
            variables = [*model.trainable_variables, outside]
            return *(tape.gradient(loss, part) for part in (*parts, variables)), tf.RaggedTensor.from_tensor(outputs)

        if base is keras.Model:

            def step(x):
                *lists, outputs = zip(*map(body, tf.split(x, 2)), strict=True)
                return *([sum(pair) / 2 for pair in zip(*each, strict=True)] for each in lists), tf.concat(outputs, 0)

            clip = tf.clip_by_global_norm
        else:
            over_microbatches, clip = smp.step(body), smp.clip_by_global_norm

            def step(x):
                *lists, outputs = over_microbatches(x)
                return *([each.accumulate() for each in gradients] for gradients in lists), outputs.merge()

        @tf.function
        def train(x):
            of_near, of_far, of_all, outputs = step(x)
            norms = [
                clip(gradients, 1.0)[1] for gradients in (of_near, of_far, of_all, [2.0 * each for each in of_all])
            ]
            near.apply_gradients(zip(of_near, model.one.trainable_variables, strict=True))
            far.apply_gradients(zip(of_far, [model.shift, *model.two.trainable_variables], strict=True))
            whole.apply_gradients(zip(of_all, [*model.trainable_variables, outside], strict=True))
            return norms, outputs.to_tensor()

        body(x[:2]) if base is keras.Model else over_microbatches(x)
        found = [tf.nest.map_structure(lambda each: each.numpy(), train(x)) for _ in range(3)]
        variables = [*model.one.variables, model.shift, *model.two.variables, outside]
        here = {id(each) for each in (*model.variables, outside)}
        values = {place: each.numpy() for place, each in enumerate(variables) if id(each) in here}
        counts = [len(optimizer.variables) for optimizer in (near, far, whole)]
        return model, whole, found, values, counts

    _, _, *plain = learn(keras.Model)
    model, whole, *ours = learn(smp.DistributedModel)

    def kernels():
        return [each for each in model.trainable_variables if len(each.shape) == 2]

    gradients = smp.step(lambda x: whole.get_gradients(tf.reduce_sum(model(x)), kernels()))(x)
    message = ""
    try:
        # Gradients of all partitions are paired with variables of this one.
        whole.apply_gradients(zip([each.accumulate() for each in gradients], kernels()))  # noqa: B905
    except smp.exceptions.SMPUsageError as error:
        message = str(error)
    smp.barrier()
    return plain, ours, message, smp.rank()


def test_layers_with_separate_optimizers(ranks):
    import numpy as np

    places = []
    for *_, ((expected, values, counts), (found, here, here_counts), message, rank) in ranks[1]:
        for (norms, outputs), (our_norms, our_outputs) in zip(expected, found, strict=True):
            np.testing.assert_allclose(our_norms, norms, rtol=1e-7)
            np.testing.assert_allclose(our_outputs, outputs, atol=1e-7)
        for place, value in here.items():
            np.testing.assert_allclose(value, values[place], atol=1e-7)
        # Each optimizer has as many variables as in one process.
        assert here_counts == counts
        places.append(sorted(here))
        assert ("would be applied to `" in message) == (rank == 1), message
    assert places == [[0, 1, 2, 5], [2, 3, 4, 5]]
