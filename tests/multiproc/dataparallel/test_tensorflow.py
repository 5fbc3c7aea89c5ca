"""The TensorFlow interface on two ranks: collectives, broadcasts, errors, and a dead rank."""

from __future__ import annotations

import importlib.util
import time

import pytest

from support import Forked, run_ranks, start_ranks
from support.rank_main import announce

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


def interface():
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp
    from smdistributed.dataparallel.exceptions import (
        MismatchError,
        SMDDPAlreadyInitializedError,
        SMDDPNotInitializedError,
    )

    for call in (sdp.rank, lambda: sdp.oob_allreduce(tf.ones(3)), lambda: sdp.broadcast(tf.ones(3), 0)):
        with pytest.raises(SMDDPNotInitializedError, match=r"call `init\(\)` first$"):
            call()
    sdp.init()
    with pytest.raises(SMDDPAlreadyInitializedError):
        sdp.init()
    rank, size = sdp.rank(), sdp.size()
    assert (sdp.local_rank(), sdp.local_size()) == (rank, size)
    mine = tf.constant([1.0, 2.0, 3.0]) * (rank + 1)
    assert sdp.allreduce(mine, 0, 1).numpy().tolist() == [1.5, 3.0, 4.5]
    assert sdp.allreduce(mine, 0, 1, op=None).numpy().tolist() == [1.5, 3.0, 4.5]
    assert sdp.allreduce(mine, 1, 2, op=sdp.ReduceOp.SUM).numpy().tolist() == [3.0, 6.0, 9.0]
    assert sdp.oob_allreduce(mine, op=sdp.ReduceOp.MAX).numpy().tolist() == [2.0, 4.0, 6.0]
    half = sdp.oob_allreduce(mine, compression=sdp.Compression.fp16)
    assert half.dtype == tf.float32
    assert half.numpy().tolist() == [1.5, 3.0, 4.5]
    numbers = sdp.oob_allreduce(tf.constant([rank]), compression=sdp.Compression.fp16, op=sdp.ReduceOp.SUM)
    assert numbers.numpy().tolist() == [1]
    assert sdp.oob_allreduce(2.0 * rank).numpy() == 1.0
    for index, count in [(1, 1), (-1, 2), (0.5, 2)]:
        with pytest.raises(ValueError, match="`param_index` is"):
            sdp.allreduce(mine, index, count)
    with pytest.raises(ValueError, match="'sum' is not a reduction"):
        sdp.oob_allreduce(mine, op="sum")

    variables = [tf.Variable(mine), tf.Variable(rank)]
    sdp.broadcast_variables(variables, 1)
    assert variables[0].numpy().tolist() == [2.0, 4.0, 6.0]
    assert variables[1].numpy() == 1
    variable = tf.Variable(mine)

    @tf.function
    def step(first_batch):
        loss = sdp.oob_allreduce(tf.reduce_sum(variable))
        if first_batch:
            sdp.broadcast_variables([variable], 0)
        return loss

    assert step(tf.constant(True)).numpy() == 9.0
    assert step(tf.constant(False)).numpy() == 6.0
    assert variable.numpy().tolist() == [1.0, 2.0, 3.0]

    with pytest.raises(
        MismatchError, match=r"rank 0 asks for .* of float32 \[3\], rank 1 asks for .* of float32 \[4\]$"
    ):
        sdp.oob_allreduce(tf.ones(3 + rank))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks disagree"):
        tf.function(sdp.oob_allreduce)(tf.ones(3 + rank))
    assert sdp.oob_allreduce(tf.constant(1.0)).numpy() == 1.0
    sdp.shutdown()
    sdp.shutdown()
    with pytest.raises(SMDDPNotInitializedError):
        sdp.size()


def test_tensorflow_interface():
    """The assertions are in `interface`, which runs on each rank."""
    run_ranks(interface, 2, launcher=Forked("tensorflow"), timeout=110)


def wait_for_killed_rank():
    import tensorflow as tf

    import smdistributed.dataparallel.tensorflow as sdp

    sdp.init()
    sdp.oob_allreduce(tf.ones(3))
    if sdp.rank() == 1:
        announce("ready")
        time.sleep(60)
    sdp.oob_allreduce(tf.ones(3))


def test_a_dead_rank_is_named_within_5_seconds():
    with start_ranks(wait_for_killed_rank, 2, launcher=Forked("tensorflow"), timeout=110) as job:
        job.wait_for("ready")
        time.sleep(0.3)
        killed = job.kill(1)
        outcome = job.wait()
    assert outcome.ranks[0].error_types[0] == "PeerFailedError", outcome.describe()
    assert "rank 1 died" in outcome.ranks[0].error
    assert outcome.ranks[0].ended_at - killed < 5
