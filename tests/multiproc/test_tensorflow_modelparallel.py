"""Keras models on several partitions learn as in one process; what is wrong is an error on every rank."""

from __future__ import annotations

import importlib.util

import pytest

from support import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""

#: A sample of the table of `tests/e2e/modelparallel_tensorflow.py`: model, microbatches, schedule, way to gradients.
SAMPLE = [
    ("residual", 4, "interleaved", "get"),
    ("attention", 2, "zero_bubble", "tape"),
    ("two_outputs", 4, "simple", "get"),
]


def _models():
    from support.keras_models import compare

    return [compare(name, "float64", 2, *case) for name, *case in SAMPLE]


def _everything(folder):
    import smdistributed.modelparallel.tensorflow as smp

    errors = _errors()
    smp.shutdown()
    checkpoints = _checkpoints(folder)
    return errors, checkpoints, _models()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """All of it in one job: TensorFlow takes its time to start."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(_everything, 2, str(folder), env=_ENV, timeout=290)


def test_models_learn_as_in_one_process(ranks):
    found_by_rank = [models for _, _, models in ranks[1]]
    for case, *found in zip(SAMPLE, *found_by_rank, strict=True):
        for difference, variables in found:
            assert difference < 1e-10, (case, found)
            assert variables > 0, (case, found)


def _errors():
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

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
    # The job goes on.
    assert (forward(x).merge().numpy() == plain).all()
    refused("partition", lambda: smp.partition(2).__enter__())
    refused("groups", smp.get_mp_process_group)
    # What is elsewhere takes no memory.
    sizes = []
    with model._smp_as_whole():
        for variable in model.weights:
            inner = getattr(variable, "value", variable)
            sizes.append(int(tf.size(tf.raw_ops.ReadVariableOp(resource=inner.handle, dtype=inner.dtype))))
    objects = smp.allgather({"rank": smp.rank(), "tensor": tf.constant([1, 2])})
    assert [each["rank"] for each in objects] == [0, 1]
    smp.barrier()
    return found, sizes, smp.mp_rank()


def test_what_is_wrong_is_an_error_on_every_rank(ranks):
    expected = {
        "before init": ("SMPNotInitializedError", "smp.init()"),
        "outside": ("SMPUsageError", "smp.step"),
        "rows": ("ValueError", "3 rows"),
        "independent": ("SMPUsageError", "must depend"),
        "differing": ("SMPMismatchError", "Sin(", "Exp("),
        "partition": ("SMPPartitionError", "partition 2 does not exist"),
        "groups": ("NotImplementedError", "torch.distributed"),
    }
    for (found, sizes, rank), _, _ in ranks[1]:
        assert set(found) == set(expected), found
        for name, (kind, *texts) in expected.items():
            kinds, text = found[name]
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
    expected = [float(train()) for _ in range(3)]
    # After a step and before one, each in a job of its own.
    found = {"after": None, "before": None}
    for when in found:
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2})
        checkpoint, train = started()
        if when == "after":
            train()
        assert smp.CheckpointManager(checkpoint, folder, checkpoint_name="mine").restore() == path
        found[when] = [float(train()) for _ in range(3)]
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


def test_a_checkpoint_is_that_of_one_process(ranks):
    folder, found_by_rank = ranks
    for _, (expected, found, plain, path, kept), _ in found_by_rank:
        assert path == str(folder / "mine-3")
        assert kept == [str(folder / "mine-2"), path]
        assert found == {"after": expected, "before": expected}
        assert plain == pytest.approx(expected, abs=1e-6)
    assert sorted(each.name for each in folder.iterdir() if each.suffix == ".index") == [
        "mine-2.index",
        "mine-3.index",
    ]
