"""Planned rounds of `horovod.torch.DistributedOptimizer` on GPUs: gradients beside those of one process that has all
ranks' batches; declined plans, joined ranks, streams, ranks that fail.
"""

from __future__ import annotations

import os
import time
import warnings
from contextlib import nullcontext

import pytest

from support import devices, run_ranks, start_ranks
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(240), needs_one]

# The values of `horovod.torch.planned_reducer`, which only the ranks can import.
PLANNED, BY_NAME = 0, 1


def _start():
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.cuda.set_device(devices.own())
    # The products of both models must be the same.
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch, hvd, hvd.rank(), hvd.size()


def make_net(torch):
    """Returns a model with gradients that are packed and one of over 1 MiB, which is reduced in place."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 520), torch.nn.Tanh(), torch.nn.Linear(520, 520), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(520, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)).cuda()


class Twins:
    """A model with the distributed optimizer, and one that computes the average of all ranks' gradients by itself."""

    def __init__(self, torch, hvd, passes=1, tolerance=1e-5, **kwargs):
        self.torch, self.hvd, self.passes, self.tolerance = torch, hvd, passes, tolerance
        self.net, self.twin = make_net(torch), make_net(torch)
        inner = torch.optim.SGD(self.net.parameters(), lr=1e-4, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(
            inner, self.net.named_parameters(), backward_passes_per_step=passes, **kwargs
        )
        self.single = torch.optim.SGD(self.twin.parameters(), lr=1e-4, momentum=0.9)
        self.factor = 1.0 if kwargs.get("op") == hvd.Sum else 1.0 / hvd.size()
        self.count = 0

    def result(self):
        return self.optimizer._planned_reducer.vote_result

    def backward(self):
        torch = self.torch
        for _ in range(self.passes):
            self.count += 1
            for rank in range(self.hvd.size()):
                generator = torch.Generator().manual_seed(100 * rank + self.count)
                x = torch.randn(5, 16, generator=generator).cuda()
                # The gradients are late on the device, so that reading them too early is noticed.
                torch.cuda._sleep(2_000_000)
                if rank == self.hvd.rank():
                    self.net(x).square().sum().backward()
                (self.twin(x).square().sum() * self.factor).backward()

    def compare(self, between=lambda: None):
        self.optimizer.synchronize()
        between()
        for (name, mine), other in zip(self.net.named_parameters(), self.twin.parameters(), strict=True):
            difference = (mine.grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-3)
            assert difference < self.tolerance, (self.count, name, difference, self.result())
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.single.step()
        # The twins must not drift apart by rounding.
        with self.torch.no_grad():
            for mine, other in zip(self.net.parameters(), self.twin.parameters(), strict=True):
                other.copy_(mine)
        self.optimizer.zero_grad(set_to_none=self.count % 3 != 0)
        self.single.zero_grad()

    def step(self):
        self.backward()
        self.compare()

    def plan(self, steps=3):
        """Runs steps until the reducer's plan is ready, then `steps` more that must use the plan."""
        for _ in range(500):
            self.step()
            if self.result() == PLANNED:
                break
            time.sleep(0.01)
        for _ in range(steps):
            self.step()
            assert self.result() == PLANNED

    def forget_plan(self):
        """Drops the plan on this rank, so that this rank votes against it in the next round."""
        self.optimizer._planned_reducer._reducer = None


def planned_equals_one_process(torch, hvd):
    fp16, bf16 = hvd.Compression.fp16, hvd.Compression.bf16
    for options in (
        {},
        {"op": hvd.Sum},
        {"passes": 2},
        {"groups": 2},
        {"compression": fp16, "tolerance": 5e-3},
        {"compression": bf16, "tolerance": 4e-2, "passes": 2},
    ):
        pair = Twins(torch, hvd, **options)
        pair.step()
        assert pair.result() != PLANNED
        pair.plan()


def declined_plans(torch, hvd):
    """One rank is late and votes against the plan; the others have packed all buckets by then."""
    for options in ({}, {"compression": hvd.Compression.fp16, "tolerance": 5e-3}):
        pair = Twins(torch, hvd, **options)
        for _ in range(3):
            pair.plan(1)
            if hvd.rank() == hvd.size() - 1:
                pair.forget_plan()
                time.sleep(0.3)
            pair.step()
            assert pair.result() != PLANNED


def other_streams(torch, hvd, streamed):
    """Gradients that the thread of declined rounds submits, from the default stream or another one."""
    with torch.cuda.stream(torch.cuda.Stream()) if streamed else nullcontext():

        def meet_elsewhere():
            hvd.allreduce(torch.ones(3), name="elsewhere")

        for options in ({}, {"compression": hvd.Compression.fp16, "tolerance": 5e-3}):
            pair = Twins(torch, hvd, **options)
            for _ in range(2):
                pair.plan(1)
                if hvd.rank() == 0:
                    pair.forget_plan()
                    time.sleep(0.3)
                pair.backward()
                if hvd.rank() == 0:
                    pair.compare(meet_elsewhere)
                else:
                    meet_elsewhere()
                    pair.compare()
                assert pair.result() != PLANNED
        torch.cuda.current_stream().synchronize()


def parameters_on_two_devices(torch, hvd):
    """Most gradients are on the GPU and are planned; the others go by name, with a warning."""
    net, head = make_net(torch), torch.nn.Linear(4, 1)
    named = [*net.named_parameters(), *((f"head.{name}", each) for name, each in head.named_parameters())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in named], lr=0.0), named, op=hvd.Sum)
        # Computed apart, because gradients that go by name are reduced from their hooks on.
        twin = make_net(torch)
        output = twin(torch.ones(1, 16, device="cuda")).sum()
        expected = dict(zip(net.parameters(), torch.autograd.grad(output, list(twin.parameters())), strict=True))
        planned = 0
        while planned < 3:
            net(torch.ones(1, 16, device="cuda")).sum().backward()
            head(torch.full((1, 4), hvd.rank() + 1.0)).sum().backward()
            optimizer.step()
            for each, own in expected.items():
                assert torch.allclose(each.grad, own * hvd.size(), rtol=1e-5)
            assert (head.weight.grad == sum(range(1, hvd.size() + 1))).all()
            planned += optimizer._planned_reducer.vote_result == PLANNED
            optimizer.zero_grad()
            time.sleep(0.01)
    texts = [str(one.message) for one in caught if "a plan is for one device" in str(one.message)]
    assert len(texts) == 1, texts
    assert "2 parameters on cpu" in texts[0]


def joins(torch, hvd):
    """Ranks run out of data one after the other. The others reduce by name."""
    net = make_net(torch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    steps, planned = 40, 0
    for step in range(steps + 2 * hvd.rank()):
        optimizer.zero_grad()
        net(torch.full((1, 16), 0.1, device="cuda")).sum().backward()
        optimizer.step()
        planned += optimizer._planned_reducer.vote_result == PLANNED
        left = sum(step < steps + 2 * other for other in range(hvd.size()))
        assert abs(net[6].bias.grad.item() - left / hvd.size()) < 1e-5
        time.sleep(0.005)
    assert planned > 0
    assert hvd.join() == hvd.size() - 1


def all_rounds():
    torch, hvd, _, _ = _start()
    planned_equals_one_process(torch, hvd)
    declined_plans(torch, hvd)
    other_streams(torch, hvd, False)
    other_streams(torch, hvd, True)
    parameters_on_two_devices(torch, hvd)
    joins(torch, hvd)


def test_rounds():
    """Each rank asserts, in `all_rounds`."""
    run_ranks(all_rounds, NUM_RANKS, timeout=220)


def _planned_optimizer(torch, hvd):
    net = make_net(torch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    while optimizer._planned_reducer.vote_result != PLANNED:
        net(torch.ones(1, 16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def _fail_in_a_round():
    torch, hvd, rank, _ = _start()
    net, optimizer = _planned_optimizer(torch, hvd)

    def widen(parameter):
        parameter.grad.data = parameter.grad.data.double()

    if rank == 1:
        hook = net[0].weight.register_post_accumulate_grad_hook(widen)
    errors = []
    for _ in range(4):
        try:
            # A gradient that goes by name raises in its hook, in backward.
            net(torch.ones(1, 16, device="cuda")).sum().backward()
            optimizer.step()
        except (hvd.HorovodInternalError, TypeError) as error:
            errors.append(str(error))
        if rank == 1 and errors:
            hook.remove()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    return errors


def test_a_rank_whose_round_fails_is_named():
    """The others get an error in their next step, because their reductions have ended with undefined values."""
    errors = run_ranks(_fail_in_a_round, NUM_RANKS, timeout=120)
    assert "is a Double tensor" in errors[1][0], errors
    for rank in range(NUM_RANKS):
        assert rank == 1 or any("rank 1" in text for text in errors[rank]), errors


def _die_in_a_round():
    torch, hvd, rank, _ = _start()
    net, optimizer = _planned_optimizer(torch, hvd)
    net[0].weight.register_hook(lambda gradient: os._exit(9) if rank == 1 else time.sleep(1))
    try:
        for _ in range(3):
            net(torch.ones(1, 16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


@pytest.mark.timeout(90)
def test_a_dead_rank_in_a_round_is_named():
    with start_ranks(_die_in_a_round, NUM_RANKS, timeout=60) as job:
        outcome = job.wait()
    for rank in range(NUM_RANKS):
        assert rank == 1 or "rank 1 died" in (outcome.ranks[rank].value or ""), outcome.describe()


def _elastic_error():
    """In an elastic job, the step itself raises: the job may save its state after it."""
    torch, hvd, rank, _ = _start()
    net, optimizer = _planned_optimizer(torch, hvd)
    net[0].weight.register_hook(lambda gradient: os._exit(9) if rank == 1 else None)
    net(torch.ones(1, 16, device="cuda")).sum().backward()
    try:
        optimizer.step()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


@pytest.mark.timeout(90)
def test_an_elastic_step_with_a_dead_rank_raises():
    with start_ranks(_elastic_error, NUM_RANKS, env={"HOROVOD_ELASTIC": "1"}, timeout=60) as job:
        outcome = job.wait()
    for rank in range(NUM_RANKS):
        assert rank == 1 or "rank 1 died" in (outcome.ranks[rank].value or ""), outcome.describe()
