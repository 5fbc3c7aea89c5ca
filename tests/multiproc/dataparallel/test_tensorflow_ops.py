"""TensorFlow operations: every collective and dtype, eager and in functions, with gradients, order and errors.

TensorFlow takes seconds to import, so one job runs all checks.
"""

from __future__ import annotations

import importlib.util

import pytest

from support import Forked, more, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")

NUMBERS = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
NUMBERS += ["complex64", "complex128"]
TRACED = ["bfloat16", "int32"]
TYPES = [*NUMBERS, "bool", "uint16", "uint32", "uint64"]
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "4",
}


def values(dtype, rows, seed):
    """Returns a ``[rows, 3]`` tensor of small integers, exact in every dtype, from generator ``seed``."""
    import numpy
    import tensorflow as tf

    numbers = numpy.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 5, (rows, 3))
    return tf.cast(tf.constant(numbers), dtype)


def same(result, expected):
    import tensorflow as tf

    assert result.dtype == expected.dtype
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert bool(tf.reduce_all(tf.equal(result, expected))), (result, expected)


def check_values(sdp, rank, size):
    """Every collective with every dtype that it supports, eager and in a function. Returns how many were compared."""
    import tensorflow as tf

    from smdistributed.dataparallel.tensorflow import collectives

    ops = sdp.ReduceOp
    rows = [2 * r for r in range(size)]
    table = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    received = [table[i][rank] for i in range(size)]
    compared = 0

    for dtype in TYPES:
        reduces = dtype in NUMBERS
        own = values(dtype, 4 * size, rank)
        inputs_of_ranks = [values(dtype, 4 * size, r) for r in range(size)]
        uneven = values(dtype, rows[rank], rank)
        to_all = values(dtype, sum(table[rank]), 10 + rank)

        def move_all(own=own, uneven=uneven, to_all=to_all):
            return (
                collectives.broadcast(own, size - 1),
                collectives.all_gather(own),
                collectives.all_gather(uneven),
                *collectives.all_to_all(own),
                *collectives.all_to_all(to_all, table[rank]),
                collectives.broadcast(own[0, 0], 0),
                collectives.broadcast(own[:0], 0),
                collectives.all_gather(own[:, :0]),
            )

        def reduce_all(own=own):
            return (
                collectives.oob_allreduce(own, op=ops.SUM),
                collectives.reduce_scatter(own, ops.SUM),
                collectives.reduce_scatter(own[: sum(rows)], ops.SUM, rows) if sum(rows) <= 4 * size else own,
                *collectives.grouped_all_reduce([own, own[0, 0], own[:0]], op=ops.SUM),
                collectives.call(collectives.ops.smd_reduce, tensor=own, op="sum", root=1),
            )

        blocks = [tf.split(values(dtype, sum(table[r]), 10 + r), table[r])[rank] for r in range(size)]
        moved = (
            inputs_of_ranks[-1],
            tf.concat(inputs_of_ranks, 0),
            tf.concat([values(dtype, rows[r], r) for r in range(size)], 0),
            tf.concat([each[4 * rank : 4 * rank + 4] for each in inputs_of_ranks], 0),
            tf.constant([4] * size, tf.int64),
            tf.concat(blocks, 0),
            tf.constant(received, tf.int64),
            inputs_of_ranks[0][0, 0],
            own[:0],
            tf.concat(inputs_of_ranks, 0)[:, :0],
        )
        # Tracing is slow, so above two ranks only the dtypes in TRACED are traced.
        traced = size == 2 or dtype in TRACED
        for run in (move_all, tf.function(move_all)) if traced else (move_all,):
            for result, expected in zip(run(), moved, strict=True):
                same(result, expected)
                compared += 1
        if not reduces:
            continue
        total = inputs_of_ranks[0]
        for each in inputs_of_ranks[1:]:
            total += each
        part = 4 * rank
        begin = sum(rows[:rank])
        reduced = (
            total,
            total[part : part + 4],
            total[begin : begin + rows[rank]] if sum(rows) <= 4 * size else own,
            total,
            total[0, 0],
            own[:0],
            total if rank == 1 else tf.zeros_like(total),
        )
        for run in (reduce_all, tf.function(reduce_all)) if traced else (reduce_all,):
            for result, expected in zip(run(), reduced, strict=True):
                same(result, expected)
                compared += 1
    mixed = [tf.constant([rank]), tf.constant([0.5 * rank], tf.bfloat16), tf.constant([[rank > 0]])]
    reduced = collectives.grouped_all_reduce(mixed, op=ops.MAX)
    assert [each.numpy().tolist() for each in reduced] == [[size - 1], [0.5 * (size - 1)], [[True]]]
    assert collectives.grouped_all_reduce([]) == []
    collectives.barrier()
    return compared


def check_shapes(sdp, size):
    """Static shapes of the results while a graph is traced."""
    import tensorflow as tf

    from smdistributed.dataparallel.tensorflow import collectives

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([4, 2]), tf.TensorSpec(None)])
    def shapes(x, y, z):
        assert collectives.oob_allreduce(x).shape.as_list() == [None, 3]
        assert collectives.broadcast(y, 0).shape == [4, 2]
        assert [each.shape for each in collectives.grouped_all_reduce([x, y])] == [x.shape, y.shape]
        assert collectives.all_gather(y).shape.as_list() == [None, 2]
        assert collectives.reduce_scatter(y).shape.as_list() == [None, 2]
        output, received = collectives.all_to_all(y)
        assert output.shape == [4, 2]
        assert received.shape.as_list() == [None]
        output, received = collectives.all_to_all(x, tf.fill([size], tf.shape(x)[0] // size))
        assert output.shape.as_list() == [None, 3]
        assert received.shape.as_list() in ([None], [size])
        assert collectives.all_gather(z).shape.rank is None
        return collectives.all_to_all(z)[0]

    assert shapes(tf.ones([size, 3]), tf.ones([4, 2]), tf.ones([size])).shape == [size]
    with pytest.raises(ValueError, match="at least rank 1"):
        tf.function(collectives.all_gather)(1.0)


def check_gradients(sdp, rank, size):
    """First and second derivatives, compared with those of one process that sums the losses of all ranks."""
    import tensorflow as tf

    from smdistributed.dataparallel.tensorflow import collectives

    ops = sdp.ReduceOp
    rows = [r % 3 for r in range(size)]
    splits = [[(i + j) % 2 + 1 for j in range(size)] for i in range(size)]

    def inputs(count):
        generator = tf.random.Generator.from_seed(7)
        # Rounded to halves, so that ranks tie for minima and maxima, and some values are zero.
        return [tf.round(2 * generator.normal([count(r), 2], dtype=tf.float64)) / 2 for r in range(size)]

    def weigh(r, y):
        # The loss of rank r: nonlinear, and different on each rank.
        return tf.reduce_sum(y**3 * tf.cast(r + 1, tf.float64)) + tf.reduce_sum(y)

    def block(x, counts, r):
        return tf.split(x, counts)[r]

    combine = {
        ops.SUM: tf.add_n,
        ops.AVERAGE: lambda xs: tf.add_n(xs) / size,
        ops.MIN: lambda xs: tf.reduce_min(tf.stack(xs), 0),
        ops.MAX: lambda xs: tf.reduce_max(tf.stack(xs), 0),
        ops.PRODUCT: lambda xs: tf.reduce_prod(tf.stack(xs), 0),
    }
    # The collective; the number of input rows on rank r; rank r's expected output, from the inputs of all ranks.
    cases = []
    for op, of in combine.items():
        cases += [
            (lambda x, op=op: collectives.oob_allreduce(x, op=op), lambda r: 3, lambda xs, r, of=of: of(xs)),
            (
                lambda x, op=op: collectives.reduce_scatter(x, op, rows),
                lambda r: sum(rows),
                lambda xs, r, of=of: block(of(xs), rows, r),
            ),
        ]
    for op in (ops.SUM, ops.AVERAGE):
        cases += [
            (
                lambda x, op=op: tf.concat(collectives.grouped_all_reduce([x[:1], x[1:]], op=op), 0),
                lambda r: 3,
                lambda xs, r, of=combine[op]: of(xs),
            ),
            (
                lambda x, op=op: collectives.call(collectives.ops.smd_reduce, tensor=x, op=op.value, root=1),
                lambda r: 3,
                lambda xs, r, of=combine[op]: of(xs) if r == 1 else tf.zeros_like(xs[0]),
            ),
        ]
    cases += [
        (lambda x: collectives.broadcast(x, 1), lambda r: 3, lambda xs, r: xs[1]),
        (collectives.all_gather, lambda r: rows[r], lambda xs, r: tf.concat(xs, 0)),
        (
            lambda x: collectives.all_to_all(x)[0],
            lambda r: 2 * size,
            lambda xs, r: tf.concat([block(x, size, r) for x in xs], 0),
        ),
        (
            lambda x: collectives.all_to_all(x, splits[rank])[0],
            lambda r: sum(splits[r]),
            lambda xs, r: tf.concat([block(x, splits[s], r) for s, x in enumerate(xs)], 0),
        ),
    ]

    def derivatives(loss, x):
        """Returns the gradient of the loss, and the gradient of the sum of squares of that gradient."""
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = loss(x)
            first = inner.gradient(y, x, unconnected_gradients="zero")
            again = loss_of_gradient(first)
        return first, outer.gradient(again, x, unconnected_gradients="zero")

    def loss_of_gradient(first):
        return tf.reduce_sum(tf.stack([tf.reduce_sum(g**2) for g in tf.nest.flatten(first)]))

    for number, (collective, count, of) in enumerate(cases):
        xs = inputs(count)
        expected = derivatives(lambda xs, of=of: tf.add_n([weigh(r, of(xs, r)) for r in range(size)]), xs)
        for run in (derivatives, tf.function(derivatives)):
            results = run(lambda x, collective=collective: weigh(rank, collective(x)), xs[rank])
            for order, (result, right) in enumerate(zip(results, expected, strict=True)):
                assert result.shape == xs[rank].shape
                assert bool(tf.reduce_all(tf.abs(result - right[rank]) < 1e-8)), (number, order, result, right[rank])

    x = tf.complex(tf.ones([2]) * (rank + 1.0), tf.ones([2]))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.math.real(collectives.oob_allreduce(x, op=ops.PRODUCT) * (1 + 2j))
    result = tape.gradient(y, x)
    xs = [tf.complex(tf.ones([2]) * (r + 1.0), tf.ones([2])) for r in range(size)]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = size * tf.math.real(tf.reduce_prod(tf.stack(xs), 0) * (1 + 2j))
    assert bool(tf.reduce_all(tf.abs(result - tape.gradient(y, xs)[rank]) < 1e-3))
    with tf.GradientTape() as tape:
        x = tf.Variable([1.0])
        y = collectives.grouped_all_reduce([x, x], op=ops.MAX)
    with pytest.raises(LookupError, match="sum and average, not for max"):
        tape.gradient(y, x)


def check_errors(sdp, rank, size):
    """Invalid and mismatched calls raise on every rank, and the job stays usable."""
    import tensorflow as tf

    from smdistributed.dataparallel.exceptions import InvalidArgumentError, MismatchError, PeerFailedError
    from smdistributed.dataparallel.tensorflow import collectives

    def one_rank_fails(call, wrong, right, text):
        error = InvalidArgumentError if rank == 0 else PeerFailedError
        with pytest.raises(error, match=text):
            call(*(wrong if rank == 0 else right))

    for call, text in [
        (lambda: sdp.broadcast(tf.ones(3), size), f"root {size} is not a rank of a group of {size}"),
        (lambda: sdp.broadcast(tf.ones(3), -1), "rank -1 is not a rank of the group"),
        (lambda: collectives.all_gather(tf.constant(1.0)), "a scalar has no rows"),
        (lambda: collectives.reduce_scatter(tf.ones([2 * size + 1])), f"{2 * size + 1} rows are not a multiple of the"),
        (lambda: collectives.all_to_all(tf.ones([3]), [3] * (size + 1)), "expected one for each"),
        (lambda: collectives.all_to_all(tf.ones([3]), [9] * size), "are more than the 3 that the tensor has"),
        (lambda: collectives.all_to_all(tf.ones([9]), [1] * size), "leave"),
        (lambda: collectives.all_to_all(tf.ones([9]), [-1] * size), "no block has less than none"),
    ]:
        with pytest.raises((InvalidArgumentError, PeerFailedError), match=text):
            call()
    one_rank_fails(collectives.all_to_all, (tf.ones([2]), [1] * (size + 1)), (tf.ones([size]), [1] * size), "expected")
    one_rank_fails(collectives.all_gather, (tf.constant(1.0),), (tf.ones([1]),), "a scalar has no rows")
    with pytest.raises(MismatchError, match=r"rank 0 called all_gather of rows of 2 float32, rank 1 called .* of 3 fl"):
        collectives.all_gather(tf.ones([1, 3 if rank else 2]))
    with pytest.raises(MismatchError, match=r"rank 0 called all_gather of rows of 2 int32, rank 1 called all_gather"):
        collectives.all_gather(tf.ones([1, 2], tf.float32 if rank else tf.int32))
    with pytest.raises(MismatchError, match=r"rank 0 called all_reduce.*, rank 1 called all_gather of rows"):
        collectives.all_gather(tf.ones([2])) if rank else collectives.grouped_all_reduce([tf.ones([2])])
    with pytest.raises(MismatchError, match="packed into one"):
        collectives.grouped_all_reduce([tf.ones([2])] * (3 if rank else 2))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"Mismatched BROADCAST root ranks: .* from rank 0 .*ranks? 1.* from rank 1",
    ):
        tf.function(sdp.broadcast)(tf.ones(3), min(rank, 1))
    for name, call in [("string", lambda x: sdp.broadcast(x, 0)), ("uint16", sdp.oob_allreduce)]:
        tensor = tf.constant("text") if name == "string" else tf.ones([2], name)
        with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match=f"{name}.*list of allowed values"):
            call(tensor)
        with pytest.raises(TypeError, match=f"{name} not in list of allowed values"):
            tf.function(call)(tensor)
    for op, tensor in [("max", tf.ones([2], tf.complex64)), ("bit_and", tf.ones([2]))]:
        with pytest.raises(NotImplementedError, match="all_reduce"):
            collectives.call(collectives.ops.smd_all_reduce, tensor=tensor, op=op)
    assert sdp.oob_allreduce(tf.constant(1.0)).numpy() == 1.0


def check_order(sdp, rank, size):
    """Unnamed collectives run in program order, also in branches and loops, however late their inputs are ready."""
    import tensorflow as tf

    from smdistributed.dataparallel.tensorflow.collectives import call, ops

    def all_reduce(tensor, op):
        # `oob_allreduce` calls a named operation, which is matched by name; this one is matched by order.
        return call(ops.smd_all_reduce, tensor=tensor, op=op)

    def broadcast(tensor, root):
        return call(ops.smd_broadcast, tensor=tensor, root=root)

    variable = tf.Variable(tf.zeros([50]))

    def late(x):
        # The delayed collective is a different one on each rank.
        if int(x.shape[0]) % size != rank:
            return x
        heavy = tf.ones([120, 120])
        for _ in range(10):
            heavy = tf.matmul(heavy, heavy) / 120
        return x + 0 * heavy[0, 0]

    def total(length):
        return tf.reduce_sum(all_reduce(late(tf.ones([length])), "sum"))

    @tf.function
    def inner(length):
        variable[: length // 2].assign(tf.ones([length // 2]) * total(length))
        return variable[0]

    @tf.function
    def step(flag, times):
        results = [total(length) for length in range(1, 9)]
        # Collectives in a nested function, a branch and a loop, all of which use a variable.
        results.append(inner(10))
        results += [total(length) for length in range(11, 14)]
        if flag:
            variable.assign(broadcast(variable + tf.cast(rank, tf.float32), 1))
        results += [total(length) for length in range(14, 17)]
        for _ in tf.range(times):
            variable.assign_add(broadcast(late(tf.ones([50])), 0))
            variable.assign_add(tf.ones([50]) * total(17))
        results += [total(length) for length in range(18, 21)]
        for result in results[:4]:
            # Each all-reduce depends on the previous one through the variable.
            variable.assign_add(all_reduce(variable * 0 + result, "average"))
        return tf.stack(results)

    lengths = [*range(1, 9), 10, *range(11, 17), *range(18, 21)]
    for number in range(8):
        results = step(tf.constant(number % 2 == 0), tf.constant(3))
        assert results.numpy().tolist() == [float(size * length) for length in lengths]


def check_all():
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    assert tf.config.threading.get_inter_op_parallelism_threads() in (0, 4)
    sdp.init()
    rank, size = sdp.rank(), sdp.size()
    compared = check_values(sdp, rank, size)
    check_shapes(sdp, size)
    check_order(sdp, rank, size)
    check_gradients(sdp, rank, size)
    check_errors(sdp, rank, size)
    return compared


@pytest.mark.parametrize("size", [2, more(4)])
def test_every_operation(size):
    compared = run_ranks(check_all, size, launcher=Forked("tensorflow"), timeout=110, env=ENVIRONMENT)
    traced = (len(TYPES), len(NUMBERS)) if size == 2 else (len(TRACED), len(TRACED))
    assert compared == [(len(TYPES) + traced[0]) * 10 + (len(NUMBERS) + traced[1]) * 7] * size
