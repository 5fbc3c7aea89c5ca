"""Errors of collectives: mismatched calls, invalid arguments, dead ranks and interrupts."""

from __future__ import annotations

import signal
import time

import pytest

from support import Forked, run_ranks, start_ranks
from support.rank_main import announce


def _start():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    return torch, dist, dist.get_rank()


def disagree():
    from smdistributed.dataparallel.exceptions import MismatchError

    torch, dist, rank = _start()
    three = torch.ones(3)
    cases = [
        (lambda: dist.all_reduce(torch.ones(3 + rank)), ["3 float32", "4 float32"]),
        (
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32)),
            ["float32", "float64"],
        ),
        (lambda: dist.all_reduce(three, dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN), ["min", "max"]),
        (lambda: dist.broadcast(three, rank), ["from rank 0", "from rank 1"]),
        (lambda: dist.all_reduce(torch.ones(3 + rank), async_op=True).wait(), ["3 float32", "4 float32"]),
        (lambda: dist.barrier() if rank else dist.all_reduce(three), ["barrier", "all_reduce"]),
        (lambda: dist.all_gather([torch.ones(1 + rank)] * 2, torch.ones(1 + rank)), ["blocks of 1", "blocks of 2"]),
    ]
    texts = []
    for call, differences in cases:
        with pytest.raises(MismatchError) as caught:
            call()
        text = str(caught.value)
        assert all(words in text for words in ["rank 0 called", "rank 1 called", *differences]), text
        assert "[smd:" not in text
        texts.append(text.split("ranks disagree")[1])
        # The group stays usable.
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [2.0, 2.0]
    return texts


def test_a_mismatch_is_named_on_every_rank():
    first, second = run_ranks(disagree, 2, launcher=Forked("torch"))
    assert first == second


def bad_arguments():
    torch, dist, _ = _start()
    one = torch.ones(1)
    with pytest.raises(ValueError, match="1 outputs were passed, expected one for each of the 2 members"):
        dist.all_gather([one], one.clone())
    with pytest.raises(ValueError, match="root 2 is not a rank of a group of 2"):
        dist.broadcast(one, 2)
    with pytest.raises(ValueError, match="dimension 0 of the input, of size 3, cannot be split"):
        dist.reduce_scatter_tensor(one, torch.ones(3))
    with pytest.raises(ValueError, match="expected 2 sizes that sum to 4"):
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], None)
    with pytest.raises(ValueError, match="the output has no dimension 0"):
        dist.all_gather_into_tensor(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(TypeError, match="layout Sparse"):
        dist.all_reduce(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="UInt16"):
        dist.all_reduce(torch.ones(3, dtype=torch.uint16))
    with pytest.raises(ValueError, match="'sum' is not a reduction"):
        dist.all_reduce(one, "sum")
    with pytest.raises(ValueError, match="`mean` is not a reduction: expected one of `sum`, `average`"):
        torch.ops.smd.all_reduce_(one, "mean", 0)
    # The group is still usable.
    dist.all_reduce(one)
    return one.item()


def test_bad_arguments_leave_the_group_usable():
    assert run_ranks(bad_arguments, 2, launcher=Forked("torch")) == [2.0, 2.0]


def wait_for_killed_rank(how):
    torch, dist, rank = _start()
    dist.barrier()
    if rank == 1:
        announce("ready")
        time.sleep(60)
    if how == "blocking":
        dist.all_reduce(torch.ones(1000))
    elif how == "asynchronous":
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
    else:
        dist.recv(torch.ones(1000), 1)


@pytest.mark.parametrize("how", ["blocking", "asynchronous", "message"])
def test_a_dead_rank_is_named_within_5_seconds(how):
    with start_ranks(wait_for_killed_rank, 3, how, launcher=Forked("torch")) as job:
        job.wait_for("ready")
        time.sleep(0.3)
        killed = job.kill(1)
        outcome = job.wait()
    for rank in (0, 2):
        assert outcome.ranks[rank].error_types[0] == "PeerFailedError", outcome.describe()
        assert "rank 1 died" in outcome.ranks[rank].error
        assert outcome.ranks[rank].ended_at - killed < 5


def wait_for_ctrl_c(how):
    torch, dist, rank = _start()
    dist.barrier()
    if rank == 1:
        # Rank 1 does not call the collective; the test kills it.
        announce("ready")
        time.sleep(60)
    start = time.monotonic()
    try:
        if how == "blocking":
            dist.all_reduce(torch.ones(1000))
        else:
            dist.all_reduce(torch.ones(1000), async_op=True).wait()
    except KeyboardInterrupt:
        announce("interrupted")
        return "interrupted", time.monotonic() - start
    return "returned", 0.0


@pytest.mark.parametrize("how", ["blocking", "asynchronous"])
def test_ctrl_c_ends_a_wait(how):
    with start_ranks(wait_for_ctrl_c, 2, how, launcher=Forked("torch")) as job:
        job.wait_for("ready")
        time.sleep(0.5)
        pressed = job.kill(0, signal.SIGINT)
        job.wait_for("interrupted")
        job.kill(1)
        outcome = job.wait()
    assert outcome.ranks[0].value[0] == "interrupted", outcome.describe()
    assert outcome.ranks[0].ended_at - pressed < 5
