"""DistributedDataParallel on several ranks: gradients are compared with those of one process on the whole batch."""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks

ROWS = 6  # of each rank's share of the batch


def _start():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    torch.manual_seed(0)
    return torch, dist, DistributedDataParallel


def _mlp(torch):
    nn = torch.nn
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 3))


def _conv(torch):
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )


def _tied(torch):
    class Tied(torch.nn.Module):
        """Two layers share one weight, and one parameter is not contiguous."""

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(5, 5)
            self.second = torch.nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.scale = torch.nn.Parameter(torch.ones(3, 5).t())

        def forward(self, x):
            return self.second(torch.tanh(self.first(x))) @ self.scale

    return Tied()


def _mixed(torch):
    class Mixed(torch.nn.Module):
        """Parameters of several types, an empty one, a scalar, and a frozen one."""

        def __init__(self):
            super().__init__()
            self.wide = torch.nn.Linear(5, 4).double()
            self.single = torch.nn.Linear(4, 4).float()
            self.brain = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
            self.scalar = torch.nn.Parameter(torch.tensor(1.5))
            self.empty = torch.nn.Parameter(torch.empty(0, 4))
            self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)

        def forward(self, x):
            y = self.single(self.wide(x.double()).float()) * self.scalar
            y = torch.cat([y, self.empty])
            return (y @ self.brain.float() + self.frozen).to(x.dtype)

    return Mixed()


MODELS = {"mlp": _mlp, "conv": _conv, "tied": _tied, "mixed": _mixed}


def _batch(torch, name, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (ROWS, 1, 4, 4) if name == "conv" else (ROWS, 5)
    return torch.randn(shape, generator=generator), torch.randn(ROWS, 3, generator=generator)


def _gradients(model):
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def _assert_same_everywhere(torch, dist, gradients):
    """Asserts that all ranks hold bitwise equal gradients."""
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        copies = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, gradient.contiguous())
        for rank, other in enumerate(copies):
            assert torch.equal(other, gradient), f"{name} differs on rank {rank}"


def _check_equality_on_ranks(names, options):
    torch, dist, ddp_class = _start()
    for keywords, set_to_none, use_double in options:
        _check_equality(torch, dist, ddp_class, names, keywords, set_to_none, use_double)


def _check_equality(torch, dist, ddp_class, names, keywords, set_to_none, use_double):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in names:
        dtype = torch.float64 if use_double else torch.float32
        alone = MODELS[name](torch)
        with torch.no_grad():
            alone(_batch(torch, name, 0, 0)[0])  # materializes the lazy layers
        if use_double and name != "mixed":
            alone = alone.double()
        replica = MODELS[name](torch)
        with torch.no_grad():
            replica(_batch(torch, name, 0, 0)[0])
        if use_double and name != "mixed":
            replica = replica.double()
        replica.load_state_dict(alone.state_dict())
        if rank != 0:
            with torch.no_grad():
                for parameter in replica.parameters():
                    parameter.add_(1)  # the DDP constructor broadcasts rank 0's parameters
        model = ddp_class(replica, **keywords)
        for key, value in alone.state_dict().items():
            assert torch.equal(model.state_dict()[f"module.{key}"], value), key
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
        for step in range(4):
            if name == "mixed":
                # Rounding in half precision differs between the two models. Equal parameters in each step keep the
                # difference from growing.
                alone.load_state_dict(replica.state_dict())
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            x, y = _batch(torch, name, rank, step)
            torch.nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
            xs, ys = zip(*(_batch(torch, name, r, step) for r in range(size)), strict=True)
            torch.nn.functional.mse_loss(alone(torch.cat(xs).to(dtype)), torch.cat(ys).to(dtype)).backward()
            mine = _gradients(model.module)
            _assert_same_everywhere(torch, dist, mine)
            for key, expected in _gradients(alone).items():
                if expected is None:
                    assert mine[key] is None
                    continue
                assert mine[key].stride() == expected.stride(), key
                tolerance = 1e-12 if expected.dtype is torch.float64 and name != "mixed" else 2e-5
                if expected.dtype is torch.bfloat16:
                    tolerance = 2e-2
                where = f"{name} {key} in step {step}: "
                torch.testing.assert_close(
                    mine[key], expected, rtol=tolerance, atol=tolerance, msg=lambda text, where=where: where + text
                )
            for optimizer in optimizers:
                optimizer.step()
        _assert_same_everywhere(torch, dist, {k: p.detach() for k, p in model.named_parameters()})


OPTIONS = [
    ({}, True, True),
    ({"bucket_cap_mb": 256 / 2**20}, True, False),
    ({"bucket_cap_mb": 4096 / 2**20}, False, False),
    ({"find_unused_parameters": True}, False, False),
    ({"gradient_as_bucket_view": True, "static_graph": True}, False, False),
]


@pytest.mark.parametrize("size", [1, 2, more(4)])
def test_gradients_equal_those_of_the_whole_batch(size):
    run_ranks(
        _check_equality_on_ranks, size, list(MODELS), OPTIONS if size == 2 else OPTIONS[:1], launcher=Forked("torch")
    )


def _check_large():
    """Gradients are placed in their bucket slots although the backward allocates activations of the same size."""
    torch, dist, ddp_class = _start()
    nn = torch.nn
    rank, size = dist.get_rank(), dist.get_world_size()
    width = 256  # a weight has 256 KiB; the batch has 256 rows, so activations have the same size
    make = lambda: nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))  # noqa: E731
    alone, replica = make(), make()
    replica.load_state_dict(alone.state_dict())
    model = ddp_class(replica, bucket_cap_mb=1)
    kept = []
    addresses = []
    for step in range(7):
        x = torch.randn(size, width, width, generator=torch.Generator().manual_seed(step))
        for m in (model, alone):
            m.zero_grad()
        model(x[rank]).square().mean().backward()
        sum(alone(x[r]).square().mean() / size for r in range(size)).backward()
        gradients = _gradients(model.module)
        _assert_same_everywhere(torch, dist, gradients)
        for key, expected in _gradients(alone).items():
            torch.testing.assert_close(gradients[key], expected, rtol=1e-4, atol=1e-7)
        addresses.append([parameter.grad.data_ptr() for parameter in replica.parameters()])
        if step >= 4:
            # The script keeps references to these gradients, so later steps must not overwrite them.
            live = [parameter.grad for parameter in replica.parameters()]
            kept.append((live, [gradient.clone() for gradient in live]))
        for live, copies in kept:
            assert all(torch.equal(a, b) for a, b in zip(live, copies, strict=True))
    assert addresses[3] == addresses[4], "gradients keep their slots once the bucket plan is final"
    assert set(addresses[5]).isdisjoint(addresses[4]), "a slot is not reused while the script references its gradient"


def test_gradients_that_the_script_keeps_stay_as_they_are():
    run_ranks(_check_large, 3, launcher=Forked("torch"))


def _check_accumulation():
    torch, dist, ddp_class = _start()
    rank, size = dist.get_rank(), dist.get_world_size()
    for set_to_none in (True, False):
        alone, replica = _mlp(torch).double(), _mlp(torch).double()
        replica.load_state_dict(alone.state_dict())
        model = ddp_class(replica)
        for step in range(3):
            for m in (model, alone):
                m.zero_grad(set_to_none=set_to_none)
            for micro in range(3):
                for r in range(size):
                    x, y = _batch(torch, "mlp", r, 10 * step + micro)
                    (torch.nn.functional.mse_loss(alone(x.double()), y.double()) / size).backward()
                x, y = _batch(torch, "mlp", rank, 10 * step + micro)
                if micro < 2:
                    with model.no_sync():
                        torch.nn.functional.mse_loss(model(x.double()), y.double()).backward()
                    if step == 0 and size > 1:
                        first = replica[0].weight.grad
                        others = [torch.empty_like(first) for _ in range(size)]
                        dist.all_gather(others, first)
                        assert not torch.equal(others[0], others[1]), "gradients are local inside no_sync"
                else:
                    torch.nn.functional.mse_loss(model(x.double()), y.double()).backward()
            gradients = _gradients(replica)
            _assert_same_everywhere(torch, dist, gradients)
            for key, expected in _gradients(alone).items():
                torch.testing.assert_close(gradients[key], expected, rtol=1e-12, atol=1e-14)
    # `gradient_accumulation_steps=2` reduces in every second backward, without no_sync.
    with pytest.warns(FutureWarning, match="every 2th"):
        model = ddp_class(_mlp(torch), gradient_accumulation_steps=2)
    for backward in range(4):
        if backward % 2 == 0:
            model.zero_grad()
        x, _ = _batch(torch, "mlp", rank, backward)
        model(x).sum().backward()
        mine = model.module[0].weight.grad
        others = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(others, mine)
        assert torch.equal(others[0], others[1]) == (backward % 2 == 1)


def test_no_sync_accumulates_locally_and_then_reduces_the_sum():
    run_ranks(_check_accumulation, 2, launcher=Forked("torch"))


def _check_unused():
    torch, dist, ddp_class = _start()
    rank, size = dist.get_rank(), dist.get_world_size()

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = torch.nn.Linear(5, 5).double()
            self.branches = torch.nn.ModuleList(torch.nn.Linear(5, 5).double() for _ in range(4))

        def forward(self, x, branch):
            return self.branches[branch](self.trunk(x))

    replica = Branches()
    alone = Branches()
    alone.load_state_dict(replica.state_dict())
    model = ddp_class(replica, find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        # No rank uses branch 3; only rank 0 uses branch 2, in the first step.
        branch = lambda r, step=step: 2 if (r, step) == (0, 0) else (r + step) % 2  # noqa: E731
        x = lambda r, step=step: _batch(torch, "mlp", r, step)[0].double()  # noqa: E731
        model(x(rank), branch(rank)).square().mean().backward()
        sum(alone(x(r), branch(r)).square().mean() / size for r in range(size)).backward()
        gradients = _gradients(replica)
        for key, expected in _gradients(alone).items():
            assert (gradients[key] is None) == (expected is None), (step, key)
            if expected is not None:
                torch.testing.assert_close(gradients[key], expected, rtol=1e-12, atol=1e-14)
        _assert_same_everywhere(torch, dist, gradients)


def test_find_unused_parameters_counts_missing_gradients_as_zero():
    run_ranks(_check_unused, 3, launcher=Forked("torch"))


def _check_buffers():
    torch, dist, ddp_class = _start()
    rank = dist.get_rank()
    model = ddp_class(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)))
    norm = model.module[1]

    def running_means():
        means = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(means, norm.running_mean)
        return means

    for step in range(3):
        x, _ = _batch(torch, "mlp", rank, step)
        model(x).square().mean().backward()
        assert all(torch.equal(mean, running_means()[0]) for mean in running_means()), "buffers equal those of rank 0"
    with torch.no_grad():
        model(_batch(torch, "mlp", rank, 9)[0])
    assert not torch.equal(*running_means()[:2]), "the ranks' inputs differ, so their running means do after a forward"
    model(_batch(torch, "mlp", rank, 10)[0])  # broadcasts rank 0's buffers before it computes
    model(_batch(torch, "mlp", 0, 11)[0])
    assert torch.equal(*running_means()[:2])
    # In evaluation mode a forward does not communicate, so one rank can run it alone.
    model.eval()
    if rank == 0:
        model(_batch(torch, "mlp", rank, 12)[0])
    dist.barrier()
    # With `broadcast_buffers=False` each rank keeps its own running mean.
    other = ddp_class(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)), broadcast_buffers=False)
    other(_batch(torch, "mlp", rank, 0)[0]).square().mean().backward()
    norm = other.module[1]
    assert not torch.equal(*running_means()[:2])


def test_buffers_follow_rank_0():
    run_ranks(_check_buffers, 2, launcher=Forked("torch"))


def _check_graphs():
    """Autograd graphs other than one forward and one backward of one model."""
    torch, dist, ddp_class = _start()
    from torch.utils.checkpoint import checkpoint

    rank, size = dist.get_rank(), dist.get_world_size()
    x = _batch(torch, "mlp", rank, 0)[0]
    model = ddp_class(_mlp(torch))

    def check(expected):
        mine = model.module[0].weight.grad
        total = expected.clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVERAGE)
        torch.testing.assert_close(mine, total, rtol=1e-5, atol=1e-7)

    def local(loss):
        return torch.autograd.grad(loss, model.module[0].weight)[0]

    # `torch.autograd.grad` neither accumulates nor reduces gradients, and the model stays usable.
    expected = local(model(x).square().mean())
    model(x).square().mean().backward()
    check(expected)

    # Two forwards and one backward; one forward and two backwards; an output that is a nested structure.
    model.zero_grad()
    (model(x).sum() + model(2 * x).square().sum()).backward()
    check(local(model.module(x).sum() + model.module(2 * x).square().sum()))
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    check(expected)

    class Structured(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return {"out": [self.inner(x)], "note": "text"}

    inner = _mlp(torch)
    structured = ddp_class(Structured(inner))
    structured(x)["out"][0].sum().backward()
    _assert_same_everywhere(torch, dist, _gradients(inner))

    # One backward through two wrapped models, one of which has a user's post-accumulate-grad hook.
    model.zero_grad()
    second = ddp_class(torch.nn.Linear(3, 3))
    seen = []
    second.module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    second(model(x)).square().mean().backward()
    assert len(seen) == 1
    _assert_same_everywhere(torch, dist, _gradients(second.module) | _gradients(model.module))

    # Activation checkpointing; the re-entrant form runs a nested backward.
    class Checkpointed(torch.nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.second, self.reentrant = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3), reentrant

        def forward(self, x):
            return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))

    for reentrant in (False, True):
        wrapped = ddp_class(Checkpointed(reentrant))
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(x.clone().requires_grad_()).square().mean().backward()
            _assert_same_everywhere(torch, dist, _gradients(wrapped.module))

    # `.grad` is set before the first backward, to views of the user's flat tensor.
    fresh = ddp_class(_mlp(torch))
    flat = torch.ones(sum(p.numel() for p in fresh.parameters()))
    at = 0
    for parameter in fresh.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    for _ in range(3):
        flat.zero_()
        fresh(x).square().mean().backward()
        whole = torch.cat([p.grad.flatten() for p in fresh.parameters()])
        assert torch.equal(flat, whole), "the user's flat tensor holds the reduced gradients"
        _assert_same_everywhere(torch, dist, _gradients(fresh.module))
    assert size == 2


def test_unusual_autograd_graphs():
    run_ranks(_check_graphs, 2, launcher=Forked("torch"))


def _check_copies():
    torch, dist, ddp_class = _start()
    import copy
    import io
    import pickle

    model = ddp_class(_mlp(torch))
    x = _batch(torch, "mlp", dist.get_rank(), 0)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        other(x).sum().backward()
        _assert_same_everywhere(torch, dist, _gradients(other.module))
    with model.no_sync():
        # A copy reduces its gradients even if it was made inside no_sync of the original.
        assert copy.deepcopy(model).require_backward_grad_sync
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    with pytest.raises(AttributeError):
        getattr(model, "0")  # the wrapper does not forward attributes of the wrapped module
    assert "bucket 0: float32" in model.describe_buckets()


def test_copies_and_checkpoints():
    run_ranks(_check_copies, 2, launcher=Forked("torch"))


def _timeline_body():
    torch, dist, ddp_class = _start()
    model = ddp_class(_mlp(torch), bucket_cap_mb=1024 / 2**20)
    for step in range(2):
        model.zero_grad()
        model(_batch(torch, "mlp", dist.get_rank(), step)[0]).sum().backward()


def test_timeline_shows_every_bucket_of_every_rank(tmp_path):
    import json

    path = tmp_path / "timeline.json"
    path.write_text("the timeline of an earlier run")
    run_ranks(_timeline_body, 2, launcher=Forked("torch"), env={"SMD_TIMELINE": str(path)})
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    for rank in (0, 1):
        spans = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        for phase in ("filling", "waiting", "reducing"):
            assert sum(event["name"] == phase for event in spans) >= 4, phase
        assert all(event["dur"] >= 0 for event in spans)
