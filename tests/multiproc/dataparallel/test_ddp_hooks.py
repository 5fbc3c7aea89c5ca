"""Communication hooks (torch's own, unchanged) and uneven inputs, compared with torch's DDP over gloo."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

STEPS = 4


def _start(with_gloo=True):
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    if with_gloo:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    return torch, dist, DistributedDataParallel


def _model(torch):
    nn = torch.nn
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))


def _x(torch, rank, step):
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def _max_relative_difference(mine, theirs):
    """Returns the largest difference of two models' gradients, relative to the largest gradient."""
    scale = max(p.grad.abs().max().item() for p in theirs.parameters())
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs) / scale


def _same_on_all(torch, model):
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(copies, parameter.grad.contiguous())
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def _check_hooks():
    import copy

    torch, dist, ddp_class = _start()
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    # torch 2.11's batched PowerSGD hook passes a 2-D matrix to a helper that accepts 3-D ones only.
    orthogonalize = powerSGD_hook._orthogonalize
    powerSGD_hook._orthogonalize = lambda m, epsilon=0: orthogonalize(m if m.dim() == 3 else m[None], epsilon)

    group = torch.distributed.new_group([0, 1])  # with a group of its own, a hook is not replaced by the built-in one
    power = lambda **keywords: powerSGD_hook.PowerSGDState(  # noqa: E731
        process_group=group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **keywords
    )
    local = lambda: post_localSGD_hook.PostLocalSGDState(group, group, 2)  # noqa: E731
    fp16, bf16 = default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper
    # The hook's state, the hook, and the tolerance of the comparison, relative to the largest gradient.
    cases = {
        "allreduce": (lambda: group, default_hooks.allreduce_hook, 1e-6),
        "allreduce by the core": (lambda: None, default_hooks.allreduce_hook, 1e-6),
        "fp16": (lambda: group, default_hooks.fp16_compress_hook, 1e-6),
        "fp16 by the core": (lambda: None, default_hooks.fp16_compress_hook, 2e-3),
        "bf16": (lambda: group, default_hooks.bf16_compress_hook, 1e-6),
        "bf16 by the core": (lambda: None, default_hooks.bf16_compress_hook, 2e-2),
        "fp16 wrapper": (lambda: group, fp16(default_hooks.allreduce_hook), 1e-6),
        "bf16 wrapper": (lambda: group, bf16(default_hooks.allreduce_hook), 1e-6),
        "power": (power, powerSGD_hook.powerSGD_hook, 1e-4),
        "power fp16": (power, fp16(powerSGD_hook.powerSGD_hook), 2e-2),
        "batched power": (power, powerSGD_hook.batched_powerSGD_hook, 1e-4),
        "local": (local, post_localSGD_hook.post_localSGD_hook, 1e-6),
    }
    rank = dist.get_rank()
    for name, (state, hook, tolerance) in cases.items():
        base = _model(torch)
        ours, theirs = ddp_class(copy.deepcopy(base)), torch.nn.parallel.DistributedDataParallel(copy.deepcopy(base))
        for model in (ours, theirs):
            if model is theirs and "bf16" in name:
                # torch's DDP accepts bfloat16 hooks with NCCL only.
                model._check_comm_hook = lambda hook: None
            model.register_comm_hook(state(), hook)
        for step in range(STEPS):
            for model in (ours, theirs):
                model.zero_grad()
                model(_x(torch, rank, step)).square().mean().backward()
            difference = _max_relative_difference(ours, theirs)
            # Both models have one bucket; only the order of the parameters in it differs.
            assert difference <= tolerance, f"{name}, step {step}: {difference:.1e}"
            _same_on_all(torch, ours)
    with pytest.raises(RuntimeError, match="registered already"):
        ours.register_comm_hook(None, default_hooks.allreduce_hook)


def test_torchs_own_hooks_work_unchanged():
    run_ranks(_check_hooks, 2, launcher=Forked("torch"), timeout=100)


def _check_own_hooks():
    import copy

    torch, dist, ddp_class = _start()
    rank, size = dist.get_rank(), dist.get_world_size()
    kinds = torch.distributed.BuiltinCommHookType
    base = _model(torch)
    for kind, tolerance in ((kinds.ALLREDUCE, 1e-6), (kinds.FP16_COMPRESS, 2e-3)):
        ours, theirs = ddp_class(copy.deepcopy(base)), torch.nn.parallel.DistributedDataParallel(copy.deepcopy(base))
        for model in (ours, theirs):
            model._register_builtin_comm_hook(kind)
        for step in range(STEPS):
            kept = [p.grad for p in ours.parameters()]  # holds the slots: the next gradients are in other memory
            for model in (ours, theirs):
                model.zero_grad()
                model(_x(torch, rank, step)).square().mean().backward()
            assert _max_relative_difference(ours, theirs) <= tolerance, kind
            _same_on_all(torch, ours)
            del kept

    # The hook is called once per bucket, in order, with the parameters and local gradients of the bucket. The tensor
    # that it returns becomes the gradients.
    seen = []

    def double(state, bucket):
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last()))
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert any(parameter is mine for mine in model.parameters())
            assert torch.equal(gradient, local[id(parameter)])
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model = ddp_class(copy.deepcopy(base), bucket_cap_mb=4096 / 2**20)
    model.register_comm_hook("state", double)
    grads = None
    for step in range(3):
        x = _x(torch, rank, step)
        found = torch.autograd.grad(model.module(x).square().mean(), list(model.parameters()))
        local = {id(p): g for p, g in zip(model.parameters(), found, strict=True)}
        model.zero_grad()
        seen.clear()
        model(x).square().mean().backward()
        buckets = len(model.describe_buckets().splitlines())
        assert len(seen) > 1
        assert [index for index, _ in seen] == list(range(len(seen)))
        assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, 2 * local[id(parameter)])
        grads = grads or [p.grad for p in model.parameters()]  # holds the slots: the hook gets a copy of the bucket
    assert len(seen) == buckets

    # Hooks that fail: the error says why.
    errors = {}
    for name, hook in {
        "nothing": lambda state, bucket: None,
        "text": lambda state, bucket: torch.futures.Future().set_result("text") or _done(torch, "text"),
        "size": lambda state, bucket: _done(torch, torch.ones(3)),
        "raises": _raising,
    }.items():
        broken = ddp_class(copy.deepcopy(base))
        broken.register_comm_hook(None, hook)
        try:
            broken(_x(torch, rank, 0)).sum().backward()
        except Exception as error:
            errors[name] = (type(error).__name__, str(error))
    assert (errors["nothing"][0], errors["text"][0]) == ("TypeError", "TypeError"), errors
    assert "expected a torch.futures.Future" in errors["nothing"][1], errors
    assert "has a str" in errors["text"][1], errors
    assert "returned 3 elements" in errors["size"][1], errors
    assert errors["raises"] == ("ArithmeticError", "a user's own error"), errors
    with pytest.raises(TypeError, match="cannot be called"):
        ddp_class(copy.deepcopy(base)).register_comm_hook(None, 3)
    # Ranks that register different hooks raise an error.
    odd = ddp_class(copy.deepcopy(base))
    with pytest.raises(Exception, match="on rank 0 and"):
        odd._register_builtin_comm_hook(kinds.FP16_COMPRESS if rank == 0 else kinds.ALLREDUCE)
    odd(_x(torch, rank, 0)).sum().backward()
    assert size == 2


def _done(torch, value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def _raising(state, bucket):
    raise ArithmeticError("a user's own error")


def test_hook_arguments_and_hook_errors():
    run_ranks(_check_own_hooks, 2, launcher=Forked("torch"))


def _join_body(own_groups):
    import copy

    torch, dist, ddp_class = _start(with_gloo=not own_groups)
    rank = dist.get_rank()
    norm = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    options = [
        (_model(torch), {}, {}),
        (_model(torch), {"find_unused_parameters": True}, {"divide_by_initial_world_size": False}),
        (norm, {}, {}),
        (norm, {"static_graph": True, "broadcast_buffers": False}, {"divide_by_initial_world_size": False}),
    ]
    results = []
    for base, keywords, how in options:
        kinds = [ddp_class] if own_groups else [ddp_class, torch.nn.parallel.DistributedDataParallel]
        states = []
        for kind in kinds:
            model = kind(copy.deepcopy(base), **keywords)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _epoch in range(2):
                with model.join(**how):
                    for step in range(3 + 2 * rank):
                        optimizer.zero_grad()
                        if step % 3 == 1:
                            with model.no_sync():
                                model(_x(torch, rank, step)).square().mean().backward()
                        model(_x(torch, rank, 10 + step)).square().mean().backward()
                        optimizer.step()
            model(_x(torch, rank, 0)).square().mean().backward()  # the model is usable after join
            states.append({name: value.clone() for name, value in model.module.state_dict().items()})
        for state in states[1:]:
            for name, value in states[0].items():
                torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-5, msg=f"{name} {keywords}")
        exact = {name: value for name, value in states[0].items() if "running" not in name and "num_" not in name}
        results.append({name: value.tolist() for name, value in exact.items()})
    return results


@pytest.mark.parametrize("own_groups", [False, True])
def test_ranks_may_run_out_of_inputs(own_groups):
    results = run_ranks(_join_body, 3, own_groups, launcher=Forked("torch"))
    assert results[0] == results[1] == results[2]


def _check_early():
    torch, dist, ddp_class = _start()
    rank = dist.get_rank()
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp_class(_model(torch))

    def train_to_the_end():
        with model.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                model(_x(torch, rank, step)).sum().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train_to_the_end()
    model.zero_grad()
    with model.join(enable=False):
        model(_x(torch, rank, 0)).sum().backward()
    # Joined together with another Joinable of torch.
    model.zero_grad()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + rank):
            model(_x(torch, rank, step)).sum().backward()
            optimizer.step()
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(copies, parameter.detach())
        assert torch.equal(*copies)


def test_early_termination_and_other_joinables():
    run_ranks(_check_early, 2, launcher=Forked("torch"))


def _check_without_a_group():
    """Without torch's default process group, the error tells how to make one; with one, the hook works."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    torch.manual_seed(0)

    def wrapped():
        return DistributedDataParallel(_model(torch))

    def step(ddp):
        x = _x(torch, dist.get_rank(), 0)
        ddp(x).sum().backward()

    for hook in (powerSGD_hook.powerSGD_hook, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)):
        with pytest.raises(RuntimeError, match=r'init_process_group\("smddp"\)'):
            wrapped().register_comm_hook(None, hook)
    # These hooks work without torch's process group.
    for hook in (default_hooks.allreduce_hook, debugging_hooks.noop_hook):
        ddp = wrapped()
        ddp.register_comm_hook(None, hook)
        step(ddp)

    def own(state, bucket):
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()

    ddp = wrapped()
    ddp.register_comm_hook(None, own)
    with pytest.raises(ValueError, match="has not been initialized") as found:
        step(ddp)
    if hasattr(found.value, "__notes__"):
        assert 'torch.distributed.init_process_group("smddp")' in found.value.__notes__[0]

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    torch.distributed.init_process_group("smddp")
    ddp = wrapped()
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=0.5)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    from torch.distributed import optim

    optimizer = optim.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(4):
        step(ddp)
        _same_on_all(torch, ddp)
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()


def test_hooks_without_torchs_process_group_raise_with_a_hint():
    run_ranks(_check_without_a_group, 2, launcher=Forked("torch"))
