"""An error of one rank between two collectives of a step: the other ranks raise it, and do not wait for their limit."""

from __future__ import annotations

import time

import pytest

from support import Forked, forks, run_ranks

FORKED = Forked("torch")
#: Seconds within which all ranks raise; the failing rank keeps running for longer.
SOON, LONGER = 5.0, 6.0


def _step_body(place, longer):
    """Raises in a call of this rank, without the end of its process; returns the rank, its error and the seconds."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.gradients import GradientReducer
    from smdistributed.modelparallel.torch.runtime.transfers import Transfers

    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, "auto_partition": False, "default_partition": 0})
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        if place == "broadcast":
            loss.item()
        model.backward(loss)
        return loss

    step(model, torch.ones(8, 4))

    def fail(*arguments):
        raise ArithmeticError("of this rank")

    if smp.rank() == 1:
        owner, name = {
            "begin": (GradientReducer, "begin"),
            "finish": (GradientReducer, "finish"),
            "broadcast": (Transfers, "broadcast"),
        }[place]
        setattr(owner, name, fail)
    begin = time.monotonic()
    with pytest.raises(Exception, match="rank") as caught:
        step(model, torch.ones(8, 4))
    seconds = time.monotonic() - begin
    if smp.rank() == 1:
        # Its end would end the waits of the others as well.
        time.sleep(max(longer - seconds, 0.0))
    return smp.rank(), str(caught.value), seconds


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["begin", "finish", "broadcast"])
def test_an_error_between_collectives_is_raised_on_all_ranks(place):
    longer = LONGER * forks.patience
    for rank, text, seconds in run_ranks(_step_body, 4, place, longer, launcher=FORKED, timeout=100):
        # A replica of the failing partition may see first that the reduction was cancelled.
        is_cancelled = place == "finish" and rank == 3 and "its round of gradients ended" in text
        assert is_cancelled or "of this rank" in text, (rank, text)
        assert rank == 1 or "rank 1 " in text, (rank, text)
        assert seconds < SOON * forks.patience, (rank, seconds)
