"""With one partition, gradients are reduced during the last backward of a step; results equal one process."""

from __future__ import annotations

import itertools

import pytest

from support import Forked, run_ranks

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
        # In the second step, accumulations are counted. Backwards that the library does not see are never overlapped.
        wanted = 0 if kind == "own backward" else 2 if passes == 1 else 1
        assert len(reducing) == wanted, (kind, early)
        if kind == "plain":
            assert set(reducing) == {7}
        smp.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_reduced_during_the_backward_equal_one_process(passes):
    run_ranks(_check_bodies, 2, passes, launcher=FORKED)


def _check_late_changes(kind):
    """In some steps, rank 1 changes gradients after the backward during which they were reduced."""
    import copy

    import torch

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    whole = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    alone = copy.deepcopy(whole)
    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(whole)
    numbers, is_late, seen = iter(()), False, []

    @smp.step
    def step(model, x, backward_of=model.backward):
        backward_of(model(x).square().mean())
        if next(numbers) == 1:
            seen.append(next(model.parameters()).grad.norm().item())
            if is_late and kind == "backward":
                backward_of(model(x + 1).sin().mean())
            elif is_late:
                for parameter in model.parameters():
                    parameter.grad.mul_(2)

    for number in range(8):
        model.zero_grad()
        alone.zero_grad()
        is_late, numbers = number in (3, 4, 7) and smp.rank() == 1, iter(range(2))
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(number))
        step(model, x[smp.rank()])
        for replica in range(2):
            pieces = x[replica].chunk(2)
            for piece in pieces:
                (alone(piece).square().mean() / 4).backward()
            if number in (3, 4, 7) and replica == 1 and kind == "backward":
                (alone(pieces[1] + 1).sin().mean() / 4).backward()
        # In step 4 the gradients are not reduced during the backward, because they changed after it in step 3.
        factor = {3: 1.5, 7: 1.5}.get(number, 1.0) if kind == "change" else 1.0
        if number == 4 and kind == "change":
            continue
        for ours, theirs in zip(model.local_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad * factor, rtol=1e-12, atol=1e-14)
        # What the body reads is reduced, or it is not, but it is nothing between.
        everywhere = smp.allgather(seen[-1], smp.WORLD)
        assert (everywhere[0] == everywhere[1]) == (number in (2, 3, 6, 7)), (number, everywhere)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["backward", "change"])
def test_gradients_that_change_after_their_reduction_are_averaged_again(kind):
    run_ranks(_check_late_changes, 2, kind, launcher=FORKED)


def _check_functions():
    """Two step functions take turns; the gradients of a step are freed before the next one."""
    import gc
    import weakref

    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.gradients import GradientReducer

    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(4, 4))
    early, again = [], []
    original = GradientReducer.end_backward
    GradientReducer.end_backward = lambda self: (early.append(1), original(self))[1]
    GradientReducer.reduce_again = lambda self: again.append(1)

    @smp.step
    def once(model, x):
        model.backward(model(x).sum())

    @smp.step
    def twice(model, x):
        model.backward(model(x).sum())
        model.backward(model(x).sum())

    for number in range(4):
        for function, factor in ((once, 1), (twice, 2)):
            model.zero_grad()
            function(model, torch.full((4, 4), 1.0 + smp.rank()))
            gradient = next(model.parameters()).grad
            assert gradient[0, 0].item() == 3.0 * factor, number
            kept = weakref.ref(gradient)
            del gradient
            model.zero_grad()
            gc.collect()
            assert kept() is None
    # The first call of a function that finds the reducer counts accumulations.
    assert (len(early), len(again)) == (2 + 3, 0)


@pytest.mark.timeout(60)
def test_each_step_function_has_its_own_backwards():
    run_ranks(_check_functions, 2, launcher=FORKED)


def _check_clipping():
    """A body that clips in every step is never overlapped, so that it clips each replica's own gradients."""
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 1, "ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(4, 4, bias=False))

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for _ in range(4):
        model.zero_grad()
        step(model, torch.full((4, 4), 1.0 + smp.rank()))
        assert abs(next(model.parameters()).grad.norm().item() - 1.0) < 1e-5


@pytest.mark.timeout(60)
def test_bodies_that_clip_are_reduced_at_the_end():
    run_ranks(_check_clipping, 2, launcher=FORKED)


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
