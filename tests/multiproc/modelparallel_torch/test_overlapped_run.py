"""Forwards overlap with the recording of later microbatches; results equal one process, even if microbatches differ."""

from __future__ import annotations

import itertools
import os
import time
import warnings

import pytest

from support import Forked, run_ranks

FORKED = Forked("torch")


def _check_training(partitions, schedule, ends_alike, has_collectives=False):
    """Trains five steps; unless ``ends_alike``, microbatch 2 of step 3 calls a layer twice.

    With ``has_collectives``, the ranks exchange something in each body, which they reach at different times.
    """
    import random

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.overlapped_run import OverlappedRun

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

        def forward(self, x, again):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.layers[-1](x) if again else x

    def build():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        return Model()

    def again(step, microbatch):
        return not ends_alike and step == 3 and microbatch == 2

    def batch(step):
        return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))

    alone = build()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    expected = []
    for step in range(5):
        optimizer.zero_grad()
        losses = []
        for microbatch, part in enumerate(batch(step).chunk(4)):
            losses.append(alone(part, again(step, microbatch)).square().mean())
            (losses[-1] / 4).backward()
        optimizer.step()
        expected.append(torch.stack(losses).detach())

    overlapped = []
    original = OverlappedRun.finish

    def finish(self, on_stage_done):
        begun = self._program.place
        microbatches = original(self, on_stage_done)
        overlapped.append((len(microbatches), begun))
        return microbatches

    OverlappedRun.finish = finish
    smp.init({"partitions": partitions, "microbatches": 4, "pipeline": schedule, "auto_partition": False,
              "default_partition": 0})  # fmt: skip
    module = build()
    for place, layer in enumerate(module.layers):
        smp.set_partition(layer, place * partitions // 4)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    calls = iter(())

    @smp.step
    def step_function(model, x):
        if has_collectives:
            time.sleep(delays.random() / 50)
            assert smp.allgather(smp.rank(), smp.PP_GROUP) == list(range(partitions))
        loss = model(x, next(calls)).square().mean()
        model.backward(loss)
        return loss

    delays = random.Random(smp.rank())
    for step in range(5):
        calls = iter([again(step, microbatch) for microbatch in range(4)])
        optimizer.zero_grad()
        found = torch.stack(list(step_function(model, batch(step))))
        optimizer.step()
        torch.testing.assert_close(found, expected[step], rtol=1e-12, atol=1e-12)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, alone.get_parameter(name), rtol=1e-12, atol=1e-12)
    counts = [count for count, _ in overlapped]
    # Microbatches per overlapped step: step 0 does not overlap. Unless `ends_alike`, step 3 overlaps only up to the
    # differing microbatch, and step 4 does not overlap.
    assert counts == ([4] * 4 if ends_alike else [4, 4, 2]), overlapped
    assert all(begun > 0 for _, begun in overlapped), "no task ran while microbatches were recorded"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("partitions", [2, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "simple", "zero_bubble"])
def test_overlapped_microbatches_equal_one_process(partitions, schedule):
    run_ranks(_check_training, partitions, partitions, schedule, True, launcher=FORKED)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("partitions", [2, 4])
def test_bodies_with_collectives_equal_one_process(partitions):
    run_ranks(_check_training, partitions, partitions, "interleaved", True, True, launcher=FORKED)


@pytest.mark.timeout(120)
def test_a_differing_microbatch_equals_one_process():
    run_ranks(_check_training, 2, 2, "interleaved", False, launcher=FORKED)


def _check_evaluation():
    """Evaluates between the steps of a training, with and without gradient mode, and by the function that trains."""
    import copy

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.overlapped_run import OverlappedRun

    smp.init({"partitions": 2, "microbatches": 3, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 2)).double()
    alone = copy.deepcopy(module).eval()
    smp.set_partition(module[2], 1)
    x = torch.randn(9, 4, dtype=torch.float64)
    expected = alone(x).detach()
    model = smp.DistributedModel(module)
    counts = []
    original = OverlappedRun.finish

    def finish(self, on_stage_done):
        microbatches = original(self, on_stage_done)
        counts.append(len(microbatches))
        return microbatches

    OverlappedRun.finish = finish
    trains = False

    @smp.step
    def step(model, x):
        output = model(x)
        if trains:
            model.backward(output.square().mean())
        return output

    @smp.step
    @torch.no_grad()
    def evaluate(model, x):
        return model(x)

    model.eval()
    for function in (step, evaluate):
        counts.clear()
        for _ in range(3):
            torch.testing.assert_close(torch.cat(list(function(model, x))), expected)
        # The first call of a function is recorded as a whole.
        assert counts == [3, 3], counts
    # The expectation has no backward, so the first microbatch differs.
    trains = True
    counts.clear()
    for _ in range(3):
        torch.testing.assert_close(torch.cat(list(step(model, x))), expected)
    assert counts == [0, 3, 3], counts
    gradients = [parameter.grad for parameter in model.local_parameters()]
    (alone(x).square().mean() * 3).backward()
    for gradient, parameter in zip(gradients, alone[0 if smp.pp_rank() == 0 else 2].parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.timeout(60)
def test_steps_without_a_backward_overlap():
    run_ranks(_check_evaluation, 2, launcher=FORKED)


def _unsplit_body():
    """Returns the warnings of a zero-bubble pipeline, and how often a rank could not split a backward."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed import _core

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), x.t() @ gradient

    class Own(torch.nn.Linear):
        def forward(self, x):
            return Product.apply(x, self.weight)

    smp.init({"partitions": 2, "microbatches": 4, "pipeline": "zero_bubble", "auto_partition": False,
              "default_partition": 0})  # fmt: skip
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), Own(4, 4))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, torch.ones(8, 4))
    ((_, _, counts),) = _core.running_fallbacks(os.getpid())
    return [str(one.message) for one in caught], dict(counts)


@pytest.mark.timeout(60)
def test_backwards_that_zero_bubble_cannot_split_are_told():
    (_, first), ((text,), second) = run_ranks(_unsplit_body, 2, launcher=FORKED)
    assert "ProductBackward, weight of shape [4, 4]" in text
    assert first.get("backward_not_split", 0) == 0
    assert second["backward_not_split"] == 8


def _warnings_of_steps_body():
    """Returns the warnings of steps that are not overlapped, and of one that is."""
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Dropout())
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    microbatches = itertools.count()

    @smp.step
    def plain(model, x):
        loss = model(x).square().mean()
        model.backward(loss)

    @smp.step
    def with_seeds(model, x):
        torch.manual_seed(1)
        loss = model(x).square().mean()
        model.backward(loss)

    @smp.step
    def unlike(model, x):
        loss = model(x).square().mean() * (1.0 + next(microbatches) % 4)
        model.backward(loss)

    texts = []
    for step in (plain, with_seeds, unlike):
        microbatches = itertools.count()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                step(model, torch.ones(8, 4))
        texts.append([str(one.message) for one in caught])
    return texts


@pytest.mark.timeout(60)
def test_steps_that_are_not_overlapped_warn_once():
    for plain, with_seeds, unlike in run_ranks(_warnings_of_steps_body, 2, launcher=FORKED):
        assert plain == []
        (text,) = with_seeds
        assert "recorded completely before its first microbatch runs" in text
        assert "its body seeds or restores generators" in text
        (text,) = unlike
        assert "go through the pipeline one after the other" in text


def _check_failure():
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    calls = []

    @smp.step
    def step(model, x):
        calls.append(1)
        if len(calls) == 7:
            raise ValueError("of the body")
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(8, 4))
    with pytest.raises(ValueError, match="of the body"):
        step(model, torch.ones(8, 4))
    model.zero_grad()
    step(model, torch.ones(8, 4))
    assert any(parameter.grad is not None for parameter in model.local_parameters())


@pytest.mark.timeout(120)
def test_the_pipeline_works_after_a_step_raised():
    run_ranks(_check_failure, 2, launcher=FORKED)


def _caught_error_body():
    """A module fails while a body reads a value, and the body catches the error; returns what the step raises."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    fails, calls, caught = [], [], []

    class Part(nn.Linear):
        def forward(self, x):
            if fails:
                raise ArithmeticError("of the module")
            return super().forward(x)

    smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    module = nn.Sequential(nn.Linear(4, 4), Part(4, 4))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, x):
        calls.append(1)
        # Reads in the second microbatch of the second call, while nothing of the first microbatch has run.
        if len(calls) == 6:
            for _ in range(2):
                try:
                    model.module[0].weight.sum().item()
                except Exception as error:
                    caught.append(str(error))
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(8, 4))
    fails.append(1)
    begin = time.monotonic()
    with pytest.raises(Exception, match="of the module") as raised:
        step(model, torch.ones(8, 4))
    assert time.monotonic() - begin < 20
    return len(calls), caught, str(raised.value)


@pytest.mark.timeout(120)
def test_an_error_that_the_body_catches_is_raised_by_the_step():
    for calls, caught, text in run_ranks(_caught_error_body, 2, launcher=FORKED):
        assert calls == 6, "no body runs after the one that has caught the error"
        assert len(caught) == 2
        assert all("of the module" in each for each in [*caught, text]), (caught, text)


def _groups_body():
    """Returns the groups that each of two jobs of one process has made, and those that it has left behind."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed import _core
    from smdistributed.dataparallel.torch import distributed as dist

    made, removed = [], []
    new_group, remove_group = dist.new_group, _core.remove_group

    def making(ranks=None):
        group = new_group(ranks)
        made.append(group.id)
        return group

    def removing(number):
        remove_group(number)
        removed.append(number)

    dist.new_group, _core.remove_group = making, removing
    found = []
    for _ in range(2):
        smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for _ in range(3):
            step(model, torch.ones(8, 4))
        # On a device, messages have a channel for each direction.
        transfers = model.pipeline.transfers
        for key in ((0, 1), (1, 0)):
            transfers._channels[key] = dist.new_group([0, 1])
        assert transfers._comparison_group is not None, "steps overlap"
        smp.shutdown()
        found.append((len(made), sorted(set(made) - set(removed))))
    return found


@pytest.mark.timeout(120)
def test_shutdown_removes_the_groups_of_the_pipeline():
    for first, second in run_ranks(_groups_body, 2, launcher=FORKED):
        assert first[1] == second[1] == [], (first, second)
        assert second[0] == 2 * first[0] > 3


def _check_draws_and_autocast():
    """Steps that overlap have the bits of steps that do not: losses, gradients, and the state of the generators."""
    import contextlib
    import random

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.overlapped_run import OverlappedRun
    from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline

    begun = []
    original, expectation = OverlappedRun.finish, Pipeline.expectation

    def finish(self, on_stage_done):
        begun.append(self._program.place)
        return original(self, on_stage_done)

    def nothing_expected(self, step):
        self.refresh()

    OverlappedRun.finish = finish

    def autocast(enabled):
        return contextlib.nullcontext() if enabled is None else torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    def train(schedule, outside, inside, special, overlaps):
        Pipeline.expectation = expectation if overlaps else nothing_expected
        smp.init({"partitions": 2, "microbatches": 4, "pipeline": schedule, "auto_partition": False,
                  "default_partition": 0})  # fmt: skip
        torch.manual_seed(1)
        random.seed(1)
        module = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.LayerNorm(6)) for _ in range(4)))
        for place, layer in enumerate(module):
            smp.set_partition(layer, place // 2)
        model = smp.DistributedModel(module)
        own, place = nn.Parameter(torch.randn(6, 6)), 0

        @smp.step
        def step(model, x):
            nonlocal place
            place += 1
            is_chosen = number == 2 and place % 4 == 3
            state = torch.get_rng_state()
            with torch.enable_grad() if special == "without gradients outside" else contextlib.nullcontext():
                if special == "casts of the body":
                    with autocast(True):
                        x = (x @ own).detach().float()
                    with torch.no_grad():
                        own.mul_(0.9)
                if special == "writes" and is_chosen:
                    with torch.no_grad():
                        model.module[0][0].weight.mul_(0.5)
                with autocast(inside), torch.random.fork_rng(enabled=special == "forks" and is_chosen):
                    output = model(x)
                loss = output.float().square().sum()
                model.backward(loss)
            if special == "restores" and is_chosen:
                torch.set_rng_state(state)
            numbers.append(torch.tensor(random.random()))
            return loss

        found, numbers = [], []
        for number in range(4):
            if number != 2:
                model.zero_grad()
            x = torch.randn(8, 6)
            with autocast(outside), torch.set_grad_enabled(special != "without gradients outside"):
                found.append(torch.stack(list(step(model, x))))
            found += [parameter.grad.clone() for parameter in model.local_parameters()]
        smp.shutdown()
        return [*found, *numbers, torch.rand(2), torch.tensor(random.random())]

    for case in (
        ("interleaved", None, None, ""),
        ("zero_bubble", None, True, ""),
        ("interleaved", True, None, ""),
        ("interleaved", True, False, ""),
        ("interleaved", None, True, "casts of the body"),
        ("interleaved", None, True, "writes"),
        ("interleaved", None, True, "without gradients outside"),
        ("interleaved", None, None, "forks"),
        ("zero_bubble", None, None, "restores"),
    ):
        expected = train(*case, False)
        begun.clear()
        found = train(*case, True)
        # After a step that differs, the next one does not overlap.
        assert len(begun) == (2 if case[-1] in ("writes", "forks", "restores") else 3), (case, begun)
        assert all(begun), "no task ran while microbatches were recorded"
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs), case


@pytest.mark.timeout(120)
def test_steps_with_dropout_or_autocast_overlap():
    run_ranks(_check_draws_and_autocast, 2, launcher=FORKED)


def _check_casts_of_inputs():
    """Autocast casts what one process casts: an input for each layer that takes it, and a weight after it changes."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                self.other.weight.mul_(0.5)
            return torch.tanh(self.one(x)) * self.other(x)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 8), Both())

    def loss_of(model, ids):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ids)
        return output.float().square().mean()

    @smp.step
    def step(model, ids):
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    ids = torch.randint(0, 9, (6, 3), generator=torch.Generator().manual_seed(2))
    module, alone = build(), build()
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    for _ in range(3):
        for each in (model, alone):
            each.zero_grad()
        expected = [loss_of(alone, part) for part in ids.chunk(2)]
        for loss in expected:
            (loss / 2).backward()
        assert torch.equal(torch.stack(list(step(model, ids))), torch.stack(expected).detach())
        for name, parameter in model.local_named_parameters():
            assert torch.equal(parameter.grad, alone.get_parameter(name).grad), name


@pytest.mark.timeout(120)
def test_autocast_casts_as_in_one_process():
    run_ranks(_check_casts_of_inputs, 2, launcher=FORKED)


def _check_autocast_of_bodies():
    """Bodies with several regions of autocast have the losses and gradients of one process, in each call."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    made_before = torch.autocast("cpu", torch.bfloat16)
    own = nn.Parameter(torch.ones(6, 6))

    def two_types(model, weight, x):
        with torch.autocast("cpu", torch.bfloat16):
            first = model(x)
        with torch.autocast("cpu", torch.float16):
            return first.float() + model(x).float()

    def write_between(model, weight, x):
        with torch.autocast("cpu", torch.bfloat16):
            first = model(x)
        with torch.no_grad():
            weight.mul_(0.9)
        with torch.autocast("cpu", torch.bfloat16):
            return first.float() + model(x).float()

    def changes_its_own(model, weight, x):
        with made_before:
            x = (x @ own).detach().float()
        with torch.no_grad():
            own.mul_(0.5)
        with made_before:
            return model(x).float()

    def build():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    for body in (two_types, write_between, changes_its_own):
        smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0})
        module, alone = build(), build()
        smp.set_partition(module[2], 1)
        model = smp.DistributedModel(module)

        @smp.step
        def step(model, x, body=body):
            loss = body(model, model.module[0].weight, x).square().mean()
            model.backward(loss)
            return loss

        for _ in range(3):
            for each in (model, alone):
                each.zero_grad()
            with torch.no_grad():
                own.fill_(1.0)
            found = torch.stack(list(step(model, x)))
            with torch.no_grad():
                own.fill_(1.0)
            expected = []
            for part in x.chunk(4):
                expected.append(body(alone, alone[0].weight, part).square().mean())
                (expected[-1] / 4).backward()
            torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=1e-3, atol=1e-6, msg=body.__name__)
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(
                    parameter.grad, alone.get_parameter(name).grad, rtol=2e-2, atol=1e-4, msg=f"{body.__name__} {name}"
                )
        smp.shutdown()


@pytest.mark.timeout(120)
def test_regions_of_autocast_in_bodies_equal_one_process():
    run_ranks(_check_autocast_of_bodies, 2, launcher=FORKED)
