"""Continuing a job of two partitions: checkpoints restored before the first step, failed hooks, and new sessions."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from support import Forked, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(180),
]


def _job(**options):
    """Starts a session with a model; returns its checkpoint, a training step on the next rows, and the update
    function."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    keras = tf.keras

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = (
                keras.layers.Dense(4, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=seed))
                for seed in range(2)
            )
            self.drop = keras.layers.Dropout(0.5, seed=1)

        def call(self, x, training=True):
            return self.drop(self.two(self.one(x)), training=training)

    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, **options})
    model, optimizer, steps = Model(), keras.optimizers.Adam(0.05), tf.Variable(0)
    rows = iter(tf.data.Dataset.range(100))
    saved = tf.train.Checkpoint(model=model, optimizer=optimizer, steps=steps, rows=rows)

    @smp.step
    def gradients(x):
        loss = tf.reduce_mean(tf.square(model(x, training=False)))
        return optimizer.get_gradients(loss, model.trainable_variables), loss

    def update(x):
        found, loss = gradients(x)
        found = [each.accumulate() for each in found]
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    def train():
        x = tf.reshape(tf.cast(next(rows), tf.float32) + tf.range(16, dtype=tf.float32) / 16, [4, 4])
        loss = update(x)
        steps.assign_add(1)
        return float(loss)

    return saved, train, update


def _check_restores(folder):
    import pathlib

    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPCheckpointError

    for form in ("tensorflow", "sharded"):
        saved, train, _ = _job()
        # The sharded format stores variables only, so no iterator.
        if form == "sharded":
            saved = tf.train.Checkpoint(model=saved.model, optimizer=saved.optimizer, steps=saved.steps)
        options = {"format": form, "step_counter": saved.steps, "checkpoint_interval": 2}
        manager = smp.CheckpointManager(
            saved, f"{folder}/{form}", init_fn=functools.partial(saved.steps.assign, 1), **options
        )
        assert manager.restore_or_initialize() is None
        before = [train(), manager.save() is None, train(), manager.save() is None, train(), manager.save() is None]
        assert before[1::2] == [False, True, False]
        after = train()

        saved, train, _ = _job()
        if form == "sharded":
            saved = tf.train.Checkpoint(model=saved.model, optimizer=saved.optimizer, steps=saved.steps)
        options["step_counter"] = saved.steps
        manager = smp.CheckpointManager(saved, f"{folder}/{form}", **options)
        manager.restore(pathlib.Path(manager.latest_checkpoint))
        # Variables outside the model are restored before the first step.
        assert (int(saved.steps), int(saved.save_counter)) == (4, 2), form
        assert manager.save() is None
        if form == "sharded":
            continue
        assert train() == after
        assert int(saved.steps) == 5

    # Folders of their own, as on different hosts, of which one has no checkpoint.
    own = f"{folder}/tensorflow" if smp.rank() == 0 else f"{folder}/elsewhere"
    manager = smp.CheckpointManager(saved, own, **{**options, "format": "tensorflow"})
    with pytest.raises(SMPCheckpointError, match=r"rank 0 finds 'ckpt-[0-9]+' and rank 1 finds None"):
        manager.restore()

    # `tf.train.Checkpoint.restore` before the first step, and a hook that fails in its first call.
    saved, _, update = _job()
    with pytest.raises(tf.errors.NotFoundError):
        saved.restore(f"{folder}/none-1")
    status = saved.restore(f"{folder}/tensorflow/ckpt-2")
    status.assert_consumed().expect_partial().run_restore_ops()
    fails = [tf.errors.DataLossError(None, None, "once")]

    @smp.register_post_partition_hook
    def hook():
        if fails:
            raise fails.pop()

    whole = tf.function(lambda x: update(x))
    with pytest.raises(tf.errors.DataLossError, match="once"):
        whole(tf.ones([4, 4]))
    losses = [float(whole(tf.ones([4, 4]))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]

    # A variable outside the model is saved once, so different values on the ranks raise. Random generators may differ.
    draws, outside = tf.random.Generator.from_seed(smp.rank()), tf.keras.layers.Dropout(0.1, seed=smp.rank())
    tf.train.Checkpoint(model=saved.model, draws=draws, outside=outside).save(f"{folder}/draws")
    averages = [tf.Variable(each) for each in saved.model.trainable_variables]
    with pytest.raises(SMPCheckpointError, match=r"`averages/0/.*other values on rank 1"):
        tf.train.Checkpoint(model=saved.model, averages=averages).save(f"{folder}/averages")


def test_restoring_before_the_first_step(tmp_path):
    run_ranks(_check_restores, 2, str(tmp_path), launcher=Forked("tensorflow"), env=ENV, timeout=170)


def _check_deletions(folder):
    """Ranks whose clocks disagree about the age of checkpoints keep the same checkpoints."""
    import os
    import time

    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    saved, train, _ = _job()
    train()
    manager = tf.train.CheckpointManager(saved, folder, 1, keep_checkpoint_every_n_hours=1e-9)
    if smp.rank() == 1:
        # By rank 1's clock, no checkpoint is old enough to be kept.
        manager._last_preserved_timestamp = time.time() + 3600
    for _ in range(6):
        manager.save()
    smp.barrier()
    kept = sorted(name for name in os.listdir(folder) if name.endswith(".index"))
    assert len(kept) == 6, kept
    assert [os.path.basename(each) for each in manager.checkpoints] == ["ckpt-6"]

    # The served model runs with `training=False`, although `call` has the default True: no dropout.
    saved.model.save_model(f"{folder}/served")
    smp.barrier()
    serve = tf.saved_model.load(f"{folder}/served").signatures["serving_default"]
    x = tf.ones([2, 4])
    one, other = (serve(x)["output_0"].numpy() for _ in range(2))
    assert (one == other).all()
    assert (one != 0).all()


def test_ranks_keep_the_same_checkpoints(tmp_path):
    run_ranks(_check_deletions, 2, str(tmp_path), launcher=Forked("tensorflow"), env=ENV, timeout=170)


def _check_values():
    import collections

    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPUsageError

    saved, *_ = _job()

    @smp.step
    def several(x):
        y = saved.model(x, training=False)
        count = tf.cast(tf.reduce_sum(tf.abs(y)) < 0, tf.int32) - tf.cast(tf.reduce_sum(x) < 3, tf.int32) - 1
        return collections.OrderedDict(two=count, one=y)

    found = several(tf.concat([tf.zeros([2, 4]), tf.ones([2, 4])], 0))
    assert type(found) is collections.OrderedDict
    assert list(found) == ["two", "one"]
    # Integer means are rounded as in TensorFlow's reduce_mean.
    assert [int(each) for each in found["two"].outputs] == [-2, -1]
    assert int(found["two"].reduce_mean()) == int(tf.reduce_mean(found["two"].stack())) == -1

    # An optimizer of one layer, which only one of the ranks holds.
    of_part = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    of_part.build(saved.model.two.trainable_variables)
    # Iterations, learning rate and two slots.
    assert smp.allgather(len(of_part.variables)) == [4, 4]

    # A Horovod session over all ranks would average gradients of different partitions.
    import horovod.tensorflow as hvd

    hvd.init()
    with pytest.raises(SMPUsageError, match=r"Horovod's world is the ranks \[0, 1\].*have to be \[[01]\]"):
        _job(horovod=True)
    smp.shutdown()


def test_step_outputs_and_horovod_sessions():
    run_ranks(_check_values, 2, launcher=Forked("tensorflow"), env=ENV, timeout=170)
