"""What `horovod.torch.DistributedOptimizer` reduces by plan is what it reduces by name, to the bit: on real ranks, every
gradient of every step, and every way in which a plan ceases to hold."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import warnings

import pytest

from support import Forked, run_ranks, start_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


# `horovod.torch.planned_reducer.PLANNED`, which only ranks can import.
PLANNED = 0


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
        """Whether the last step was reduced by plan."""
        return self.optimizer._planned_reducer.vote_result == PLANNED

    def plan(self, steps=3):
        """Steps until a plan is made, and `steps` that are reduced by it."""
        for _ in range(500):
            self.step()
            if self.is_planned():
                break
            time.sleep(0.01)
        for _ in range(steps):
            self.step()
            assert self.is_planned()

    def backward(self, layers=slice(None)):
        for _ in range(self.passes):
            self.count += 1
            generator = self.torch.Generator().manual_seed(100 * self.hvd.rank() + self.count)
            x = self.torch.randn(5, 6, generator=generator)
            for net in (self.net, self.twin):
                net[layers](x).square().sum().backward()

    def compare(self, between=lambda: None):
        """Ends the step, and compares every gradient. `between` is called before others have to compare theirs."""
        self.optimizer.synchronize()
        between()
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
            pair.step()
            assert not pair.is_planned()
            pair.plan()
    # Groups are a wish for what a plan does anyway; a factor of its own is left to names.
    Pair(torch, hvd, groups=2).plan()
    # Some ranks do not use all layers, other ones in each step.
    pair = Pair(torch, hvd)
    pair.plan()
    for step in range(6):
        pair.step(slice(0, 1) if step % size == rank else slice(None))
        assert pair.is_planned()
    # A step with nothing at all before it.
    pair.compare()


def plans_that_cease_to_hold():
    torch, hvd, rank, size = start()
    pair = Pair(torch, hvd)
    pair.plan()
    # Frozen everywhere, and thawed again: other plans.
    for is_thawed in (False, True):
        pair.net[2].weight.requires_grad_(is_thawed)
        pair.step()
        assert not pair.is_planned()
        pair.plan()
    # Another type.
    for net in (pair.net, pair.twin):
        net.double()
    torch.set_default_dtype(torch.float64)
    pair.plan()
    torch.set_default_dtype(torch.float32)
    # One rank makes a new optimizer: the others' plan is given up, and made again.
    pair = Pair(torch, hvd)
    pair.plan()
    if rank == size - 1:
        for hook in pair.optimizer._hooks:
            hook.remove()
        inner = torch.optim.SGD(pair.net.parameters(), lr=0.0)
        pair.optimizer = hvd.DistributedOptimizer(inner, pair.net.named_parameters())
    pair.step()
    assert not pair.is_planned()
    pair.plan()
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
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        hvd.start_timeline(path)
        pair.step()
        hvd.stop_timeline()
        if rank == 0:
            with open(path) as file:
                assert "0.weight" in file.read()
    pair.plan()
    # A part of the ranks.
    if size > 2:
        part = hvd.add_process_set([0, size - 1])
        if part.included():
            Pair(torch, hvd, process_set=part).plan()
        hvd.barrier()
    # Ranks run out of data one after the other: those that go on do it by name.
    net = make_net(torch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    for step in range(20 + 2 * rank):
        optimizer.zero_grad()
        net(torch.full((1, 6), 0.1)).sum().backward()
        optimizer.step()
        left = sum(step < 20 + 2 * other for other in range(size))
        assert abs(net[3].bias.grad.item() - left / size) < 1e-6
    assert hvd.join() == size - 1


def what_has_no_plan_goes_beside_it():
    torch, hvd, rank, size = start()
    # An embedding goes by name, also where it is in a group.
    for groups in (None, 1):
        table = torch.nn.Embedding(4, 6, sparse=True)
        net = torch.nn.Sequential(table, torch.nn.Linear(6, 1))
        torch.nn.init.ones_(net[1].weight)
        inner = torch.optim.SGD(net.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), op=hvd.Sum, groups=groups)
        used = torch.zeros(4)
        for other in range(size):
            used[other % 4] += 1
        planned = 0
        while planned < 3:
            optimizer.zero_grad()
            net(torch.tensor([rank % 4])).sum().backward()
            optimizer.step()
            planned += optimizer._planned_reducer.vote_result == PLANNED
            assert torch.equal(table.weight.grad.to_dense()[:, 0], used)
            assert torch.equal(net[1].bias.grad, torch.full((1,), float(size)))
    # A hook of the script's takes a gradient away, on one rank: it counts as zero there.
    pair = Pair(torch, hvd, op=hvd.Sum)
    pair.plan()

    def take_away(parameter):
        parameter.grad = None

    if rank == 1:
        pair.net[3].bias.register_post_accumulate_grad_hook(take_away)
    pair.backward()
    pair.optimizer.synchronize()
    assert pair.is_planned()
    assert not torch.equal(pair.net[3].bias.grad, pair.net[3].bias.grad * 0)


def ranks_meet_elsewhere():
    """What ranks do besides, in another order on each, goes on in every round: no rank waits for another to make a plan."""
    torch, hvd, rank, _ = start()
    pair = Pair(torch, hvd)
    planned = 0
    for step in range(500):
        pair.backward()
        for then in ("look", "step") if rank == 1 else ("step", "look"):
            if then == "look":
                hvd.allreduce(torch.ones(3), name=f"loss.{step}")
            else:
                pair.optimizer.step()
        pair.optimizer.zero_grad()
        planned += pair.is_planned()
        if planned == 3:
            return
        time.sleep(0.01)
    raise AssertionError("there was no plan")


def votes_end_while_ranks_are_elsewhere():
    """A rank that votes for its plan before the others vote against it has no more gradients then, and waits for what the others do
    only after their step."""
    torch, hvd, rank, _ = start()

    def meet_elsewhere():
        hvd.allreduce(torch.ones(3), name="elsewhere")

    for groups in (None, 2):
        pair = Pair(torch, hvd, groups=groups)
        for _ in range(3):
            pair.plan()
            if rank == 0:
                # Its next vote is against a plan.
                pair.optimizer._planned_reducer._reducer = None
                time.sleep(0.3)
            pair.backward()
            if rank == 0:
                pair.compare(meet_elsewhere)
            else:
                meet_elsewhere()
                pair.compare()
            assert not pair.is_planned()


def everything():
    """All in one job, since ranks take long to start."""
    equal_to_names()
    what_has_no_plan_goes_beside_it()
    ranks_meet_elsewhere()
    votes_end_while_ranks_are_elsewhere()
    plans_that_cease_to_hold()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
def test_rounds(size):
    """Asserted on each rank, in `everything`."""
    run_ranks(everything, size, launcher=Forked("torch"), env=ENV, timeout=100)


def _large_net(torch):
    """Of more than one bucket."""
    return torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(3)))


def _planned_optimizer(torch, hvd, net):
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    while optimizer._planned_reducer.vote_result != PLANNED:
        net(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _dies_in_a_round():
    torch, hvd, rank, _ = start()
    net = _large_net(torch)
    optimizer = _planned_optimizer(torch, hvd, net)
    # The others' last gradient comes when they know of the death: that is told by `step`, not by `backward`.
    net[0].weight.register_hook(lambda gradient: os._exit(9) if rank == 1 else time.sleep(1))
    net(torch.ones(1, 600)).sum().backward()
    try:
        optimizer.step()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


@pytest.mark.timeout(90)
def test_a_death_in_a_round_is_told():
    with start_ranks(_dies_in_a_round, 3, launcher=Forked("torch"), env=ENV, timeout=60) as job:
        outcome = job.wait()
    for rank in (0, 2):
        assert "rank 1 died" in (outcome.ranks[rank].value or ""), outcome.describe()


def _is_late_for_a_round():
    torch, hvd, rank, _ = start()
    net = _large_net(torch)
    optimizer = _planned_optimizer(torch, hvd, net)
    if rank == 1:
        net[0].weight.register_hook(lambda gradient: time.sleep(5))
    net(torch.ones(1, 600)).sum().backward()
    try:
        optimizer.step()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


@pytest.mark.timeout(90)
def test_a_round_that_stalls_ends():
    env = ENV | {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with start_ranks(_is_late_for_a_round, 2, launcher=Forked("torch"), env=env, timeout=60) as job:
        outcome = job.wait()
    # The late one comes to it in the end: only by the limit has it failed before.
    assert "round.end" in (outcome.ranks[0].value or ""), outcome.describe()


def _leaves_before_the_others_step():
    torch, hvd, rank, _ = start()
    net = _large_net(torch)
    optimizer = _planned_optimizer(torch, hvd, net)
    net(torch.ones(1, 600)).sum().backward()
    if rank == 1:
        time.sleep(2)
    optimizer.step()
    vote_result = optimizer._planned_reducer.vote_result
    hvd.shutdown()
    return vote_result


@pytest.mark.timeout(90)
def test_who_has_all_gradients_needs_nobody_to_step():
    assert run_ranks(_leaves_before_the_others_step, 2, launcher=Forked("torch"), env=ENV) == [PLANNED, PLANNED]


def _tunes():
    torch, hvd, _, _ = start()
    Pair(torch, hvd).plan(1)


@pytest.mark.timeout(90)
def test_sizes_are_tried_before_gradients_go_by_plan(tmp_path):
    log = tmp_path / "log.csv"
    tuning = {
        "AUTOTUNE": "1",
        "AUTOTUNE_LOG": str(log),
        "AUTOTUNE_STEPS_PER_SAMPLE": "1",
        "AUTOTUNE_WARMUP_SAMPLES": "0",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "6",
    }
    env = ENV | {f"HOROVOD_{name}": value for name, value in tuning.items()}
    run_ranks(_tunes, 2, launcher=Forked("torch"), env=env, timeout=80)
    # Six sizes, the columns before them, and what stays after them.
    assert len(log.read_text().splitlines()) == 8


def _cannot_have_a_reducer():
    torch, hvd, rank, _ = start()
    pair = Pair(torch, hvd)
    pending_reducer = torch.classes.smd.PendingReducer

    class Failing:
        def __init__(self, *arguments):
            self.made = pending_reducer(*arguments)

        def is_done(self):
            return self.made.is_done()

        def take(self):
            raise RuntimeError("there is no memory [smd:internal]")

    if rank == 1:
        torch.classes.smd.PendingReducer = Failing
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(40):
            pair.step()
            time.sleep(0.01)
    assert not pair.is_planned()
    return [str(one.message) for one in said if "one by one instead of in buckets" in str(one.message)]


@pytest.mark.timeout(90)
def test_a_reducer_that_cannot_be_made_is_told_once():
    first, second = run_ranks(_cannot_have_a_reducer, 2, launcher=Forked("torch"), env=ENV)
    assert first == []
    assert len(second) == 1
    assert "there is no memory" in second[0]
