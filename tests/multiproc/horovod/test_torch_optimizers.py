"""`horovod.torch.DistributedOptimizer` compared with one process, and steps in which ranks have different gradients."""

from __future__ import annotations

import importlib.util

import pytest

from support import Forked, run_ranks
from support.horovod_ranks import ENV, raises, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def optimizers():
    torch, hvd, rank, size = start("torch")

    def model(seed=0):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3), torch.nn.Linear(3, 1))

    def batches(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(size * 4, 4, generator=generator), torch.randn(size * 4, 1, generator=generator)

    def trained(make, steps=3):
        ours, theirs = model(rank), model(0)
        hvd.broadcast_parameters(ours.state_dict(), 0)
        single = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        optimizer = make(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours)
        for step in range(steps):
            x, y = batches(step)
            mine = slice(4 * rank, 4 * rank + 4)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ours(x[mine]), y[mine]).backward()
            optimizer.step()
            single.zero_grad()
            torch.nn.functional.mse_loss(theirs(x), y).backward()
            single.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()
        return optimizer

    plain = trained(lambda optimizer, net: hvd.DistributedOptimizer(optimizer, net.named_parameters()))
    assert isinstance(plain, torch.optim.SGD)
    assert type(plain).__name__ == "SGD"
    trained(lambda optimizer, net: hvd.DistributedOptimizer(optimizer))
    trained(lambda optimizer, net: hvd.DistributedOptimizer(optimizer, net.named_parameters(), groups=2))
    trained(
        lambda optimizer, net: hvd.DistributedOptimizer(
            optimizer, groups=[list(net.parameters())[:3]], gradient_predivide_factor=2.0
        )
    )
    trained(
        lambda optimizer, net: hvd.DistributedOptimizer(
            optimizer, net.named_parameters(), gradient_predivide_factor=float(size)
        )
    )
    # Gradients are summed over two backward passes.
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), backward_passes_per_step=2
    )
    before = net[0].bias.detach().clone()
    for _ in range(2):
        net(torch.ones(1, 4) * (rank + 1)).sum().backward()
    if size > 1:
        raises(
            AssertionError,
            "Gradients were computed more than backward_passes_per_step times",
            lambda: net(torch.ones(1, 4)).sum().backward(),
        )
        raises(AssertionError, "zero_grad\\(\\) was called after loss.backward", optimizer.zero_grad)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(before - net[0].bias, net[0].bias.grad)
    alone = model()
    for other in range(size):
        (alone(torch.ones(1, 4) * (other + 1)).sum() * 2 / size).backward()
    assert torch.allclose(net[0].bias.grad, alone[0].bias.grad)
    assert torch.allclose(net[0].weight.grad, alone[0].weight.grad)
    # A parameter group that is added later, and a frozen parameter in a group.
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([net[0].weight, net[0].bias], lr=1.0, weight_decay=0.1), groups=1
    )
    optimizer.add_param_group({"params": [net[2].weight]})
    net[0].bias.requires_grad_(False)
    frozen = net[0].bias.detach().clone()
    net(torch.ones(1, 4) * (rank + 1)).sum().backward()
    optimizer.step()
    assert torch.equal(net[0].bias, frozen)
    for weight in (net[0].weight, net[2].weight):
        assert len(set(hvd.allgather_object(tuple(weight.detach().flatten().tolist())))) == 1
    # A parameter without a gradient on some ranks.
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    (net(torch.ones(1, 4)) if rank == 0 else net[0](torch.ones(1, 4))).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
        optimizer.step()
    assert len({tuple(bias) for bias in hvd.allgather(net[3].bias.detach().reshape(1, -1)).tolist()}) == 1
    # Arguments.
    parameters = list(net.named_parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    for text, kwargs in [
        ("backward_passes_per_step must be > 0", {"backward_passes_per_step": 0}),
        ("not supported with op != Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ("should be a sequence of tuples", {"named_parameters": net.parameters()}),
        ("must be unique", {"named_parameters": parameters + parameters[:1]}),
        ("were not named", {"named_parameters": parameters[:1]}),
        ("groups should be a non-negative integer", {"groups": -1}),
    ]:
        raises(ValueError, text, lambda kwargs=kwargs: hvd.DistributedOptimizer(sgd, **kwargs))
    # Adasum of equal steps on all ranks equals that step.
    if size & (size - 1) == 0:
        net, alone = model(), model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters(), op=hvd.Adasum
        )
        single = torch.optim.SGD(alone.parameters(), lr=0.5)
        for module, one in ((net, optimizer), (alone, single)):
            module(torch.ones(2, 4)).sum().backward()
            one.step()
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
        # Steps in orthogonal directions are summed, so the result contains the steps of all ranks.
        weight = torch.nn.Parameter(torch.zeros(size))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("orthogonal", weight)], op=hvd.Adasum)
        (weight[rank] * (rank + 1.0)).backward()
        optimizer.step()
        assert weight.tolist() == [-0.5 * (other + 1.0) for other in range(size)]
    # An embedding with sparse gradients that only rank 0 uses: the others have no rows to add.
    for as_dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), [("table", table.weight)], sparse_as_dense=as_dense
        )
        if rank == 0:
            table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
        assert torch.allclose(table.weight[:, 0], torch.tensor([0.0, -1.0, 0.0, -1.0]) / size)
    # Broadcast of optimizer state.
    for make in [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad]:
        net = model(rank)
        optimizer = make(net.parameters(), lr=0.1 * (rank + 1))
        if rank == 0:
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        kept = [parameter.detach().clone() for parameter in net.parameters()]
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.1
        digests = hvd.allgather_object(str(optimizer.state_dict()))
        assert len(set(digests)) == 1
    raises(
        ValueError,
        "cannot broadcast torch.optim.LBFGS state",
        lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0),
    )
    raises(ValueError, "invalid params of type", lambda: hvd.broadcast_parameters(3, 0))
    raises(
        ValueError, "`b` is a int, and only tensors", lambda: hvd.broadcast_parameters({"a": torch.ones(1), "b": 3}, 0)
    )
    # SyncBatchNorm over batches of different sizes.
    heights = [other + 2 for other in range(size)]
    whole = torch.randn(sum(heights), 3, 2, generator=torch.Generator().manual_seed(1))
    mine = whole[sum(heights[:rank]) : sum(heights[: rank + 1])].clone().requires_grad_()
    reference = whole.clone().requires_grad_()
    synced, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    weights = torch.arange(whole.numel()).reshape(whole.shape).float()
    (synced(mine) * weights[sum(heights[:rank]) : sum(heights[: rank + 1])]).sum().backward()
    (plain(reference) * weights).sum().backward()
    assert torch.allclose(mine.grad, reference.grad[sum(heights[:rank]) : sum(heights[: rank + 1])], atol=1e-3)
    assert torch.allclose(synced.running_var, plain.running_var, atol=1e-5)
    assert torch.allclose(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad, rtol=1e-3)
    raises(ValueError, "expected at least 2D input", lambda: synced(torch.ones(3)))


def mismatched_gradients():
    """One rank has frozen a parameter that the others have not: all ranks raise, and the error names both."""
    torch, hvd, rank, size = start("torch")
    if size == 1:
        return
    others = "rank 0 has" if size == 2 else f"ranks {'0, 1' if size == 3 else '0-2'} have"
    # Reduced by plan, and (with a predivide factor) by name.
    for number, factor in enumerate((1.0, 2.0)):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        named = [(f"{number}.{name}", parameter) for name, parameter in net.named_parameters()]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named, gradient_predivide_factor=factor)

        def step(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        net[1].bias.requires_grad_(rank != size - 1)
        raises(
            hvd.HorovodInternalError,
            rf"ranks disagree: rank {size - 1} has no gradient of `{number}.1.bias`, {others} one",
            # A rank with all gradients may complete its step, and raises in the next one.
            lambda step=step: [step() for _ in range(2)],
        )
        net[1].bias.requires_grad_(True)
        step()


def failures_in_hooks():
    """After an error in the hook of a gradient, the step raises it instead of taking local gradients."""
    torch, hvd, rank, size = start("torch")
    if size == 1:
        return
    errors = [MemoryError("no memory")]

    class Failing(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            if errors:
                raise errors[0]
            return tensor, None

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), Failing, groups=1)
    before = [each.detach().clone() for each in model.parameters()]
    raises(MemoryError, "no memory", lambda: model(torch.ones(2, 4) * rank).sum().backward())
    raises(MemoryError, "no memory", optimizer.step)
    assert all(map(torch.equal, model.parameters(), before))
    errors.clear()
    optimizer.zero_grad()
    model(torch.ones(2, 4) * rank).sum().backward()
    optimizer.step()
    found = [hvd.allgather(each.detach().flatten()).view(size, -1) for each in model.parameters()]
    assert all((each == each[0]).all() for each in found)
    assert not any(map(torch.equal, model.parameters(), before))


PARTS = (optimizers, mismatched_gradients, failures_in_hooks)


def all_parts():
    """Runs all parts in one job, because ranks take long to start."""
    for part in PARTS:
        part()


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_optimizers(size):
    """The assertions are in `all_parts`, which runs on each rank."""
    run_ranks(all_parts, size, launcher=Forked("torch"), env=ENV, timeout=200)
