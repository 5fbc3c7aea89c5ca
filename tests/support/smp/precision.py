"""Training in 16 bits with float32 master weights: by the library, and written in plain PyTorch."""

from __future__ import annotations

import torch

import smdistributed.modelparallel.torch as smp
from smdistributed import _core

SCALES = {"init_scale": 2.0**10, "scale_window": 3, "delayed_shift": 2, "min_scale": 4}
#: Steps in which one rank finds a gradient that is not finite.
BAD = (1, 2, 3, 8, 9)
STEPS = 12


def make_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 6, bias=False)
    )


def batch_of(number, replica=0):
    generator = torch.Generator("cpu").manual_seed(100 * number + replica)
    drawn = torch.randn(2, 8, 6, generator=generator, device="cpu").to(torch.get_default_device())
    return drawn[0], drawn[1]


def loss_of(output, y):
    assert output.dtype == torch.float32
    return (output - y).square().mean()


def alone(replicas, dtype, max_norm):
    """Trains in plain PyTorch; returns losses, scales, skipped steps and master weights."""
    model = make_model().to(dtype)
    masters = [torch.nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    half = dtype is torch.float16
    scale = _core.LossScale(SCALES["init_scale"], True, 2.0, 3, 4.0, 2) if half else _core.LossScale(1.0)
    scales, skipped, losses = [], [], []
    for number in range(STEPS):
        sums = [torch.zeros_like(each) for each in masters]
        for replica in range(replicas):
            model.zero_grad()
            for x, y in zip(*(each.chunk(2) for each in batch_of(number, replica)), strict=True):
                loss = loss_of(model(x.to(dtype)).float(), y)
                (loss * (scale.scale / 2)).backward()
                losses.append(float(loss.detach()))
            for total, each in zip(sums, model.parameters(), strict=True):
                total += each.grad.float() / replicas
        overflow = half and (number in BAD or not all(bool(each.isfinite().all()) for each in sums))
        scales.append(scale.scale)
        skipped.append(overflow)
        if not overflow:
            for master, total in zip(masters, sums, strict=True):
                master.grad = total / scale.scale
            if max_norm:
                torch.nn.utils.clip_grad_norm_(masters, max_norm)
            optimizer.step()
            with torch.no_grad():
                for each, master in zip(model.parameters(), masters, strict=True):
                    each.copy_(master)
        scale.update(overflow)
    return losses, scales, skipped, dict(zip(dict(model.named_parameters()), masters, strict=True))


def start(config, **scales):
    smp.init({"microbatches": 2, "auto_partition": False, "default_partition": 0, **config})
    module = make_model()
    if smp.pp_size() > 1:
        for path, partition in (("2", 1), ("3", 1)):
            smp.set_partition(module.get_submodule(path), partition)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), **scales)

    @smp.step
    def step(model, x, y):
        loss = loss_of(model(x), y)
        model.backward(loss)
        return loss

    return model, optimizer, step


def train(started, numbers, bad_rank, max_norm):
    model, optimizer, step = started
    scales, skipped, losses = [], [], []
    for number in numbers:
        optimizer.zero_grad()
        losses += [float(loss) for loss in step(model, *batch_of(number, smp.dp_rank())).outputs]
        if number in BAD and smp.rank() == bad_rank and optimizer.loss_scale != 1.0:
            # Sets it on one rank only, after the gradients were reduced over the replicas.
            parameter = list(model.local_parameters())[-1]
            parameter.grad[0].fill_(torch.inf if number % 2 else torch.nan)
        if max_norm:
            norm = optimizer.clip_master_grads(max_norm)
            assert (norm == -1.0) == (number in BAD and optimizer.loss_scale != 1.0), norm
        scales.append(optimizer.loss_scale)
        optimizer.step()
        skipped.append(optimizer.overflow)
    return losses, scales, skipped


def compare(cases):
    """Trains on the default device with each configuration and in plain PyTorch; compares losses, scales, skipped steps
    and weights.

    Args:
        cases: For each: the configuration, the rank whose gradients overflow, and the norm to clip to.
    """
    for config, bad_rank, max_norm in cases:
        half = bool(config.get("fp16"))
        scales = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALES} if half else {}
        started = start(config, **scales)
        replicas = smp.dp_size()
        found = train(started, range(STEPS), bad_rank, max_norm)
        wanted = alone(replicas, torch.float16 if half else torch.bfloat16, max_norm)
        model, optimizer, _ = started
        assert found[1:] == wanted[1:3], (config, found[1:], wanted[1:3])
        assert not half or (sum(found[2]) == len(BAD) and len(set(found[1])) > 2)
        assert smp.allgather(found[1:], smp.WORLD) == [found[1:]] * smp.size()
        ours = [list(each) for each in smp.allgather(found[0], smp.DP_GROUP)]
        both = [loss for number in range(STEPS) for each in ours for loss in each[2 * number : 2 * number + 2]]
        torch.testing.assert_close(both, wanted[0], rtol=2e-2, atol=2e-2)
        masters = optimizer.local_state_dict()["master_weights"]
        for name, parameter in model.local_named_parameters():
            assert parameter.dtype == (torch.float16 if half else torch.bfloat16), name
            assert torch.equal(masters[name].to(parameter.dtype), parameter), name
            torch.testing.assert_close(masters[name], wanted[3][name].detach(), rtol=2e-2, atol=2e-2)
        assert [each for group in optimizer.fp16_groups for each in group] == list(model.local_parameters())
        smp.barrier()
        if smp.state.cfg.ddp:
            torch.distributed.destroy_process_group()
        smp.shutdown()
