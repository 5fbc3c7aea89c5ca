"""A rank of a pipeline dies: all other ranks end with an error that names it."""

from __future__ import annotations

import time

import pytest

from support import Forked, start_ranks
from support.rank_main import announce


def _body(victim):
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 3, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    for place, layer in enumerate(model):
        smp.set_partition(layer, place)
    model = smp.DistributedModel(model)

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for number in range(1 << 30):
        step(model, torch.ones(8, 32))
        if number == 3 and smp.rank() == victim:
            announce("training")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("victim", "launcher"), [(0, Forked("torch")), (1, "smdrun"), (2, Forked("torch"))], ids=["0", "1", "2"]
)
def test_a_killed_rank_is_named_by_all_others(victim, launcher):
    with start_ranks(_body, 3, victim, launcher=launcher, timeout=180) as job:
        job.wait_for("training")
        time.sleep(0.05)
        killed = job.kill(victim)
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    for rank in outcome.ranks:
        if rank.rank == victim:
            continue
        assert rank.error is not None, outcome.describe()
        assert rank.error_types[0] == "SMPPeerFailedError", outcome.describe()
        assert f"rank {victim} " in rank.error, outcome.describe()
        # Normally takes milliseconds. The limit allows for a busy machine.
        print(f"rank {rank.rank} raised after {1e3 * (rank.ended_at - killed):.0f} ms")
        assert rank.ended_at - killed < 5.0, outcome.describe()
