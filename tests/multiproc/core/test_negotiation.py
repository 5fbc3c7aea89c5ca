"""Negotiation of named collectives in TensorFlow: any order, several threads, mismatches, interrupts and missing ranks.

``python tests/multiproc/core/test_negotiation.py 100`` makes each mismatch about 100 times, on 2 and on 4 ranks, or on
the numbers of ranks that follow (``100 2``), and prints the longest times.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, more, run_ranks, start_ranks
from support.rank_main import announce

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")

ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def names_in_any_order():
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    rank, size = sdp.rank(), sdp.size()
    total = sum(range(1, size + 1))

    # One graph, whose operations each rank adds in another order.
    count = 60
    order = list(range(count))
    random.Random(rank).shuffle(order)
    values = [tf.Variable(tf.fill([1 + i], float(i + 1) * (rank + 1))) for i in range(count)]

    @tf.function
    def reduce_all():
        reduced = {i: sdp.oob_allreduce(values[i], op=sdp.ReduceOp.SUM, name=f"value.{i}") for i in order}
        return [reduced[i] for i in range(count)]

    for _ in range(5):
        for i, value in enumerate(reduce_all()):
            assert value.numpy().tolist() == [(i + 1.0) * total] * (1 + i)

    # Automatic names in a graph: in branches, in loops, with an unused result, and of a constant input.
    extra = tf.Variable(0.0)

    @tf.function
    def step(value, first):
        if rank == 0:
            extra.assign_add(sdp.oob_allreduce(value, op=sdp.ReduceOp.SUM))
        else:
            sdp.oob_allreduce(value, op=sdp.ReduceOp.SUM)
        if first:
            value = sdp.broadcast(value, size - 1)
        for _ in tf.range(3):
            value = sdp.oob_allreduce(value) + 1.0
        return value + sdp.oob_allreduce(tf.constant(rank + 1.0), op=sdp.ReduceOp.SUM)

    for turn in range(3):
        first = turn == 0
        expected = (float(size) if first else total / size) + 3.0 + total
        assert step(tf.constant(rank + 1.0), tf.constant(first)).numpy() == expected
    if rank == 0:
        assert extra.numpy() == 3 * total

    # Eager calls: in sequence, and from threads.
    for turn in range(5):
        assert sdp.oob_allreduce(tf.constant(turn + rank)).numpy() == sum(turn + r for r in range(size)) // size
    results = {}

    def call(name):
        results[name] = [sdp.oob_allreduce(tf.constant(1.0 + turn), name=name).numpy() for turn in range(5)]

    names = [f"thread.{i}" for i in range(4)]
    threads = [threading.Thread(target=call, args=(name,)) for name in (names if rank % 2 else reversed(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [1.0, 2.0, 3.0, 4.0, 5.0] for name in names}

    # Gradients.
    variable = tf.Variable(rank + 1.0)
    with tf.GradientTape() as tape:
        loss = sdp.oob_allreduce(variable * variable, op=sdp.ReduceOp.SUM)
    assert tape.gradient(loss, variable).numpy() == 2.0 * (rank + 1) * size
    sdp.shutdown()


def disagreements(runs, slow_every=15):
    """Makes `runs` mismatched calls; returns the case, start and end time of each on this rank."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    from smdistributed.dataparallel.exceptions import MismatchError

    sdp.init()
    rank, size = sdp.rank(), sdp.size()
    odd = size - 1
    mine = rank == odd
    three = tf.ones(3)

    def eager(tensor, op=sdp.ReduceOp.AVERAGE, root=None, name="t"):
        return sdp.oob_allreduce(tensor, op=op, name=name) if root is None else sdp.broadcast(tensor, root, name=name)

    def graph(tensor, **options):
        return tf.function(lambda tensor: eager(tensor, **options))(tensor)

    # The mismatched call, and a pattern for the error on all ranks.
    quick = {
        "shape": (
            lambda call: call(tf.ones([2, 3] if mine else [3, 2])),
            rf"t`: ranks disagree: Mismatched ALLREDUCE tensor shapes: .*float32 \[3, 2\], rank {odd} asks for .*\[2, 3\]",
        ),
        "dtype": (
            lambda call: call(tf.ones(3, tf.float64 if mine else tf.float32)),
            rf"t`: .*Mismatched data types: .*float32 \[3\], rank {odd} asks for .* of float64 \[3\]",
        ),
        "reduction": (
            lambda call: call(three, op=sdp.ReduceOp.MAX if mine else sdp.ReduceOp.SUM),
            rf"t`: .*Mismatched reduction operation: .*all_reduce\(sum\) .*, rank {odd} asks for all_reduce\(max\)",
        ),
        "root": (
            lambda call: call(three, root=1 if mine else 0),
            rf"t`: .*Mismatched BROADCAST root ranks: .* rank 0 of the group, rank {odd} asks for .* from rank 1 of the group",
        ),
        "operation": (
            lambda call: call(three, root=0 if mine else None),
            rf"t`: .*Mismatched operations: .*all_reduce\(average\) of .*, rank {odd} asks for broadcast",
        ),
        "no such root": (
            lambda call: call(three, root=size if mine else 0),
            rf"broadcast: root {size} is not a rank of a group of {size}",
        ),
    }
    slow = {
        "name": (
            lambda call: call(three, name="his" if mine else "hers"),
            rf"no name is called by all: rank.* for `.*hers`, rank {odd} waits for `.*his`",
        ),
        "number": (
            lambda call: [call(three, name=name) for name in (["n", "other"] if mine else ["n", "n"])],
            rf"no name is called by all: rank.* for `.*n`, rank {odd} waits for `.*other`",
        ),
    }
    times = []
    for run in range(runs):
        # Slow cases: ranks wait for different names, which is detected only after a second.
        cases = slow if run % slow_every == slow_every - 1 else quick
        case, (disagree, expected) = list(cases.items())[(run // slow_every if cases is slow else run) % len(cases)]
        call = graph if run % 3 == 2 else eager
        start = time.monotonic()
        with pytest.raises((MismatchError, ValueError, tf.errors.OpError), match=expected):
            disagree(call)
        times.append((case, start, time.monotonic()))
        # Matching calls still work.
        assert sdp.oob_allreduce(tf.constant(rank), op=sdp.ReduceOp.SUM).numpy() == sum(range(size))
    sdp.shutdown()
    return times


def longest(by_rank):
    """Returns for each case the longest time from the last rank's call to the last rank's error, in seconds."""
    seconds = {}
    for calls in zip(*by_rank, strict=True):
        seconds_taken = max(end for _, _, end in calls) - max(start for _, start, _ in calls)
        case = calls[0][0]
        seconds[case] = max(seconds_taken, seconds.get(case, 0.0))
    return {case: round(seconds_taken, 3) for case, seconds_taken in seconds.items()}


def any_order_and_disagreements(runs):
    # In one job, because TensorFlow takes seconds to import.
    names_in_any_order()
    return disagreements(runs)


@pytest.mark.parametrize(("size", "runs"), [(2, 40), more(4, 30)])
def test_any_order_and_mismatches(size, runs):
    seconds = longest(
        run_ranks(any_order_and_disagreements, size, runs, launcher=Forked("tensorflow"), env=ENV, timeout=170)
    )
    print(seconds)
    # Takes less than 2 s on an idle machine. The bound is loose for busy machines; a hang would last until the
    # deadline.
    assert max(seconds.values()) < 30, seconds


def make_step():
    """Returns a model-parallel step in which rank 0 waits for an output of rank 1."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.first, self.second = tf.keras.layers.Dense(3), tf.keras.layers.Dense(3)

        def call(self, x):
            x = self.first(x)
            with smp.partition(1):
                return self.second(x)

    model = Model()
    return smp.step(lambda x: model(x))


def interrupt_rank_0(where):
    """Ctrl-C on rank 0 while TensorFlow waits for an operation that the others do not call."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    from smdistributed import _core
    from smdistributed._common.errors import PeerFailedError

    sdp.init()
    assert sdp.oob_allreduce(tf.constant(1), op=sdp.ReduceOp.SUM).numpy() == 2
    step = make_step() if where == "step" else None
    if sdp.rank() != 0:
        while not (Path(os.environ["SMD_TEST_FOLDER"]) / "event.interrupted").exists():
            time.sleep(0.02)
        with pytest.raises(PeerFailedError, match="rank 0"):
            _core.barrier()
        return 0.0
    wait = {"eager": sdp.oob_allreduce, "graph": tf.function(sdp.oob_allreduce), "step": step}[where]
    sent = []

    def interrupt():
        # By then the main thread waits.
        time.sleep(2)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as raised:
            wait(tf.ones([4, 3]))
        seconds_taken = time.monotonic() - sent[0]
    finally:
        announce("interrupted")
    # In a graph, pybind11 may raise an error of its own that contains the KeyboardInterrupt.
    assert "KeyboardInterrupt" in repr(raised.value)
    assert where == "graph" or raised.type is KeyboardInterrupt
    return seconds_taken


@pytest.mark.parametrize("where", ["eager", "graph", "step"])
def test_an_interrupt_ends_a_wait_of_tensorflow(where):
    seconds_taken, _ = run_ranks(interrupt_rank_0, 2, where, launcher=Forked("tensorflow"), env=ENV, timeout=110)
    # Takes about a second on an idle machine. Without the interrupt the wait would last until the job's deadline.
    assert seconds_taken < 30


def handle_interrupts():
    """Ctrl-C while no operation waits: the script gets its KeyboardInterrupt and then runs something long."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    def press():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    sdp.init()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            press()
        # A long call that does not return to the interpreter, as in a save: the interrupt must not be raised again.
        time.sleep(2)
    return float(sdp.oob_allreduce(tf.constant(3.0)))


def test_a_handled_interrupt_interrupts_nothing_else():
    assert run_ranks(handle_interrupts, 1, launcher=Forked("tensorflow"), env=ENV, timeout=110) == [3.0]


def broadcast_with_timeline(path):
    """Rank 1 calls only after rank 0 has submitted the broadcasts of all variables, as its timeline shows.

    Rank 0 would hang if it waited for one variable before it submits the next.
    """
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    from smdistributed import _core

    sdp.init()
    variables = [tf.Variable(tf.fill([size], float(sdp.rank()))) for size in (1, 2, 3)]
    if sdp.rank() == 0:
        _core.start_horovod_timeline(path, False)
    else:
        deadline = time.monotonic() + 30
        while not Path(path).exists() or Path(path).read_text().count("NEGOTIATE_BROADCAST") < len(variables):
            assert time.monotonic() < deadline, Path(path).read_text()
            time.sleep(0.02)
    sdp.broadcast_variables(variables, 0)
    assert all(float(tf.reduce_sum(variable)) == 0 for variable in variables)


def test_broadcast_variables_submits_all_variables_at_once(tmp_path):
    """The assertions are in `broadcast_with_timeline`, which runs on each rank."""
    run_ranks(broadcast_with_timeline, 2, str(tmp_path / "t.json"), launcher=Forked("tensorflow"), env=ENV, timeout=110)


LIMIT = {"SMD_STALL_WARNING_SECONDS": "1", "SMD_STALL_SHUTDOWN_SECONDS": "3"}


def a_missing_rank(runs=1):
    """Rank 1 calls late; returns the times in seconds after which this rank got the timeout error."""
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    from smdistributed.dataparallel.exceptions import SMDDPTimeoutError

    sdp.init()
    rank = sdp.rank()
    # Synchronizes the ranks, so that the timeout below starts on all ranks at once.
    sdp.oob_allreduce(tf.ones(3))
    seconds_taken = []
    for run in range(runs):
        start = time.monotonic()
        if rank != 1:
            with pytest.raises(SMDDPTimeoutError, match=r"`late` timed out after .*no sign of rank\(s\) \[1\]"):
                sdp.oob_allreduce(tf.ones(3), name="late")
            seconds_taken.append(round(time.monotonic() - start, 3))
            announce(f"told.{run}.{rank}")
        else:
            folder = Path(os.environ["SMD_TEST_FOLDER"])
            others = [other for other in range(sdp.size()) if other != 1]
            while not all((folder / f"event.told.{run}.{other}").exists() for other in others):
                time.sleep(0.02)
        assert sdp.oob_allreduce(tf.constant(1), op=sdp.ReduceOp.SUM, name="next").numpy() == sdp.size()
    sdp.shutdown()
    return seconds_taken


@pytest.mark.alone
def test_a_missing_rank_is_named_after_the_limit():
    with start_ranks(a_missing_rank, 3, launcher=Forked("tensorflow"), env=ENV | LIMIT, timeout=110) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    assert "collectives have waited for more than 1 seconds" in outcome.output, outcome.describe()
    # The stall warning, and the report at the shutdown.
    assert re.search(r"Missing ranks:\n.*1: \[late\]\n", outcome.output), outcome.describe()
    assert re.search(r"Will shutdown\.\n.*Missing ranks:\n.*1!: \[late\]\n", outcome.output), outcome.describe()
    for rank in (0, 2):
        (seconds_taken,) = outcome.ranks[rank].value
        print(f"rank {rank} got its error after {seconds_taken} s")
        assert 3 <= seconds_taken < 8


def main():
    runs = int(sys.argv[1])
    for size in map(int, sys.argv[2:] or (2, 4)):
        # Every fourth call is one of the two slow cases; the others are the six quick ones.
        times = run_ranks(disagreements, size, 4 * 2 * runs, 4, env=ENV, timeout=120 + 12 * runs)
        print(f"{len(times[0])} disagreements on {size} ranks, no hang; the longest in seconds: {longest(times)}")
        missing = run_ranks(a_missing_rank, size, runs, env=ENV | LIMIT, timeout=120 + 10 * runs)
        longest_wait = max(max(seconds_taken) for seconds_taken in missing if seconds_taken)
        print(
            f"{runs} times a missing rank on {size} ranks, no hang: error after {longest_wait} s, with a limit of 3 s"
        )


if __name__ == "__main__":
    main()
