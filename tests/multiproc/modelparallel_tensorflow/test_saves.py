"""Checkpoints of two partitions and two replicas: complete before they are published; failures raise on all ranks."""

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


def _saves(folder):
    import os
    import time

    import numpy as np
    import tensorflow as tf
    from tensorflow.python.ops import io_ops

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPCheckpointError
    from smdistributed.modelparallel.tensorflow.checkpoint import saving
    from smdistributed.modelparallel.tensorflow.partitioning import delayed_initialization

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

    # A checkpoint of an optimizer or a layer without the model contains the values of all partitions.
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

    # A restore reads only this rank's variables. While all variables are written to one file, other ranks' variables
    # take no device memory.
    plain_restore, names = io_ops.restore_v2, []

    def noting(prefix, tensor_names, *args):
        names.extend(tensor_names)
        return plain_restore(prefix, tensor_names, *args)

    io_ops.restore_v2 = noting
    both.restore(f"{folder}/both/ckpt-1").assert_consumed()
    io_ops.restore_v2 = plain_restore
    assert values(both.save(f"{folder}/again/ckpt")) == whole
    of_layers = [{name for name in each if "/one/" in name or "/two/" in name} for each in smp.allgather(names)]
    assert [len(each) for each in of_layers] == [2] * 4
    assert len(set.union(*of_layers)) == 4
    sizes = []

    def save_own_variables(store):
        keras.layers.Layer.save_own_variables(model.one, store)
        for each in (*model.one.variables, *model.two.variables):
            held = tf.raw_ops.ReadVariableOp(resource=delayed_initialization.handle_of(each), dtype=tf.float32)
            sizes.append((int(tf.size(held)), each.numpy().size))

    model.one.save_own_variables = save_own_variables
    model.save_weights(f"{folder}/held.weights.h5")
    assert sorted(sizes) == ([] if smp.rank() else [(0, 4), (0, 16), (4, 4), (12, 12)]), sizes
    other = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(5)])
    other(np.ones((1, 3)))
    if smp.rank() == 0:
        tf.train.Checkpoint(one=other.layers[0], two=other.layers[1]).write(f"{folder}/other")
    smp.barrier()
    with pytest.raises(ValueError, match="shape"):
        tf.train.Checkpoint(one=model.one, two=model.two).read(f"{folder}/other")

    # A checkpoint is complete before its callback is called and before an older one is deleted, however slow the
    # replica is that writes it.
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

    # A failing write and a failing callback on one rank raise on all ranks.
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
    # The sharded format cannot store an iterator.
    iterator = tf.train.Checkpoint(model=model, optimizer=optimizer, rows=iter(tf.data.Dataset.range(3)))
    sharded = smp.CheckpointManager(iterator, f"{folder}/sharded", format="sharded")
    refusals.append(refused(sharded.save))
    assert tf.train.latest_checkpoint(f"{folder}/plain") == kept[1]
    complete(manager.save())
    return refusals


def test_saves_of_replicas_and_parts(tmp_path):
    refusals = run_ranks(_saves, 4, str(tmp_path), launcher=Forked("tensorflow"), env=ENV, timeout=170)
    assert all(found == refusals[0] for found in refusals)
    unwritten, unnamed, unheld = refusals[0]
    assert "could not be written: rank " in unwritten
    assert "no space is left" in unwritten
    assert "rank 3: OSError" in unnamed
    assert "`rows/.ATTRIBUTES/ITERATOR_STATE`" in unheld
    assert "cannot be saved in shards" in unheld


def _optimizers(folder):
    """Saves optimizer states after three updates, and compares them by name with those of one process.

    The cases differ in how the optimizer is built and applied. Returns the largest differences, and errors of
    optimizers that are not supported.
    """
    import numpy as np
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUnsupportedError, SMPUsageError

    keras = tf.keras
    x = tf.constant(np.linspace(-1, 1, 12).reshape(4, 3), tf.float32)

    class Own(keras.optimizers.Optimizer):
        """An optimizer with a state variable that belongs to no model variable."""

        def build(self, variables):
            super().build(variables)
            self.state = self.add_variable([3], name="state")

        def update_step(self, gradient, variable, learning_rate=None):
            variable.assign_sub(0.1 * gradient)

    def made(base):
        class Model(base):
            def __init__(self, **options):
                super().__init__(**options)
                self.stops = False
                one, two = (keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
                self.one = keras.layers.Dense(4, "tanh", kernel_initializer=one, name="one")
                self.two = keras.layers.Dense(4, kernel_initializer=two, name="two")

            def call(self, x):
                hidden = self.one(x)
                return self.two(tf.stop_gradient(hidden) if self.stops else hidden)

        return Model()

    def values(path):
        names = [name for name, _ in tf.train.list_variables(path)]
        kept = [name for name in names if not name.startswith(("_CHECKPOINTABLE", "save_counter"))]
        return {name: tf.train.load_variable(path, name) for name in kept}

    def trained(case, base, make, path):
        model, optimizer = made(base), make()
        if base is not keras.Model:

            @smp.step
            def gradients(x, stops):
                model.stops = stops
                loss = tf.reduce_mean(tf.square(model(x)))
                return optimizer.get_gradients(loss, model.trainable_variables)

            def found():
                return [each and each.accumulate() for each in gradients(x, model.stops)]
        else:

            def found():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x)))
                return tape.gradient(loss, model.trainable_variables)

        if case == "built before":
            model.one.build((4, 3)), model.two.build((4, 4))
            optimizer.build(model.trainable_variables)
            if base is not keras.Model and hasattr(optimizer, "apply"):
                # All ranks must pass the same path, also before the model is partitioned.
                with pytest.raises(SMPUsageError, match="must pass the same path"):
                    model.save_weights(f"{folder}/{smp.rank()}.weights.h5")
                model.built = True
                model.save_weights(f"{folder}/before.weights.h5")
                model.load_weights(f"{folder}/before.weights.h5")
        for step in range(3):
            # With `stops`, the first partition has no gradients.
            model.stops = case == "averaged alone" and step > 0
            gradients_here = found()
            if case == "built after" and step == 0:
                optimizer.build(model.trainable_variables)
            if case == "apply":
                optimizer.apply(gradients_here, model.trainable_variables)
            elif case == "apply to its own":
                if step == 0:
                    optimizer.build(model.trainable_variables)
                optimizer.apply(gradients_here)
            else:
                optimizer.apply_gradients(zip(gradients_here, model.trainable_variables, strict=True))
        return tf.train.Checkpoint(model=model, optimizer=optimizer).save(path)

    cases = {"built after": keras.optimizers.Adam, "built before": keras.optimizers.Adam}
    if hasattr(keras.optimizers.Adam, "apply"):
        cases |= {"apply": keras.optimizers.Adam, "apply to its own": keras.optimizers.Adam}
        cases["in lists"] = lambda: keras.optimizers.Adafactor(0.1)
        # Three steps: the last one is the first of two that are accumulated.
        cases["accumulated"] = lambda: keras.optimizers.Adam(gradient_accumulation_steps=2, weight_decay=0.1)
    else:
        cases["legacy"] = keras.optimizers.legacy.Adam
    for overwrite in (None, 2):
        averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": overwrite}
        cases[f"averaged {overwrite}"] = functools.partial(keras.optimizers.Adam, 0.1, **averages)
    cases["averaged alone"] = cases["averaged 2"]
    differences = {}
    for case, make in cases.items():
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2})
        path = trained(case, smp.DistributedModel, make, f"{folder}/{case}")
        smp.barrier()
        ours, plain = values(path), values(trained(case, keras.Model, make, f"{folder}/plain-{smp.rank()}-{case}"))
        assert list(ours) == list(plain), case
        differences[case] = max(float(np.max(np.abs(ours[name] - value))) for name, value in plain.items())

    # The whole model in Keras' file formats: all ranks call the save, one writes.
    model, ours = smp.state.model, values(path)

    def check(other):
        assert len(other.trainable_variables) == 4
        for each in other.trainable_variables:
            value = tf.convert_to_tensor(each).numpy()
            assert any(value.shape == one.shape and np.array_equal(value, one) for one in ours.values()), each.name

    model.save_weights(f"{folder}/whole.weights.h5")
    other = made(keras.Model)
    other(x)
    other.load_weights(f"{folder}/whole.weights.h5")
    check(other)
    expected = other(x)
    model.save_model(f"{folder}/served")
    model.export(f"{folder}/exported")
    exported = tf.saved_model.load(f"{folder}/exported")
    np.testing.assert_allclose(exported.serve(x), expected, atol=1e-6)
    model.save(f"{folder}/whole.keras")
    check(keras.models.load_model(f"{folder}/whole.keras", custom_objects={"Model": type(other)}))
    for write in (tf.saved_model.save, keras.models.save_model):
        with pytest.raises(SMPUnsupportedError, match="of one partition"):
            write(model, f"{folder}/{smp.rank()}.keras")
    with pytest.raises(SMPUsageError, match="must pass the same path"):
        model.save_weights(f"{folder}/{smp.rank()}.weights.h5")
    with pytest.raises(SMPCheckpointError, match="rank 0: "):
        model.save_model("/proc/no such folder")
    assert sorted(smp.allgather(sum(np.size(each) for each in model.get_weights()))) == [16, 20]

    def refused(make):
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2})
        try:
            trained("", smp.DistributedModel, make, f"{folder}/refused")
        except Exception as error:
            return type(error).__name__, str(error)

    refusals = []
    if hasattr(keras.optimizers.Adam, "apply"):
        refusals.append(refused(lambda: Own(0.1)))
        refusals.append(refused(lambda: keras.optimizers.SGD(gradient_accumulation_steps=2, global_clipnorm=1.0)))
        # A variable that exists on one rank only is an error.
        lonely = tf.train.Checkpoint(model=smp.state.model, **{f"of_{smp.rank()}": tf.Variable(1.0)})
        with pytest.raises(SMPCheckpointError, match=r"`of_0/.*is there on rank 0 and not on rank 1"):
            lonely.save(f"{folder}/lonely")
    return differences, refusals


def _check_optimizers(ranks, expected_cases, refusals):
    for differences, refused in ranks:
        assert set(differences) == expected_cases
        assert all(each < 1e-5 for each in differences.values()), differences
        for (kind, text), (found, error) in zip(refusals, refused, strict=True):
            assert kind == found, refused
            assert text in error, refused


@pytest.mark.more
def test_states_of_optimizers_are_whole(tmp_path):
    expected_cases = {
        "built after",
        "built before",
        "apply",
        "apply to its own",
        "in lists",
        "accumulated",
        "averaged None",
        "averaged 2",
        "averaged alone",
    }
    refusals = [
        ("SMPCheckpointError", "is not known"),
        ("SMPUnsupportedError", "accumulat"),
    ]
    _check_optimizers(
        run_ranks(_optimizers, 2, str(tmp_path), launcher=Forked("tensorflow"), env=ENV, timeout=170),
        expected_cases,
        refusals,
    )


def _keras_2(folder):
    from support.keras_models import compare

    cases = ("residual", 4, "simple", "get"), ("words", 2, "zero_bubble", "tape")
    return _optimizers(folder), [compare(name, "float64", 2, *case) for name, *case in cases]


@pytest.mark.more
def test_keras_2(tmp_path):
    """tf_keras: optimizer states, and two of the models of `support.keras_models`, compared with one process."""
    ranks = run_ranks(_keras_2, 2, str(tmp_path), env={**ENV, "TF_USE_LEGACY_KERAS": "1"}, timeout=170)
    expected_cases = {"built after", "built before", "legacy", "averaged None", "averaged 2", "averaged alone"}
    _check_optimizers([found for found, _ in ranks], expected_cases, [])
    for _, models in ranks:
        assert all(difference < 1e-10 and variables > 0 for difference, variables in models), models
