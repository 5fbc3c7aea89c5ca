"""Training with `horovod.tensorflow`: variables, objects, tapes, batch normalization, and optimizers of TensorFlow 1.

``python tests/multiproc/horovod/test_tensorflow_training.py`` runs the checks on 2, 3 and 4 ranks.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, run_ranks
from support.horovod_ranks import ENV, raises, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


def variables_and_objects():
    tf, hvd, rank, size = start("tensorflow")
    variables = [tf.Variable([float(rank), 1.0]), tf.Variable(rank), tf.Variable([rank == 0])]
    hvd.broadcast_variables(variables, 0)
    assert [variable.numpy().tolist() for variable in variables] == [[0.0, 1.0], 0, [True]]
    big = [tf.Variable(tf.fill([1000], float(rank))), tf.Variable(tf.fill([3], rank))]
    kept = big[0].read_value()
    values = hvd.broadcast_(big, size - 1)
    assert float(values[0][0]) == float(big[0][0]) == size - 1
    # A value that was read before the broadcast does not change.
    assert float(kept[0]) == rank
    big[1].assign(tf.fill([3], rank + size - 1))
    hvd.broadcast_variables(big, 0, inplace=True)
    assert int(big[1][0]) == size - 1

    @tf.function
    def in_a_function():
        hvd.broadcast_variables(big, size - 1)

    big[0].assign(tf.fill([1000], float(rank)))
    in_a_function()
    assert float(big[0][0]) == size - 1
    obj = {"rank": rank, "of": [1, 2, 3]}
    assert hvd.broadcast_object(obj, root_rank=size - 1) == {"rank": size - 1, "of": [1, 2, 3]}
    assert hvd.broadcast_object_fn(0)(obj)["rank"] == 0
    assert hvd.allgather_object({"rank": rank}) == [{"rank": other} for other in range(size)]
    raises(RuntimeError, "does not support eager execution", lambda: hvd.broadcast_global_variables(0))
    v1 = tf.compat.v1
    for use_resource in (True, False):
        with tf.Graph().as_default():
            variable = v1.get_variable("v", initializer=tf.constant([float(rank), 2.0]), use_resource=use_resource)
            other = v1.get_variable("w", initializer=tf.constant([float(rank)]), use_resource=use_resource)
            in_place = hvd.broadcast_([other], size - 1)
            hook = hvd.BroadcastGlobalVariablesHook(0)
            send = hvd.broadcast_object_fn(0)
            with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                assert session.run(variable).tolist() == [0.0, 2.0]
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                assert session.run(in_place)[0].tolist() == [float(size - 1)]
                assert session.run(other).tolist() == [float(size - 1)]
                with session.as_default():
                    assert send({"rank": rank}) == {"rank": 0}
                    assert hvd.allgather_object(rank, name="objects") == list(range(size))
    with tf.Graph().as_default():
        kinds = [v1.get_variable(f"kind{kind}", initializer=1.0, use_resource=kind) for kind in (True, False)]
        raises(ValueError, "should be of the same kind", lambda: hvd.broadcast_(kinds, 0))


def tapes():
    tf, hvd, rank, size = start("tensorflow")
    variables = [tf.Variable([float(i + 1), 2.0]) for i in range(4)]
    average = sum(range(1, size + 1)) / size

    def loss(tape):
        with tape:
            return tf.add_n([tf.reduce_sum(variable * float(rank + 1)) for variable in variables[:3]])

    for options in (
        {},
        {"groups": 2},
        {"groups": [variables[:2]]},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
    ):

        def step(options=options):
            tape = hvd.DistributedGradientTape(tf.GradientTape(), **options)
            return tape.gradient(loss(tape), {"all": variables})["all"]

        for run in (step, tf.function(step))[: 1 if options else 2]:
            got = run()
            assert got[3] is None
            assert all(abs(gradient - average).numpy().max() < 1e-3 for gradient in got[:3]), (options, got)
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum)
    assert isinstance(tape, tf.GradientTape)
    y = loss(tape)
    assert tape.gradient(y, variables[0], use_generic_names=True).numpy().tolist() == [average * size] * 2
    tape.register_local_source(variables[1])
    local, reduced_pairs = tape.get_local_and_global_gradients(y, variables[:2])
    assert local[0][0] is variables[1]
    assert abs(local[0][1] - (rank + 1) / size).numpy().max() < 1e-6
    assert reduced_pairs[0][1].numpy().tolist() == [average * size] * 2
    if size > 1:
        with pytest.warns(DeprecationWarning, match="groups"):
            hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
    raises(
        ValueError,
        "groups should be a non-negative integer",
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=-1),
    )
    raises(
        ValueError,
        "not supported with op != Average",
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0),
    )
    raises(
        ValueError,
        "All local layers must be of",
        lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1]),
    )
    layer = tf.keras.layers.Dense(1, use_bias=False)
    other = tf.keras.layers.Dense(1, use_bias=False)
    x = tf.ones([1, 1]) * float(rank + 1)
    layer(x), other(x)
    tape = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer)
    with tape:
        y = layer(x) + other(x)
    mine, reduced = tape.gradient(y, [layer.trainable_weights[0], other.trainable_weights[0]])
    assert abs(float(mine[0, 0]) - (rank + 1) / size) < 1e-6
    assert abs(float(reduced[0, 0]) - average) < 1e-6
    # Embeddings.
    table = tf.Variable(tf.zeros([size + 1, 2]))
    for as_dense in (False, True):
        with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=as_dense) as tape:
            y = tf.reduce_sum(tf.gather(table, [rank, size]))
        got = tape.gradient(y, table)
        assert isinstance(got, tf.IndexedSlices) != as_dense
        assert abs(tf.convert_to_tensor(got)[:, 0].numpy() - ([1 / size] * size + [1.0])).max() < 1e-6


def optimizers_of_tensorflow1():
    tf, hvd, rank, size = start("tensorflow")
    v1 = tf.compat.v1
    average = sum(range(1, size + 1)) / size
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[1.0], use_resource=True)
        optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.9))
        assert optimizer.get_name() == "DistributedMomentumOptimizer"
        step = optimizer.minimize(tf.reduce_sum(variable * float(rank + 1)))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(step)
            assert abs(session.run(variable)[0] - (1 - average)) < 1e-5
        assert optimizer.get_slot_names() == ["momentum"]
        assert len(optimizer.variables()) == 1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[1.0], use_resource=True)
        global_step = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(
            v1.train.AdamOptimizer(0.1), backward_passes_per_step=3, average_aggregated_gradients=True
        )
        step = optimizer.minimize(tf.reduce_sum(variable * float(rank + 1)), global_step=global_step)
        assert len(v1.local_variables()) == 2
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            values = []
            for _ in range(6):
                session.run(step)
                values.append(float(session.run(variable)[0]))
            assert session.run(global_step) == 6
            assert values[0] == values[1] == 1.0
            assert values[2] == values[3] == values[4] < 1.0
            assert values[5] < values[4]
            assert abs(values[2] - 0.9) < 1e-4
    eager = v1.train.GradientDescentOptimizer(1.0)
    raises(
        ValueError,
        "is not yet supported for _LegacyOptimizer with eager execution",
        lambda: hvd.DistributedOptimizer(eager, backward_passes_per_step=2),
    )
    raises(
        ValueError,
        "op == Adasum is not supported yet with Keras",
        lambda: hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum),
    )
    variable = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(eager)
    optimizer.register_local_var(tf.Variable([1.0]))
    optimizer.apply_gradients(
        optimizer.compute_gradients(lambda: tf.reduce_sum(variable * float(rank + 1)), [variable])
    )
    assert abs(float(variable[0]) - (1 - average)) < 1e-5
    if size & (size - 1) == 0:
        for graph in (True, False):
            with tf.Graph().as_default() if graph else tf.init_scope():
                # Adasum sums orthogonal steps.
                variable = (
                    v1.get_variable(f"adasum{graph}", initializer=[0.0] * size, use_resource=True)
                    if graph
                    else tf.Variable([0.0] * size)
                )
                optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
                gradient = tf.one_hot(rank, size)
                if graph:
                    step = optimizer.apply_gradients([(gradient, variable)])
                    with v1.Session() as session:
                        session.run(v1.global_variables_initializer())
                        session.run(step)
                        values = session.run(variable).tolist()
                else:
                    optimizer.apply_gradients([(gradient, variable)])
                    values = variable.numpy().tolist()
                assert values == [-1.0] * size


def batch_normalization():
    import numpy as np

    tf, hvd, rank, size = start("tensorflow")
    images = np.random.RandomState(0).rand(3 * size * (size + 1) // 2, 4).astype(np.float32)
    first = 3 * rank * (rank + 1) // 2
    mine = tf.constant(images[first : first + 3 * (rank + 1)])
    layer = hvd.SyncBatchNormalization(axis=-1, momentum=0.5)
    plain = tf.keras.layers.BatchNormalization(axis=-1, momentum=0.5)
    assert layer.name.startswith("sync_batch_normalization")
    assert isinstance(layer, tf.keras.layers.BatchNormalization)
    # Two layers in one model.
    inputs = tf.keras.Input((4,))
    model = tf.keras.Model(inputs, hvd.SyncBatchNormalization()(hvd.SyncBatchNormalization()(inputs)))
    model(mine, training=True)
    for call in (layer, tf.function(layer)):
        with tf.GradientTape() as tape:
            tape.watch(mine)
            got = call(mine, training=True)
            loss = tf.reduce_sum(got * got * got)
        gradient = tape.gradient(loss, mine)
        whole = tf.constant(images)
        with tf.GradientTape() as tape:
            tape.watch(whole)
            expected = plain(whole, training=True)
            loss = tf.reduce_sum(expected * expected * expected)
        expected_gradient = tape.gradient(loss, whole)
        rows = slice(first, first + 3 * (rank + 1))
        assert abs(got - expected[rows]).numpy().max() < 1e-4
        assert abs(gradient - expected_gradient[rows]).numpy().max() < 1e-3
    assert abs(layer.moving_mean - plain.moving_mean).numpy().max() < 1e-5
    assert abs(layer.moving_variance - plain.moving_variance).numpy().max() < 1e-4
    for fused in (True, None):
        raises(ValueError, "does not support fused=True", lambda fused=fused: hvd.SyncBatchNormalization(fused=fused))


def late_gradients():
    """With local aggregation, a gradient that is None in the first pass is summed from the pass that has it."""
    tf, *_ = start("tensorflow")
    from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    one = tf.constant([1.0])
    helper = LocalGradientAggregationHelper(2, lambda gradients, variables: gradients)
    assert [value is None for value in helper.compute_gradients([one, None], variables)] == [False, True]
    assert [value.numpy().tolist() for value in helper.compute_gradients([one, one], variables)] == [[2.0], [1.0]]
    # After a reduction that has failed, the next sums begin.
    failures = [ValueError("ranks disagree")]

    def reduce(gradients, variables):
        if failures:
            raise failures.pop()
        return gradients

    helper = LocalGradientAggregationHelper(2, reduce)
    helper.compute_gradients([one, one], variables)
    raises(ValueError, "ranks disagree", lambda: helper.compute_gradients([one, one], variables))
    helper.compute_gradients([one, one], variables)
    assert [value.numpy().tolist() for value in helper.compute_gradients([one, one], variables)] == [[2.0], [2.0]]
    taken = []
    helper.apply_gradients(lambda: taken.append(True), lambda: taken.append(False))
    assert taken == [True]
    # A traced function cannot add a gradient later.
    helper = LocalGradientAggregationHelper(2, lambda gradients, variables: gradients)
    call = tf.function(helper.compute_gradients)
    call([one, None], variables)
    raises(ValueError, "has a gradient now, and had none", lambda: call([one, one], variables))


def mismatched_gradients():
    """One rank lacks one gradient, or all: all ranks raise, and the error names the rank and the variable."""
    tf, hvd, rank, size = start("tensorflow")
    if size == 1:
        return
    a, b = tf.Variable([1.0], name="a"), tf.Variable([1.0], name="b")
    losses = [lambda: a * b, lambda: a * 2.0, lambda: tf.constant([1.0])]

    def step(kind):
        with tf.GradientTape() as tape:
            loss = losses[kind]()
        tape = hvd.DistributedGradientTape(tape)
        return [0.0 if each is None else each for each in tape.gradient(loss, [a, b])]

    last = f"rank {size - 1} has"
    for run in (step, tf.function(step)):
        for kind in (0, 1, 2, 0):
            run(kind)
        for kind, text in ((1, f"{last} no gradient of `b:0`"), (2, f"{last} no gradient of `a:0`")):
            raises(
                tf.errors.FailedPreconditionError, text, lambda run=run, kind=kind: run(kind if rank == size - 1 else 0)
            )
            assert [float(each[0]) for each in run(0)] == [1.0, 1.0]


PARTS = (variables_and_objects, tapes, optimizers_of_tensorflow1, batch_normalization, late_gradients, mismatched_gradients)  # fmt: skip


def all_parts():
    """Runs all parts in one job, because ranks take long to start."""
    for part in PARTS:
        part()


@pytest.mark.timeout(420)
def test_training():
    """Runs all parts on two ranks; each rank asserts its results."""
    run_ranks(all_parts, 2, launcher=Forked("tensorflow"), env=ENV, timeout=400)


if __name__ == "__main__":
    for ranks in (2, 3, 4):
        run_ranks(all_parts, ranks, env=ENV, timeout=400)
        print(f"{ranks} ranks: all checks pass")
