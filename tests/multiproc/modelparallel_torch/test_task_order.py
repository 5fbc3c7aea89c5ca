"""Steps whose ranks make the same calls in different orders, compared with one process. A loop over a set of strings has
a different order in each process.
"""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

FORKED = Forked("torch")


def _model(dropout=0.0):
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Model(nn.Module):
        """Calls its branches in `order`, which the test sets to different values on each rank."""

        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleDict(
                {name: nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout)) for name in ("full", "local", "none")}
            )
            self.head = nn.Linear(6, 6)
            self.order = list(self.branches)
            for place, part in enumerate((*self.branches.values(), self.head)):
                smp.set_partition(part, place % smp.pp_size())

        def forward(self, x):
            first = {name: self.branches[name](x) for name in self.order}
            second = {name: self.branches[name](first[name] + place) for place, name in enumerate(sorted(first))}
            again = {name: self.branches[name](first["full"] * 2) for name in self.order}
            return self.head(
                sum((second[name] + again[name]) * (place + 1) for place, name in enumerate(sorted(again)))
            )

    torch.manual_seed(3)
    return Model()


def _order_body(reads_values, schedule, differs=()):
    import copy
    import itertools

    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.overlapped_run import OverlappedRun

    matched = []
    original = OverlappedRun.finish

    def finish(self, on_stage_done):
        microbatches = original(self, on_stage_done)
        matched.append(len(microbatches))
        return microbatches

    OverlappedRun.finish = finish
    torch.set_default_dtype(torch.float64)
    smp.init(
        {"partitions": 2, "microbatches": 4, "pipeline": schedule, "auto_partition": False, "default_partition": 0}
    )
    model = _model()
    alone = copy.deepcopy(model)
    model = smp.DistributedModel(model)
    orders = [["full", "local", "none"], ["none", "full", "local"]]

    calls = itertools.count()

    def body(model, backward, x):
        number, microbatch = divmod(next(calls), 4)
        out = model(x)
        if (number, microbatch) in differs:
            # As in the other microbatches so far, but not from here on.
            out = out + model(out * 2)
        if reads_values and float(out.detach().sum()) == 0.0:
            raise AssertionError("the body got made-up values")
        loss = (model(out) + out).square().mean()
        backward(loss)
        return loss, out

    @smp.step
    def step(model, x):
        return body(model, model.backward, x)

    worst = 0.0
    # The ranks swap their orders after three steps; in the last steps, both have the same order.
    for number, shift in enumerate((0, 0, 0, 1, 1, 1, None, None)):
        model.module.order = orders[0 if shift is None else (smp.pp_rank() + shift) % 2]
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        begin = next(calls)
        calls = itertools.count(begin)
        outputs = step(model, x)
        calls = itertools.count(begin)
        for place, piece in enumerate(x.chunk(4)):
            expected = body(alone, lambda loss: (loss / 4).backward(), piece)
            for ours, theirs in zip(outputs, expected, strict=True):
                worst = max(worst, (ours[place] - theirs).abs().max().item())
        reference = dict(alone.named_parameters())
        for path, parameter in model.local_named_parameters():
            worst = max(worst, (parameter.grad - reference[path].grad).abs().max().item())
            parameter.grad = None
        alone.zero_grad()
    return worst, matched


@pytest.mark.timeout(130)
@pytest.mark.parametrize("schedule", ["simple", "interleaved", "zero_bubble"])
def test_microbatches_that_differ_between_others_equal_one_process(schedule):
    # In the steps in which other microbatches overlap, and in the one in which the order changes.
    differs = [(1, 2), (2, 1), (3, 2), (4, 3), (5, 1), (6, 2), (7, 3)]
    for worst, matched in run_ranks(_order_body, 2, False, schedule, differs, launcher=FORKED, timeout=120):
        assert worst < 1e-12
        assert max(matched) in (2, 3)


@pytest.mark.timeout(130)
@pytest.mark.parametrize("reads_values", [False, True])
@pytest.mark.parametrize("schedule", ["simple", "interleaved", "zero_bubble"])
def test_different_orders_of_calls_equal_one_process(schedule, reads_values):
    for worst, matched in run_ranks(_order_body, 2, reads_values, schedule, launcher=FORKED, timeout=120):
        assert worst < 1e-12
        # From the second step on, microbatches run while later ones are recorded, except in a step in which the first
        # rank has another order than in the step before.
        assert matched == ([] if reads_values else [4, 4, 0, 4, 4, 0, 4])


def _random_body():
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.exceptions import SMPMismatchError

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = smp.DistributedModel(_model(dropout=0.5))

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    model.module.order = [["full", "local", "none"], ["none", "full", "local"]][smp.pp_rank()]
    try:
        step(model, torch.randn(4, 6))
    except SMPMismatchError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.timeout(130)
def test_random_calls_in_different_orders_raise_with_a_hint():
    texts = run_ranks(_random_body, 2, launcher=FORKED, timeout=120)
    assert texts[0] == texts[1]
    assert "run different steps" in texts[0]
    assert "in different orders" in texts[0]
    assert "sorted(..)" in texts[0]


def test_places_finds_the_order_of_the_first_rank():
    pytest.importorskip("torch")
    from smdistributed.modelparallel.torch.tracing.task_order import places

    free, kept = [(number, False) for number in range(4)], [(number, True) for number in range(4)]
    assert places(free[::-1], free) == [3, 2, 1, 0]
    # Equal tasks keep their order. Tasks are not moved across one that keeps its place.
    assert places([free[1], free[0], free[1]], [free[0], free[1], free[1]]) == [1, 0, 2]
    assert places([free[1], free[0], kept[2], free[3]], [free[0], free[1], kept[2], free[3]]) == [1, 0, 2, 3]
    assert places([free[0], kept[2], free[1]], [free[1], kept[2], free[0]]) is None
    assert places([free[0], kept[2]], [kept[2], free[0]]) is None
    assert places(free, free[:3]) is None
    assert places([], []) == []
