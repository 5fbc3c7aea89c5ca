"""Checkpoints of two partitions with two replicas: nothing is lost, named too early, or waited for in vain."""

from __future__ import annotations

import importlib.util

import pytest

from support import Forked, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(180),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""


def _saves(folder):
    import os
    import time

    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPCheckpointError
    from smdistributed.modelparallel.tensorflow import saving

    keras = tf.keras

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Dense(4, "tanh"), keras.layers.Dense(4)

        def call(self, x):
            return self.two(self.one(x))

    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    model, optimizer = Model(), keras.optimizers.Adam(0.05)

    @smp.step
    def gradients(x):
        loss = tf.reduce_mean(tf.square(model(x)))
        return optimizer.get_gradients(loss, model.trainable_variables), loss

    found, _ = gradients(tf.constant(np.linspace(-1, 1, 12).reshape(4, 3), tf.float32))
    optimizer.apply_gradients(zip([each.accumulate() for each in found], model.trainable_variables, strict=True))
    both = tf.train.Checkpoint(model=model, optimizer=optimizer)

    # Parts of what is divided are whole in checkpoints without the model, too.
    def values(path):
        read = {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)}
        held = {name: value for name, value in read.items() if not name.startswith(("_CHECKPOINTABLE", "save_counter"))}
        return {(value.shape, value.tobytes()) for value in held.values()}

    whole = values(both.save(f"{folder}/both/ckpt"))
    assert values(smp.CheckpointManager(tf.train.Checkpoint(optimizer=optimizer), f"{folder}/managed").save()) == whole
    assert values(tf.train.Checkpoint(optimizer=optimizer).save(f"{folder}/optimizer/ckpt")) == whole
    for name, layer, rows in (("one", model.one, 3), ("two", model.two, 4)):
        of_layer = values(tf.train.Checkpoint(layer=layer).save(f"{folder}/{name}/ckpt"))
        assert of_layer < whole
        assert {shape for shape, _ in of_layer} == {(rows, 4), (4,)}

    # What is named, and what takes an older one's place, is complete, however slow the replica is that writes.
    plain_part, writes = saving._write_part, smp.dp_rank() == 0

    def slow(*args):
        time.sleep(0.5)
        return plain_part(*args)

    def complete(path):
        assert os.path.exists(f"{path}.index")

    saving._write_part = slow
    options = tf.train.CheckpointOptions(experimental_write_callbacks=[complete])
    both.save(f"{folder}/slow/ckpt", options=options)
    manager = tf.train.CheckpointManager(both, f"{folder}/plain", max_to_keep=1)
    kept = [manager.save(), manager.save()]
    assert [os.path.exists(f"{path}.index") for path in kept] == [False, True]
    assert tf.train.latest_checkpoint(f"{folder}/plain") == kept[1]

    # A rank that cannot write, or cannot name, is an error on all.
    def failing(*_):
        raise OSError(28, "no space is left")

    def refused(call):
        with pytest.raises(SMPCheckpointError) as caught:
            call()
        return str(caught.value)

    if writes and smp.pp_rank() == 1:
        saving._write_part = failing
    refusals = [refused(manager.save)]
    saving._write_part = plain_part
    callbacks = [failing] if smp.rank() == 3 else []
    options = tf.train.CheckpointOptions(experimental_write_callbacks=callbacks)
    refusals.append(refused(lambda: both.save(f"{folder}/unnamed/ckpt", options=options)))
    # One partition alone would have had to write this.
    iterator = tf.train.Checkpoint(model=model, optimizer=optimizer, rows=iter(tf.data.Dataset.range(3)))
    sharded = smp.CheckpointManager(iterator, f"{folder}/sharded", format="sharded")
    refusals.append(refused(sharded.save))
    assert tf.train.latest_checkpoint(f"{folder}/plain") == kept[1]
    complete(manager.save())
    return refusals


def test_saves_of_replicas_and_parts(tmp_path):
    refusals = run_ranks(_saves, 4, str(tmp_path), launcher=Forked("tensorflow"), env=_ENV, timeout=170)
    assert all(found == refusals[0] for found in refusals)
    unwritten, unnamed, unheld = refusals[0]
    assert "could not be written: rank " in unwritten
    assert "no space is left" in unwritten
    assert "rank 3: OSError" in unnamed
    assert "`rows/.ATTRIBUTES/ITERATOR_STATE`" in unheld
    assert "is no variable that shards can hold" in unheld
