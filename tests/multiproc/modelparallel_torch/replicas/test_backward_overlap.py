"""With one partition, gradients are reduced during the last backward of a step; results equal one process."""

from __future__ import annotations

import itertools

import pytest

from support import Forked, RanksFailedError, run_ranks

FORKED = Forked("torch")


def _check_bodies(passes):
    import copy

    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.gradients import GradientReducer

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.table = nn.Embedding(5, 6, sparse=True)

        def forward(self, x, kind):
            hidden = self.first(x) + self.table.weight[0]
            if kind == "checkpointed":
                # Each of these backwards accumulates the gradient of the shared layer.
                hidden = checkpoint(self.shared, hidden, use_reentrant=True)
                hidden = checkpoint(self.shared, torch.tanh(hidden), use_reentrant=True)
            elif kind == "skipping":
                return hidden
            elif kind == "sparse":
                hidden = hidden + self.table(torch.tensor([1, 3, 1, 2]))
            return self.last(self.shared(hidden))

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    whole = Model()
    early = []
    original = GradientReducer.end_backward

    def end_backward(self):
        result = original(self)
        early.append(len(self._ready))
        return result

    GradientReducer.end_backward = end_backward
    for kind in ("plain", "two backwards", "checkpointed", "skipping", "sparse", "own backward"):
        smp.init({"microbatches": 2, "ddp": True})
        alone = copy.deepcopy(whole)
        model = smp.DistributedModel(
            copy.deepcopy(whole),
            backward_passes_per_step=passes,
            bucket_cap_mb=0.0005,
            average_grads_across_microbatches=False,
        )
        numbers = itertools.cycle(range(2))

        def run(model, x, backward, kind=kind, numbers=numbers):
            # Only the first microbatch uses all layers.
            path = "plain" if kind == "skipping" and next(numbers) == 0 else kind
            loss = model(x, path).square().mean()
            backward(loss)
            if kind == "two backwards":
                backward(model(x + 1, path).sin().sum())

        backward = torch.Tensor.backward if kind == "own backward" else model.backward

        @smp.step
        def step(model, x, run=run, backward=backward):
            run(model, x, backward)

        early.clear()
        for number in range(4):
            if number % passes == 0:
                for each in (*model.parameters(), *alone.parameters()):
                    each.grad = None
            x = torch.randn(smp.dp_size(), 8, 6, generator=torch.Generator().manual_seed(number))
            step(model, x[smp.dp_rank()])
            for replica in x:
                for piece in replica.chunk(2):
                    run(alone, piece, lambda loss: (loss / smp.dp_size()).backward())
            if (number + 1) % passes == 0:
                for (name, ours), theirs in zip(model.local_named_parameters(), alone.parameters(), strict=True):
                    assert (ours.grad is None) == (theirs.grad is None), name
                    if ours.grad is not None:
                        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense(), msg=f"{kind}: {name}")
        reducing = [count for count in early if count]
        # The first step is reduced at its end, as are backwards that the library does not see.
        wanted = 0 if kind == "own backward" else 3 if passes == 1 else 2
        assert len(reducing) == wanted, (kind, early)
        if kind == "plain":
            assert set(reducing) == {7}
        smp.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_reduced_during_the_backward_equal_one_process(passes):
    run_ranks(_check_bodies, 2, passes, launcher=FORKED)


def _late_body(kind):
    """In step 3, rank 1 changes gradients after the backward during which they are reduced."""
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 2, "ddp": True})
    layer = torch.nn.Linear(4, 4)
    model = smp.DistributedModel(torch.nn.Sequential(layer, torch.nn.Linear(4, 4)))
    is_late = False

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())
        if is_late and kind == "backward":
            model.backward(model(x).sum())
        elif is_late:
            next(model.parameters()).grad.mul_(2)

    for number in range(3):
        is_late = number == 2 and smp.rank() == 1
        step(model, torch.ones(4, 4))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["backward", "change"])
def test_gradients_that_change_after_their_reduction_began_are_an_error_on_all_ranks(kind):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_late_body, 2, kind, launcher=FORKED)
    others, own = (rank.error for rank in caught.value.outcome.ranks)
    assert "overlapping_allreduce=False" in own
    assert others is not None


def _varying_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(4, 4), overlapping_allreduce=False)

    @smp.step
    def step(model, x, count):
        for _ in range(count):
            model.backward(model(x).sum())

    found = []
    for count in (1, 1, 2, 1):
        model.zero_grad()
        step(model, torch.full((4, 4), 1.0 + smp.rank()), count)
        found.append(next(model.parameters()).grad[0, 0].item())
    return found


@pytest.mark.timeout(60)
def test_without_overlap_bodies_may_vary():
    assert run_ranks(_varying_body, 2, launcher=FORKED) == [[3.0, 3.0, 6.0, 3.0]] * 2
