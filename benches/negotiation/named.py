"""Negotiation of many small named tensors, which each rank reduces in another order: all at once, and one by one.

    smdrun -n 2 benches/negotiation/named.py
    smdrun -n 4 benches/negotiation/named.py --rounds 5

The functions take turns. `at once` is one `tf.function` that reduces all tensors, in an order that differs between
ranks. In `one by one`, each reduction waits for the one before it, in the same order on all ranks. `in order` is the
same without names, and `without` reduces nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp
from smdistributed.dataparallel.tensorflow.collectives import ops


def main() -> None:
    """Prints a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elems", type=int, default=256, help="float32 elements of each tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=4, help="repeats in each round")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    sdp.init()
    rank, size = sdp.rank(), sdp.size()
    places = list(range(options.tensors))
    shuffled = random.Random(rank).sample(places, len(places))
    values = tf.reshape(tf.range(options.tensors * options.elems, dtype=tf.float32), [options.tensors, -1])
    expected = values * float(sum(range(1, size + 1)))

    def reduce_(value: tf.Tensor, place: int) -> tf.Tensor:
        return sdp.oob_allreduce(value, op=sdp.ReduceOp.SUM, name=f"tensor.{place}")

    @tf.function
    def at_once(values: tf.Tensor) -> tf.Tensor:
        rows = tf.unstack(values, options.tensors)
        reduced = {place: reduce_(rows[place], place) for place in shuffled}
        return tf.stack([reduced[place] for place in places])

    @tf.function
    def one_by_one(values: tf.Tensor) -> tf.Tensor:
        reduced: list[tf.Tensor] = []
        for place, row in enumerate(tf.unstack(values, options.tensors)):
            with tf.control_dependencies(reduced[-1:]):
                reduced.append(reduce_(row, place))
        return tf.stack(reduced)

    @tf.function
    def in_order(values: tf.Tensor) -> tf.Tensor:
        rows = tf.unstack(values, options.tensors)
        return tf.stack([ops.smd_all_reduce(tensor=row, op="sum") for row in rows])

    @tf.function
    def nothing(values: tf.Tensor) -> tf.Tensor:
        return tf.stack([tf.identity(row) for row in tf.unstack(values, options.tensors)])

    functions = {"at once": at_once, "one by one": one_by_one, "in order": in_order, "without": nothing}
    inputs = values * float(rank + 1)
    for name, function in functions.items():
        if name != "without":
            tf.debugging.assert_equal(function(inputs), expected)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.rounds):
        for name, function in functions.items():
            for _ in range(options.repeats):
                sdp.oob_allreduce(tf.constant(0.0))
                start = time.perf_counter()
                function(inputs).numpy()
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        print(f"{options.tensors} tensors of {4 * options.elems} bytes, {size} processes, ms")
        for name, seconds in times.items():
            low, median, high = (1e3 * pick(seconds) for pick in (min, statistics.median, max))
            print(f"  {name:>10}  {median:8.2f}   ({low:.2f} to {high:.2f})")
        ratio = statistics.median(times["one by one"]) / statistics.median(times["at once"])
        print(f"  at once is {ratio:.1f} times as fast as one by one")
    sdp.shutdown()


if __name__ == "__main__":
    main()
