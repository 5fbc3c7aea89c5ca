"""DistributedDataParallel on GPUs: gradients equal those of PyTorch's DDP over NCCL, for many models and options."""

from __future__ import annotations

import pytest

from support import run_ranks
from support.checks import Checks, start_on_device
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(280), needs_one]


def _models(torch):
    """Name, model, inputs of one rank, and options that both implementations accept."""
    from torch import nn

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(100, 64)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3))
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(32, 32)
            self.left, self.right, self.never = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(32, 4)

        def forward(self, x):
            x = self.trunk(x).relu()
            return self.left(x) if x.flatten()[0] > 0 else self.right(x)

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16, sparse=True)
            self.head = nn.Linear(16, 3)

        def forward(self, tokens):
            return self.head(self.table(tokens))

    def convolutions():
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.BatchNorm2d(32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    mlp = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    tokens = torch.randint(0, 50, (4, 9))
    return [
        ("mlp", mlp, torch.randn(16, 64), {"bucket_cap_mb": 0.5}),
        ("mlp in one bucket", mlp, torch.randn(16, 64), {}),
        ("float64", nn.Linear(40, 30).double(), torch.randn(5, 40, dtype=torch.float64), {}),
        ("bfloat16", nn.Linear(40, 30).bfloat16(), torch.randn(5, 40).bfloat16(), {}),
        ("convolutions", convolutions(), torch.randn(4, 3, 16, 16), {}),
        ("channels last", convolutions().to(memory_format=torch.channels_last), torch.randn(4, 3, 16, 16), {}),
        ("tied weights", Tied(), tokens, {"bucket_cap_mb": 0.25}),
        ("static graph", Tied(), tokens, {"static_graph": True}),
        ("branches", Branches(), torch.randn(3, 32), {"find_unused_parameters": True}),
        ("sparse", Sparse(), tokens, {}),
        # The last bucket is one tensor, too large for the all-reduce that sends peers the whole tensor.
        ("large", nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 8)), torch.randn(4, 2048), {}),
    ]


def _train(torch, model, x, steps, set_to_none=True, grads=None):
    """Returns the gradients after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        y = model(x if not x.is_floating_point() else x * (1 + step))
        (y.float() ** 2).mean().backward()
        parameters = model.module.named_parameters()
        seen.append({n: None if p.grad is None else p.grad.detach().clone() for n, p in parameters})
        if grads is not None:
            grads.append([p.grad for p in model.parameters()])
        optimizer.step()
    return seen


def _compare(torch, mine, theirs, rtol=2e-6, atol=1e-7):
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for name in b:
            if b[name] is None or a[name] is None:
                assert a[name] is b[name], f"{name} in step {step}: {a[name]} and {b[name]}"
                continue
            x, y = a[name].to_dense(), b[name].to_dense()
            # More than two ranks sum in another order than NCCL's rings. The error is a few roundings at the magnitude
            # of the largest element.
            largest = y.abs().amax().item() if y.numel() else 0.0
            if x.dtype is torch.bfloat16:
                rtol, atol = 1e-2, max(1e-3, largest * 2**-6)
            atol = max(atol, 2e-6 * largest)
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m: f"{name} in step {step}: {m}")  # noqa: B023


def gradients_body():
    import copy

    torch, c10d, _, rank, size = start_on_device()
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

    torch.backends.cudnn.deterministic = True
    checks = Checks()
    device = torch.cuda.current_device()

    def pair(model, **options):
        theirs = copy.deepcopy(model).cuda()
        mine = copy.deepcopy(model).cuda()
        for module in theirs.modules():
            if isinstance(module, torch.nn.Embedding):
                # NCCL does not support sparse tensors.
                module.sparse = False
        return (
            DDP(mine, device_ids=[device], **options),
            torch.nn.parallel.DistributedDataParallel(theirs, device_ids=[device], **options),
        )

    torch.manual_seed(rank)
    for name, model, x, options in _models(torch):

        def check(model=model, x=x, options=options):
            x = x.cuda()
            mine, theirs = pair(model, **options)
            _compare(torch, _train(torch, mine, x, 4), _train(torch, theirs, x, 4))
            # Buffers of the library follow rank 0 after backward, those of PyTorch before the next forward.
            if rank != 0:
                return
            for (n, a), (_, b) in zip(mine.module.named_buffers(), theirs.module.named_buffers(), strict=True):
                torch.testing.assert_close(a, b, msg=lambda m: f"buffer {n}: {m}")  # noqa: B023

        checks(name, check)

    mlp, x = _models(torch)[0][1], torch.randn(16, 64).cuda()

    def keep_gradients():
        mine, theirs = pair(mlp, bucket_cap_mb=0.5)
        kept = []
        first = _train(torch, mine, x, 4, grads=kept)
        _compare(torch, first, _train(torch, theirs, x, 4))
        for step, gradients in enumerate(kept):
            for gradient, value in zip(gradients, first[step].values(), strict=True):
                assert torch.equal(gradient, value), "a gradient that the caller still holds was overwritten"

    checks("kept gradients", keep_gradients)
    checks(
        "zeroed gradients",
        lambda: _compare(torch, *(_train(torch, m, x, 4, set_to_none=False) for m in pair(mlp, bucket_cap_mb=0.5))),
    )

    def accumulate():
        results = []
        for model in pair(mlp):
            seen = []
            for _ in range(3):
                model.zero_grad()
                with model.no_sync():
                    model(x).square().mean().backward()
                    model(2 * x).square().mean().backward()
                model(3 * x).square().mean().backward()
                seen.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
            results.append(seen)
        _compare(torch, *results)

    checks("no_sync", accumulate)

    def compress():
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
            mine, theirs = pair(mlp, bucket_cap_mb=0.5)
            mine.register_comm_hook(None, hook)
            theirs.register_comm_hook(None, hook)
            # One step only: the two sides round at different places, so later steps differ.
            _compare(torch, _train(torch, mine, x, 1), _train(torch, theirs, x, 1), rtol=2e-2, atol=1e-3)

    checks("compression", compress)

    def use_hook():
        def hook(group, bucket):
            return c10d.all_reduce(bucket.buffer().div_(size), async_op=True).get_future().then(lambda f: f.value()[0])

        mine, theirs = pair(mlp, bucket_cap_mb=0.5)
        mine.register_comm_hook(None, hook)
        theirs.register_comm_hook(None, hook)
        _compare(torch, _train(torch, mine, x, 3), _train(torch, theirs, x, 3))

    checks("communication hook", use_hook)

    def capture_step():
        results = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for capture in (True, False):
            # The model is made on the stream that is captured, so autograd accumulates on it. PyTorch's DDP needs the
            # same.
            with torch.cuda.stream(stream):
                model = pair(mlp, bucket_cap_mb=0.5)[0]
                static = x.clone()

                def step(model=model, static=static):
                    model.zero_grad(set_to_none=True)
                    model(static).square().mean().backward()

                for _ in range(4):
                    step()
                graph = torch.cuda.CUDAGraph()
                if capture:
                    torch.cuda.synchronize()
                    model.zero_grad(set_to_none=True)
                    with torch.cuda.graph(graph, stream=stream):
                        model(static).square().mean().backward()
                seen = []
                for number in range(3):
                    static.copy_(x * (number + 1))
                    if capture:
                        graph.replay()
                    else:
                        step()
                    seen.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
                results.append(seen)
                torch.cuda.synchronize()
        _compare(torch, *results)

    checks("a captured step", capture_step)

    def mixed_precision():
        mine, theirs = pair(mlp, bucket_cap_mb=0.5)
        results = []
        for model in (mine, theirs):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            results.append([{n: p.grad.clone() for n, p in model.module.named_parameters()}])
        _compare(torch, *results, rtol=1e-5)

    checks("autocast", mixed_precision)

    def memory():
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(24)))
        peaks = []
        for kind in ("ours", "torch"):
            torch.cuda.empty_cache()
            own = copy.deepcopy(model).cuda()
            wrapped = (
                DDP(own, device_ids=[device])
                if kind == "ours"
                else torch.nn.parallel.DistributedDataParallel(own, device_ids=[device], gradient_as_bucket_view=True)
            )
            data = torch.randn(8192, 2048, device="cuda")
            for step in range(4):
                if step == 2:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                own.zero_grad(set_to_none=True)
                wrapped(data).square().mean().backward()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            del wrapped, own, data
        assert peaks[0] <= 1.01 * peaks[1], f"peaks of {peaks[0]} and {peaks[1]} bytes"

    checks("peak memory", memory)
    torch.cuda.synchronize()
    c10d.destroy_process_group()
    return checks.failed


def test_gradients_equal_those_of_torch():
    failed = run_ranks(gradients_body, NUM_RANKS, env={"SMD_TIMEOUT_SECONDS": "40"}, timeout=90)
    assert failed == [[]] * NUM_RANKS, "\n".join(line for rank in failed for line in rank)


def smddp_body():
    """Trains with PyTorch's own DDP and FSDP2 over the `smddp` backend."""
    import copy

    torch, c10d, _, rank, _ = start_on_device()
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    checks = Checks()
    torch.manual_seed(rank)
    group = c10d.new_group(backend="smddp")
    for name, model, x, options in _models(torch):
        if name == "sparse":
            # NCCL, the reference, does not support sparse tensors.
            continue

        def check(model=model, x=x, options=options):
            results = []
            for pg in (group, None):
                wrapped = torch.nn.parallel.DistributedDataParallel(
                    copy.deepcopy(model).cuda(), device_ids=[torch.cuda.current_device()], process_group=pg, **options
                )
                results.append(_train(torch, wrapped, x.cuda(), 3))
            _compare(torch, *results)

        checks(name, check)

    def fsdp():
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        base = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        x = torch.randn(8, 64).cuda()
        results = []
        for pg in (group, c10d.group.WORLD):
            model = copy.deepcopy(base).cuda()
            mesh = DeviceMesh.from_group(pg, "cuda")
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([p.full_tensor().detach() for p in model.parameters()])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    checks("fully_shard", fsdp)
    torch.cuda.synchronize()
    c10d.destroy_process_group()
    return checks.failed


def test_ddp_and_fsdp2_of_torch_over_the_backend():
    failed = run_ranks(smddp_body, NUM_RANKS, env={"SMD_TIMEOUT_SECONDS": "40"}, timeout=90)
    assert failed == [[]] * NUM_RANKS, "\n".join(line for rank in failed for line in rank)


def abandoned_body():
    import time

    torch, c10d, dist, rank, _ = start_on_device()
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

    # Bucket plans that differ between ranks are an error when the model is wrapped.
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="ranks disagree") as caught:
        DDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2 + rank)).cuda())
    differs = str(caught.value), time.monotonic() - start
    model = DDP(_models(torch)[0][1].cuda(), device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.5)
    step = 0

    def interrupt(gradient):
        # By then, the bucket of the last layer's gradient is reduced already.
        if rank == 1 and step == 3:
            raise ArithmeticError("the script's own")
        return gradient

    model.module[0].weight.register_hook(interrupt)
    texts = []
    while len(texts) < 2:
        step += 1
        try:
            start = time.monotonic()
            model(torch.randn(16, 64, device="cuda")).square().mean().backward()
            torch.cuda.synchronize()
        except Exception as error:
            texts.append((f"{type(error).__name__}: {error}", time.monotonic() - start))
    # A rank that exited now would be reported as dead instead.
    dist.barrier()
    c10d.destroy_process_group()
    return [*texts, differs]


def test_a_rank_that_fails_during_backward_is_named():
    texts = run_ranks(abandoned_body, 2, env={"SMD_TIMEOUT_SECONDS": "60"}, timeout=90)
    assert "ArithmeticError: the script's own" in texts[1][0][0], texts
    assert "rank 1" in texts[0][0][0], texts
    for rank in texts:
        assert "parameter `1.weight` has shape [2, 4] on rank 0 and [3, 4] on rank 1" in rank[2][0], texts
    assert all(seconds < 10 for rank in texts for _, seconds in rank), texts
