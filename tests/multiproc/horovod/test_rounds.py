"""Rounds of `horovod.torch.DistributedOptimizer`: gradients reduced in planned buckets equal those reduced by name.

Every gradient of every step is compared bitwise. Other tests invalidate the plan, kill or delay a rank in a round, and
make votes fail.
"""

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


# The value of `horovod.torch.planned_reducer.PLANNED`, which only the ranks can import.
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
    """A model with the distributed optimizer, and a twin whose gradients are reduced by name for comparison."""

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
        """Returns whether the last step was reduced by plan."""
        return self.optimizer._planned_reducer.vote_result == PLANNED

    def plan(self, steps=3):
        """Steps until the plan is ready (at most 500 steps), then `steps` times with it."""
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
        """Ends the step and compares every gradient. Calls `between` after the reduction and before the comparison."""
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


def planned_equals_by_name():
    torch, hvd, rank, size = start()
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for op, passes in ((hvd.Average, 1), (hvd.Sum, 3)):
            pair = Pair(torch, hvd, passes, compression, op)
            pair.step()
            assert not pair.is_planned()
            pair.plan()
    # `groups` asks for fusion, which a plan does anyway, so such an optimizer is planned too.
    Pair(torch, hvd, groups=2).plan()
    # In turn, one rank uses only the first layer.
    pair = Pair(torch, hvd)
    pair.plan()
    for step in range(6):
        pair.step(slice(0, 1) if step % size == rank else slice(None))
        assert pair.is_planned()
    # A step without a backward.
    pair.compare()


def invalidated_plans():
    torch, hvd, rank, size = start()
    pair = Pair(torch, hvd)
    pair.plan()
    # A parameter is frozen and thawed on all ranks: each change needs a new plan.
    for is_thawed in (False, True):
        pair.net[2].weight.requires_grad_(is_thawed)
        pair.step()
        assert not pair.is_planned()
        pair.plan()
    # The parameters get another dtype.
    for net in (pair.net, pair.twin):
        net.double()
    torch.set_default_dtype(torch.float64)
    pair.plan()
    torch.set_default_dtype(torch.float32)
    # One rank creates a new optimizer: all ranks drop their plan and make a new one.
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
    # Misuse still raises, and `load_state_dict` ends the round that has begun.
    pair.backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward"):
        pair.optimizer.zero_grad()
    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step times"):
        pair.net(torch.ones(1, 6)).sum().backward()
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.optimizer.zero_grad()
    pair.twin.zero_grad()
    pair.step()
    # While a timeline is written, it shows gradients by their names.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        hvd.start_timeline(path)
        pair.step()
        hvd.stop_timeline()
        if rank == 0:
            with open(path) as file:
                assert "0.weight" in file.read()
    pair.plan()
    # A process set of two ranks.
    if size > 2:
        part = hvd.add_process_set([0, size - 1])
        if part.included():
            Pair(torch, hvd, process_set=part).plan()
        hvd.barrier()
    # Ranks run out of data one after the other: the remaining ranks reduce by name.
    net = make_net(torch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    for step in range(20 + 2 * rank):
        optimizer.zero_grad()
        net(torch.full((1, 6), 0.1)).sum().backward()
        optimizer.step()
        left = sum(step < 20 + 2 * other for other in range(size))
        assert abs(net[3].bias.grad.item() - left / size) < 1e-6
    assert hvd.join() == size - 1


def gradients_outside_the_plan():
    torch, hvd, rank, size = start()
    # Sparse gradients of an embedding are reduced by name, also if `groups` is set.
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
    # A user's hook sets a gradient to None on one rank: it counts as zero there.
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


def other_collectives_in_different_orders():
    """Ranks call another collective before or after the optimizer's step, in different orders, without a deadlock.

    This holds in every round, also while the plan is made.
    """
    torch, hvd, rank, _ = start()
    pair = Pair(torch, hvd)
    planned = 0
    for step in range(500):
        pair.backward()
        for action in ("allreduce", "step") if rank == 1 else ("step", "allreduce"):
            if action == "allreduce":
                hvd.allreduce(torch.ones(3), name=f"loss.{step}")
            else:
                pair.optimizer.step()
        pair.optimizer.zero_grad()
        planned += pair.is_planned()
        if planned == 3:
            return
        time.sleep(0.01)
    raise AssertionError("no plan was made in 500 steps")


def votes_complete_while_ranks_wait_elsewhere():
    """Ranks vote for their plan, and rank 0 later votes against it, while ranks are in another collective.

    The other ranks wait in an all-reduce that rank 0 calls only after its step. The vote has to complete nevertheless.
    """
    torch, hvd, rank, _ = start()

    def meet_elsewhere():
        hvd.allreduce(torch.ones(3), name="elsewhere")

    for groups in (None, 2):
        pair = Pair(torch, hvd, groups=groups)
        for _ in range(3):
            pair.plan()
            if rank == 0:
                # Without a reducer, rank 0's next vote is against the plan.
                pair.optimizer._planned_reducer._reducer = None
                time.sleep(0.3)
            pair.backward()
            if rank == 0:
                pair.compare(meet_elsewhere)
            else:
                meet_elsewhere()
                pair.compare()
            assert not pair.is_planned()


def check_all():
    """Runs all checks in one job, because ranks take long to start."""
    planned_equals_by_name()
    gradients_outside_the_plan()
    other_collectives_in_different_orders()
    votes_complete_while_ranks_wait_elsewhere()
    invalidated_plans()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
def test_rounds(size):
    """The assertions are in `check_all`, which runs on each rank."""
    run_ranks(check_all, size, launcher=Forked("torch"), env=ENV, timeout=100)


def _large_net(torch):
    """Returns a model whose gradients fill more than one bucket."""
    return torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(3)))


def _planned_optimizer(torch, hvd, net):
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    while optimizer._planned_reducer.vote_result != PLANNED:
        net(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _die_in_a_round():
    torch, hvd, rank, _ = start()
    net = _large_net(torch)
    optimizer = _planned_optimizer(torch, hvd, net)
    # The other ranks compute their last gradient after they have been told of the death. The error is raised by `step`,
    # not by `backward`.
    net[0].weight.register_hook(lambda gradient: os._exit(9) if rank == 1 else time.sleep(1))
    net(torch.ones(1, 600)).sum().backward()
    try:
        optimizer.step()
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


@pytest.mark.timeout(90)
def test_a_dead_rank_in_a_round_is_named():
    with start_ranks(_die_in_a_round, 3, launcher=Forked("torch"), env=ENV, timeout=60) as job:
        outcome = job.wait()
    for rank in (0, 2):
        assert "rank 1 died" in (outcome.ranks[rank].value or ""), outcome.describe()


def _delay_a_round():
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
def test_a_stalled_round_times_out():
    env = ENV | {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with start_ranks(_delay_a_round, 2, launcher=Forked("torch"), env=env, timeout=60) as job:
        outcome = job.wait()
    # Rank 1 is only late and enters the round in the end, so the error can come only from the stall timeout.
    assert "round.end" in (outcome.ranks[0].value or ""), outcome.describe()


def _leave_before_the_others_step():
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
def test_a_rank_with_all_gradients_steps_and_leaves_before_the_others():
    assert run_ranks(_leave_before_the_others_step, 2, launcher=Forked("torch"), env=ENV) == [PLANNED, PLANNED]


def _autotune():
    torch, hvd, _, _ = start()
    Pair(torch, hvd).plan(1)


@pytest.mark.timeout(90)
def test_autotuning_precedes_planned_reductions(tmp_path):
    log = tmp_path / "log.csv"
    tuning = {
        "AUTOTUNE": "1",
        "AUTOTUNE_LOG": str(log),
        "AUTOTUNE_STEPS_PER_SAMPLE": "1",
        "AUTOTUNE_WARMUP_SAMPLES": "0",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "6",
    }
    env = ENV | {f"HOROVOD_{name}": value for name, value in tuning.items()}
    run_ranks(_autotune, 2, launcher=Forked("torch"), env=env, timeout=80)
    # A header line, six sampled sizes, and the size that is chosen.
    assert len(log.read_text().splitlines()) == 8


def _fail_to_make_a_reducer():
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            pair.step()
            time.sleep(0.01)
    assert not pair.is_planned()
    return _warnings_of(caught)


def _warnings_of(caught):
    return [str(one.message) for one in caught if "one by one instead of in buckets" in str(one.message)]


def _reduce_by_name():
    """Returns the warnings of optimizers whose gradients are never in buckets, and of one whose are."""
    torch, hvd, _, _ = start()

    class Own(hvd.Compression.none):
        pass

    texts = []
    for case in ("buckets", "factor", "compression", "types", "changes"):
        options = {"factor": {"gradient_predivide_factor": 2.0}, "compression": {"compression": Own}}.get(case, {})
        net = make_net(torch)
        if case == "types":
            net[2].bfloat16()
            options = {"compression": hvd.Compression.fp16}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), **options
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(30):
                # One half of the layers trains in each step, as in an adversarial network.
                net[0].requires_grad_(case != "changes" or step % 2 == 0)
                inner = net[1](net[0](torch.ones(2, 6)))
                net[3](net[2](inner.to(net[2].weight.dtype)).float()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.005)
        texts.append(_warnings_of(caught))
    return texts


@pytest.mark.timeout(90)
def test_gradients_that_are_never_in_buckets_warn_once():
    for plain, *others in run_ranks(_reduce_by_name, 2, launcher=Forked("torch"), env=ENV):
        assert plain == []
        assert [len(each) for each in others] == [1, 1, 1, 1], others
        reasons = ("`gradient_predivide_factor`", "of the script's own", "torch.bfloat16", "20 steps in a row")
        for (text,), reason in zip(others, reasons, strict=True):
            assert reason in text


@pytest.mark.timeout(90)
def test_a_failed_reducer_warns_once():
    first, second = run_ranks(_fail_to_make_a_reducer, 2, launcher=Forked("torch"), env=ENV)
    # The other rank learns only that the votes decline its plan.
    assert len(first) == 1
    assert "differed between ranks" in first[0]
    assert len(second) == 1
    assert "there is no memory" in second[0]
