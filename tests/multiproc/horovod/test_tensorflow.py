"""Collectives of `horovod.tensorflow`: values, errors, gradients, graphs, names, joins, process sets, sparse tensors.

``python tests/multiproc/horovod/test_tensorflow.py`` runs the checks on 2, 3 and 4 ranks.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, run_ranks
from support.horovod_ranks import ENV, raises, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


def reductions():
    tf, hvd, rank, size = start("tensorflow")
    total = sum(range(1, size + 1))
    ints = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64]
    floats = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
    for dtype in ints + floats:
        for shape in [(), (0,), (3, 5)]:
            x = tf.cast(tf.fill(shape, rank + 1), dtype)
            got = hvd.allreduce(x, op=hvd.Sum)
            assert got.dtype == dtype
            assert got.shape == x.shape
            assert (got.numpy() == tf.cast(tf.fill(shape, total), dtype).numpy()).all()
            average = tf.cast(tf.fill(shape, total // size if dtype in ints else total / size), dtype)
            assert (hvd.allreduce(x).numpy() == average.numpy()).all()
        assert int(hvd.allreduce(x, op=hvd.Min)[0, 0]) == 1
        assert int(hvd.allreduce(x, op=hvd.Max)[0, 0]) == size
        product = 1
        for factor in range(1, size + 1):
            product *= factor
        assert int(hvd.allreduce(x, op=hvd.Product)[0, 0]) == product
    x = tf.range(6.0) + rank
    sums = size * tf.range(6.0) + sum(range(size))
    scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert abs(scaled - sums * 1.5).numpy().max() < 1e-5
    whole = hvd.allreduce(tf.constant([7, -7]) * (rank + 1), op=hvd.Sum, prescale_factor=0.5)
    halves = sum(int(7 * (other + 1) * 0.5) for other in range(size))
    assert whole.numpy().tolist() == [halves, -halves]
    half = hvd.allreduce(tf.constant([1.5]), compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32
    assert float(half[0]) == 1.5
    raises(ValueError, "supersedes average", lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
    with pytest.warns(DeprecationWarning, match="average"):
        hvd.allreduce(x, average=False)
    raises(ValueError, "is not supported", lambda: hvd.allreduce(tf.constant(True)))
    group = hvd.grouped_allreduce([x, tf.constant([rank]), tf.constant(1.0)], op=hvd.Sum)
    assert group[1].numpy().tolist() == [sum(range(size))]
    assert hvd.grouped_allreduce([]) == []
    if size & (size - 1):
        raises(NotImplementedError, "non-power of 2", lambda: hvd.allreduce(x, op=hvd.Adasum))
    else:
        same = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Adasum)
        assert same.numpy().tolist() == [1.0, 2.0]
        ortho = hvd.allreduce(tf.one_hot(rank, size), op=hvd.Adasum)
        assert ortho.numpy().tolist() == [1.0] * size


def data_movement():
    tf, hvd, rank, size = start("tensorflow")
    for dtype in [
        tf.uint8,
        tf.int8,
        tf.uint16,
        tf.int16,
        tf.int32,
        tf.int64,
        tf.float16,
        tf.bfloat16,
        tf.float32,
        tf.bool,
    ]:
        x = tf.cast(tf.fill([rank + 1, 2], rank % 2), dtype)
        got = hvd.allgather(x)
        expected = tf.concat([tf.cast(tf.fill([other + 1, 2], other % 2), dtype) for other in range(size)], 0)
        assert got.dtype == dtype
        assert (got.numpy() == expected.numpy()).all()
        root = hvd.broadcast(tf.cast(tf.fill([3], rank % 2), dtype), size - 1)
        assert (root.numpy() == tf.cast(tf.fill([3], (size - 1) % 2), dtype).numpy()).all()
    assert hvd.allgather(tf.zeros([0 if rank else 2, 3])).shape == (2, 3)
    first, second = hvd.grouped_allgather([tf.fill([rank, 1], rank), tf.fill([1], float(rank))])
    assert first.shape == (sum(range(size)), 1)
    assert second.numpy().tolist() == [float(other) for other in range(size)]
    # Uneven splits, rows that are left over, and equal parts.
    x = tf.range(size + 2) + 100 * rank
    splits = tf.constant([2 if other == 0 else 1 for other in range(size)])
    output, received = hvd.alltoall(x, splits)
    assert received.dtype == tf.int32
    assert received.numpy().tolist() == [2 if rank == 0 else 1] * size
    assert int(output[0]) == (0 if rank == 0 else rank + 1)
    equal = hvd.alltoall(tf.range(size * 2) + 100 * rank)
    assert equal.numpy().tolist() == [100 * other + 2 * rank + i for other in range(size) for i in range(2)]
    invalid = tf.errors.InvalidArgumentError
    odd = tf.zeros([size + 1])
    raises(invalid, "not an even multiple of the number of workers", lambda: hvd.alltoall(odd))
    raises(invalid, "greater than the first dimension", lambda: hvd.alltoall(odd, tf.fill([size], 9)))
    raises(invalid, "does not equal number of workers", lambda: hvd.alltoall(odd, tf.fill([size + 1], 0)))
    raises(invalid, "32-bit integer", lambda: hvd.alltoall(odd, tf.zeros([size], tf.int64)))
    raises(invalid, "1D splits", lambda: hvd.alltoall(odd, tf.zeros([1, size], tf.int32)))
    raises(invalid, "rank-zero tensor", lambda: hvd.allgather(tf.constant(1.0)))
    raises(invalid, "does not support scalar inputs", lambda: hvd.reducescatter(tf.constant(1.0)))
    raises(tf.errors.AbortedError, "only supports AVERAGE and SUM", lambda: hvd.reducescatter(odd, op=hvd.Min))
    # The first ranks get one row more.
    x = tf.ones([size + 1, 2]) * float(rank + 1)
    mine = hvd.reducescatter(x, op=hvd.Sum)
    assert mine.shape == (2 if rank == 0 else 1, 2)
    assert float(mine[0, 0]) == sum(range(1, size + 1))
    averages = hvd.grouped_reducescatter([x, tf.zeros([0, 3])])
    assert averages[1].shape == (0, 3)
    assert abs(float(averages[0][0, 0]) - (size + 1) / 2) < 1e-6
    hvd.barrier()
    raises(invalid, "received invalid root rank", lambda: hvd.broadcast(x, size))


def graphs():
    tf, hvd, rank, size = start("tensorflow")

    # Each rank adds the operations to its graph in a different order.
    @tf.function
    def shuffled(x):
        results = {}
        for place in range(6):
            number = (place + rank) % 6
            results[number] = hvd.allreduce(x * (number + 1), op=hvd.Sum, name=f"shuffled.{number}")
        return [results[number] for number in range(6)]

    for step in range(3):
        got = shuffled(tf.constant([float(rank + step)]))
        total = sum(other + step for other in range(size))
        assert [float(one[0]) for one in got] == [float(total * (number + 1)) for number in range(6)]

    # Scopes that differ between ranks.
    @tf.function
    def scoped(x):
        with tf.name_scope(f"scope_of_rank_{rank}"):
            gathered_ranks = hvd.allgather(x, name="gathered", ignore_name_scope=True)
            reduced = hvd.allreduce(x, op=hvd.Sum, name="reduced", ignore_name_scope=True)
            return gathered_ranks, reduced, hvd.broadcast(x, 0, name="sent", ignore_name_scope=True)

    gathered_ranks, reduced, sent = scoped(tf.constant([rank]))
    assert gathered_ranks.numpy().tolist() == list(range(size))
    assert reduced.numpy().tolist() == [sum(range(size))]
    assert sent.numpy().tolist() == [0]

    # A collective whose result is unused still runs; one on a constant is not folded when the graph is optimized; the
    # number of gathered rows is unknown in the graph.
    @tf.function
    def unused(x):
        if rank == 0:
            hvd.allreduce(x, name="unused")
        else:
            x = hvd.allreduce(x, name="unused")
        constant = hvd.allreduce(tf.constant(2.0), op=hvd.Sum, name="constant")
        scattered = hvd.reducescatter(tf.zeros([2 * size, 3]), name="scattered")
        assert scattered.shape == (2, 3)
        gathered = hvd.allgather(x, name="rows")
        assert gathered.shape.as_list() == [None]
        received = hvd.alltoall(tf.zeros([size]), tf.ones([size], tf.int32), name="exchanged")[1]
        assert received.shape == (size,)
        return (
            constant,
            hvd.size_op(),
            hvd.rank_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        )

    for _ in range(2):
        numbers = [int(number) for number in unused(tf.constant([1.0]))]
        assert numbers == [2 * size, size, rank, rank, size, 1]

    @tf.function
    def attributes(x):
        hvd.allreduce(x, op=hvd.Max, prescale_factor=1.0, name="attributed")
        return x

    concrete = attributes.get_concrete_function(tf.TensorSpec([2], tf.float32))
    node = concrete.graph.get_operation_by_name("attributed")
    assert node.type == "HorovodAllreduce"
    assert node.get_attr("reduce_op") == hvd.Max
    assert node.get_attr("process_set_id") == 0


def gradients():
    tf, hvd, rank, size = start("tensorflow")

    def gradient(call, x, seed=None, graph=False):
        def compute(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
                loss = tf.reduce_sum(y * (1.0 if seed is None else seed))
            return tape.gradient(loss, x)

        eager = compute(x).numpy()
        # Only some cases are traced, because tracing is slow.
        assert not graph or (tf.function(compute)(x).numpy() == eager).all()
        return eager

    x = tf.ones([size, 2]) * float(rank + 1)
    ranks = sum(other + 1.0 for other in range(size))
    mine = tf.constant(float(rank + 1))
    assert (gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, name="g.sum"), x, graph=True) == size).all()
    assert abs(gradient(lambda x: hvd.allreduce(x, name="g.average"), x, mine) - ranks / size).max() < 1e-6
    scaled = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, name="g.scaled"), x)
    assert (scaled == 2 * size).all()
    grouped = gradient(lambda x: tf.add_n(hvd.grouped_allreduce([x, x], op=hvd.Sum, name="g.grouped")), x)
    assert (grouped == 2 * size).all()
    # The gradient of an all-gather: this rank's rows of the averaged gradients.
    rows = tf.ones([rank + 1, 1])
    upstream = tf.range(float(sum(range(1, size + 1))))[:, None]
    start_row = sum(range(1, rank + 1))
    got = gradient(lambda x: hvd.allgather(x, name="g.gathered"), rows, upstream, graph=True)
    assert got[:, 0].tolist() == [float(start_row + i) for i in range(rank + 1)]
    got = gradient(lambda x: hvd.grouped_allgather([x, 2.0 * x], name="g.gathered2")[1], rows, upstream)
    assert got[:, 0].tolist() == [2.0 * (start_row + i) for i in range(rank + 1)]
    got = gradient(lambda x: hvd.broadcast(x, 0, name="g.sent"), x, mine, graph=True)
    assert abs(got - (ranks / size if rank == 0 else 0.0)).max() < 1e-6
    got = gradient(lambda x: hvd.alltoall(x, tf.ones([size], tf.int32), name="g.exchanged")[0], x, mine, graph=True)
    assert got[:, 0].tolist() == [other + 1.0 for other in range(size)]
    got = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum, name="g.scattered"), x, mine)
    assert got[:, 0].tolist() == [size * (other + 1.0) for other in range(size)]
    got = gradient(lambda x: hvd.reducescatter(x, name="g.scattered2", prescale_factor=3.0), x, mine, True)
    assert abs(got[:, 0] - [3 * (other + 1.0) for other in range(size)]).max() < 1e-5
    got = gradient(lambda x: hvd.grouped_reducescatter([x])[0], x, mine)
    assert got[:, 0].tolist() == [other + 1.0 for other in range(size)]


def duplicates():
    """Two threads call the same name at once: the second call raises, and the first one completes."""
    tf, hvd, rank, size = start("tensorflow")
    if size == 1:
        return
    x = tf.constant([1.0])

    @tf.function
    def in_a_graph(x):
        return hvd.allreduce(x, op=hvd.Sum, name="twice")

    for call in (in_a_graph, lambda x: hvd.allreduce(x, op=hvd.Sum, name="twice")):
        outcomes = queue.Queue()

        def attempt(call=call, outcomes=outcomes):
            try:
                outcomes.put(float(call(x)[0]))
            except tf.errors.InvalidArgumentError as error:
                outcomes.put(str(error))

        if rank == 0:
            for _ in range(2):
                threading.Thread(target=attempt, daemon=True).start()
            assert "with the same name as another tensor that is currently being processed" in outcomes.get(timeout=60)
            # The other ranks make their call only after this broadcast.
            hvd.broadcast(x, 0, name="answer")
        else:
            hvd.broadcast(x, 0, name="answer")
            attempt()
        assert outcomes.get(timeout=60) == size


def mismatches():
    tf, hvd, rank, size = start("tensorflow")
    if size == 1:
        return
    last = rank == size - 1
    failed = tf.errors.FailedPreconditionError
    x = tf.zeros([2, 3])
    other = tf.zeros([2, 4])
    raises(
        failed, "Mismatched data types: One rank had type", lambda: hvd.allreduce(tf.cast(x, tf.int32) if last else x)
    )
    raises(
        failed,
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape",
        lambda: hvd.allreduce(other if last else x),
    )
    raises(failed, "Mismatched BROADCAST tensor shapes", lambda: hvd.broadcast(other if last else x, 0))
    raises(failed, "Mismatched REDUCESCATTER tensor shapes", lambda: hvd.reducescatter(other if last else x))
    raises(failed, "sent a tensor of rank", lambda: hvd.allgather(x[0] if last else x))
    raises(failed, "sent a tensor with dimension", lambda: hvd.allgather(other if last else x))
    splits = tf.constant([2] + [0] * (size - 1))
    raises(failed, "sent a tensor with dimension", lambda: hvd.alltoall(other if last else x, splits))
    raises(failed, "prescale and/or postscale factors", lambda: hvd.allreduce(x, prescale_factor=2.0 if last else 1.0))
    raises(failed, "Mismatched reduction operation", lambda: hvd.allreduce(x, op=hvd.Min if last else hvd.Max))
    raises(failed, "root ranks: One rank specified root rank", lambda: hvd.broadcast(x, 1 if last else 0))

    def different():
        return hvd.allgather(x, name="same") if last else hvd.allreduce(x, name="same")

    raises(failed, "Mismatched operations: One rank did an", different)

    @tf.function
    def in_a_graph():
        return hvd.allreduce(other if last else x, name="in_a_graph")

    raises(failed, "Mismatched ALLREDUCE tensor shapes", in_a_graph)
    # The names can be used again, and the session is usable.
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="same")) == size


def sparse():
    tf, hvd, rank, size = start("tensorflow")
    slices = tf.IndexedSlices(tf.fill([2, 3], float(rank + 1)), tf.constant([rank, 0]), tf.constant([size, 3]))
    dense = tf.convert_to_tensor(slices)
    for op in (hvd.Sum, hvd.Average):
        got = hvd.allreduce(slices, op=op)
        assert isinstance(got, tf.IndexedSlices)
        assert got.values.shape == (2 * size, 3)
        assert abs(tf.convert_to_tensor(got) - hvd.allreduce(dense, op=op)).numpy().max() < 1e-6
    # Averages of integers are not truncated.
    whole = tf.IndexedSlices(tf.constant([[rank + 1]]), tf.constant([0]), tf.constant([1, 1]))
    got = hvd.allreduce(whole)
    assert got.values.dtype == tf.float64
    assert got.values.numpy().ravel().tolist() == [(other + 1) / size for other in range(size)]
    assert hvd.allreduce(whole, op=hvd.Sum).values.dtype == tf.int32
    mixed = hvd.grouped_allreduce([dense, slices, dense + 1.0], op=hvd.Sum)
    assert isinstance(mixed[1], tf.IndexedSlices)
    assert abs(tf.convert_to_tensor(mixed[1]) - mixed[0]).numpy().max() < 1e-6
    assert abs(mixed[2] - mixed[0] - size).numpy().max() < 1e-6
    for wrong in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
        raises(NotImplementedError, "sparse", lambda wrong=wrong: hvd.allreduce(slices, **wrong))
        raises(NotImplementedError, "sparse", lambda wrong=wrong: hvd.grouped_allreduce([dense, slices], **wrong))


def process_sets():
    tf, hvd, rank, size = start("tensorflow")
    if size == 1:
        return
    own = hvd.add_process_set([rank_ for rank_ in range(size) if rank_ != 1])
    x = tf.constant([float(rank + 1)])
    if rank != 1:
        assert float(hvd.allreduce(x, op=hvd.Sum, process_set=own)[0]) == sum(range(1, size + 1)) - 2
        assert hvd.allgather(x, process_set=own).shape == (size - 1,)
        assert int(hvd.size_op(own.process_set_id)) == size - 1
        hvd.barrier(own)

        def loss(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(hvd.allgather(x, name="in_a_set", process_set=own))
            return tape.gradient(y, x)

        assert loss(x).numpy().tolist() == [1.0]
    else:
        invalid = tf.errors.InvalidArgumentError
        raises(invalid, "is not a member of the provided process set", lambda: hvd.allreduce(x, process_set=own))
        raises(invalid, "Invalid process set id for this rank", lambda: hvd.reducescatter(x, process_set=own))
    assert int(hvd.process_set_included_op(own.process_set_id)) == int(rank != 1)
    assert int(hvd.size_op(own.process_set_id)) == size - 1
    # On ranks outside the process set, a tape returns their own gradients.
    variable = tf.Variable([float(rank)])
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, process_set=own) as tape:
        y = tf.reduce_sum(variable * 2.0)
    assert tape.gradient(y, variable).numpy().tolist() == [2.0 * (1 if rank == 1 else size - 1)]
    assert hvd.remove_process_set(own)
    raises(ValueError, "does not exist, or has not been registered", lambda: hvd.allreduce(x, process_set=own))


def joins():
    tf, hvd, rank, size = start("tensorflow")
    for first in range(size):
        if rank == first:
            last = hvd.join()
        else:
            x = tf.constant([1.0, 2.0])
            assert abs(hvd.allreduce(x, name="joined") - x * (size - 1) / size).numpy().max() < 1e-6
            failed = tf.errors.FailedPreconditionError
            raises(failed, "Allgather is not supported with Join", lambda x=x: hvd.allgather(x))
            raises(failed, "Broadcast is not supported with Join", lambda x=x, first=first: hvd.broadcast(x, first))
            raises(failed, "Alltoall is not supported with Join", lambda: hvd.alltoall(tf.zeros([size])))
            raises(failed, "Reducescatter is not supported with Join", lambda x=x: hvd.reducescatter(x))
            last = hvd.join()
        assert last.dtype == tf.int32
        gathered_ranks = hvd.allgather(tf.reshape(last, [1])).numpy().tolist()
        assert len(set(gathered_ranks)) == 1
        assert size == 1 or gathered_ranks[0] != first


def kernels_for_gpus():
    """The tensors of GPU kernels stay on the device; only the numbers of rows of all-to-all are in host memory."""
    start("tensorflow")
    from tensorflow.python.framework import kernels

    for name, tensors in (("Allgather", 0), ("GroupedAllgather", 0), ("Alltoall", 2), ("Allreduce", 0)):
        registered = kernels.get_registered_kernels_for_op(f"Horovod{name}").kernel
        (found,) = [one for one in registered if one.device_type == "GPU"]
        assert len(found.host_memory_arg) == tensors, (name, found)


def sessions():
    tf, hvd, _, size = start("tensorflow")
    hvd.shutdown()
    failed = tf.errors.FailedPreconditionError
    raises(failed, "Horovod has not been initialized; use hvd.init", lambda: hvd.allreduce(tf.constant(1.0)))
    raises(ValueError, "Horovod has not been initialized", hvd.rank)
    hvd.init()
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == size
    assert hvd.util._executing_eagerly()
    assert hvd.mpi_ops._normalize_name("a/b:0") == "a_b_0"


PARTS = (reductions, data_movement, graphs, gradients, duplicates, mismatches, sparse, process_sets, joins, kernels_for_gpus, sessions)  # fmt: skip


def all_parts():
    """Runs all parts in one job, because ranks take long to start."""
    for part in PARTS:
        part()


@pytest.mark.timeout(420)
def test_collectives():
    """The assertions are in `all_parts`, which runs on each rank."""
    run_ranks(all_parts, 2, launcher=Forked("tensorflow"), env=ENV, timeout=400)


if __name__ == "__main__":
    for ranks in (2, 3, 4):
        run_ranks(all_parts, ranks, env=ENV, timeout=400)
        print(f"{ranks} ranks: all checks pass")
