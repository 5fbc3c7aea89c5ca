"""What `horovod.torch.DistributedOptimizer` reduces by plan is what it reduces by name, to the bit: on real ranks, every
gradient of every step, and every way in which a plan ceases to hold."""

from __future__ import annotations

import importlib.util
import os
import tempfile

import pytest

from support import Forked, run_ranks, start_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def start():
    import torch

    import horovod.torch as hvd

    hvd.init()
    return torch, hvd, hvd.rank(), hvd.size()


def make_net(torch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 9), torch.nn.Linear(9, 1))


class Pair:
    """A model with the optimizer, and one whose gradients are reduced by name."""

    def __init__(self, torch, hvd, passes=1, compression=None, op=None, **kwargs):
        self.torch, self.hvd, self.passes = torch, hvd, passes
        self.compression, self.op = compression or hvd.Compression.none, hvd.Average if op is None else op
        self.net, self.twin = make_net(torch), make_net(torch)
        inner = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.optimizer = hvd.DistributedOptimizer(
            inner,
            self.net.named_parameters(),
            backward_passes_per_step=passes,
            compression=self.compression,
            op=self.op,
            **kwargs,
        )
        self.process_set = kwargs.get("process_set", hvd.global_process_set)
        self.count = 0

    def is_planned(self):
        return self.optimizer._rounds._reducer is not None

    def backward(self, layers=slice(None)):
        for _ in range(self.passes):
            self.count += 1
            generator = self.torch.Generator().manual_seed(100 * self.hvd.rank() + self.count)
            x = self.torch.randn(5, 6, generator=generator)
            for net in (self.net, self.twin):
                net[layers](x).square().sum().backward()

    def compare(self):
        """Ends the step, and compares every gradient."""
        self.optimizer.synchronize()
        for (name, mine), other in zip(self.net.named_parameters(), self.twin.parameters(), strict=True):
            if not mine.requires_grad:
                continue
            local = self.torch.zeros_like(other) if other.grad is None else other.grad
            small, ctx = self.compression.compress(local)
            reduced = self.hvd.allreduce(small, name=f"twin.{name}", op=self.op, process_set=self.process_set)
            reduced = self.compression.decompress(reduced, ctx)
            assert self.torch.equal(mine.grad, reduced), (self.count, name, (mine.grad - reduced).abs().max())
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.count % 3 != 0)
        self.twin.zero_grad()

    def step(self, layers=slice(None)):
        self.backward(layers)
        self.compare()


def equal_to_names():
    torch, hvd, rank, size = start()
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for op, passes in ((hvd.Average, 1), (hvd.Sum, 3)):
            pair = Pair(torch, hvd, passes, compression, op)
            for step in range(5):
                assert pair.is_planned() == (step > 0)
                pair.step()
    # Groups are a wish for what a plan does anyway; a factor of its own is left to names.
    pair = Pair(torch, hvd, groups=2)
    for _ in range(3):
        pair.step()
    assert pair.is_planned()
    # Some ranks do not use all layers, other ones in each step.
    pair = Pair(torch, hvd)
    for step in range(6):
        pair.step(slice(0, 1) if step % size == rank else slice(None))
    assert pair.is_planned()
    # A step with nothing at all before it.
    pair.compare()


def plans_that_cease_to_hold():
    torch, hvd, rank, size = start()
    pair = Pair(torch, hvd)
    for _ in range(2):
        pair.step()
    first = pair.optimizer._rounds._reducer
    # Frozen everywhere, and thawed again: other plans.
    pair.net[2].weight.requires_grad_(False)
    for _ in range(3):
        pair.step()
    assert pair.is_planned()
    assert pair.optimizer._rounds._reducer is not first
    pair.net[2].weight.requires_grad_(True)
    for _ in range(3):
        pair.step()
    assert pair.is_planned()
    # Another type.
    for net in (pair.net, pair.twin):
        net.double()
    torch.set_default_dtype(torch.float64)
    for _ in range(3):
        pair.step()
    torch.set_default_dtype(torch.float32)
    assert pair.is_planned()
    # One rank makes a new optimizer: the others' plan is given up, and made again.
    pair = Pair(torch, hvd)
    for step in range(6):
        if step == 3 and rank == size - 1:
            for hook in pair.optimizer._hooks:
                hook.remove()
            inner = torch.optim.SGD(pair.net.parameters(), lr=0.0)
            pair.optimizer = hvd.DistributedOptimizer(inner, pair.net.named_parameters())
        pair.step()
    assert pair.is_planned()
    # What a script may not do is refused as ever, and what it gives up ends.
    pair.backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward"):
        pair.optimizer.zero_grad()
    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step times"):
        pair.net(torch.ones(1, 6)).sum().backward()
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.optimizer.zero_grad()
    pair.twin.zero_grad()
    pair.step()
    # A timeline shows gradients by their names.
    for _ in range(2):
        pair.step()
    assert pair.is_planned()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        hvd.start_timeline(path)
        pair.step()
        hvd.stop_timeline()
        if rank == 0:
            with open(path) as file:
                assert "0.weight" in file.read()
    pair.step()
    assert pair.is_planned()
    # An embedding goes by name beside the plan of the rest.
    table = torch.nn.Embedding(4, 6, sparse=True)
    torch.nn.init.ones_(table.weight)
    net = torch.nn.Sequential(table, torch.nn.Linear(6, 1))
    torch.nn.init.ones_(net[1].weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.tensor([rank % 4])).sum().backward()
        optimizer.step()
        used = torch.zeros(4)
        for other in range(size):
            used[other % 4] += 1 / size
        assert torch.allclose(table.weight.grad.to_dense()[:, 0], used)
        assert torch.allclose(net[1].weight.grad, torch.ones(1, 6))
    assert optimizer._rounds._reducer is not None
    # A part of the ranks.
    if size > 2:
        part = hvd.add_process_set([0, size - 1])
        if part.included():
            pair = Pair(torch, hvd, process_set=part)
            for _ in range(3):
                pair.step()
            assert pair.is_planned()
        hvd.barrier()
    # Ranks run out of data one after the other: those that go on do it by name.
    net = make_net(torch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    for step in range(3 + 2 * rank):
        optimizer.zero_grad()
        net(torch.full((1, 6), 0.1)).sum().backward()
        optimizer.step()
        left = sum(step < 3 + 2 * other for other in range(size))
        assert abs(net[3].bias.grad.item() - left / size) < 1e-6
    assert hvd.join() == size - 1


def everything():
    """All in one job, since ranks take long to start."""
    equal_to_names()
    plans_that_cease_to_hold()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
def test_rounds(size):
    run_ranks(everything, size, launcher=Forked("torch"), env=ENV, timeout=100)


def _dies_in_a_round():
    torch, hvd, rank, _ = start()
    pair = Pair(torch, hvd)
    for step in range(50):
        if step == 3 and rank == 1:
            pair.net[0].weight.register_hook(lambda gradient: os._exit(9))
        pair.backward()
        try:
            pair.optimizer.synchronize()
        except hvd.HorovodInternalError as error:
            return str(error)
        with pair.optimizer.skip_synchronize():
            pair.optimizer.step()
        pair.optimizer.zero_grad()
    return None


@pytest.mark.timeout(90)
def test_a_death_in_a_round_is_told():
    with start_ranks(_dies_in_a_round, 3, launcher=Forked("torch"), env=ENV, timeout=60) as job:
        outcome = job.wait()
    for rank in (0, 2):
        assert "rank 1 died" in (outcome.ranks[rank].value or ""), outcome.describe()
