"""16-bit training with master weights: beside the same training written in plain PyTorch, with overflows on one rank only,
and resumed."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

SCALES = {"init_scale": 2.0**10, "scale_window": 3, "delayed_shift": 2, "min_scale": 4}
#: Steps in which one rank finds a gradient that is not finite.
BAD = (1, 2, 3, 8, 9)
STEPS = 12


def _model(torch):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 6, bias=False)
    )


def _batch(torch, number, replica=0):
    generator = torch.Generator().manual_seed(100 * number + replica)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def _loss(torch, output, y):
    assert output.dtype == torch.float32
    return (output - y).square().mean()


def _alone(torch, replicas, dtype, max_norm):
    """The training in plain PyTorch: losses, scales, skipped steps, master weights."""
    from smdistributed import _core

    model = _model(torch).to(dtype)
    masters = [torch.nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    half = dtype is torch.float16
    scale = _core.LossScale(SCALES["init_scale"], True, 2.0, 3, 4.0, 2) if half else _core.LossScale(1.0)
    scales, skipped, losses = [], [], []
    for number in range(STEPS):
        sums = [torch.zeros_like(each) for each in masters]
        for replica in range(replicas):
            model.zero_grad()
            for x, y in zip(*(each.chunk(2) for each in _batch(torch, number, replica)), strict=True):
                loss = _loss(torch, model(x.to(dtype)).float(), y)
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


def _start(torch, smp, config, **scales):
    smp.init({"microbatches": 2, "auto_partition": False, "default_partition": 0, **config})
    module = _model(torch)
    if smp.pp_size() > 1:
        for path, partition in (("2", 1), ("3", 1)):
            smp.set_partition(module.get_submodule(path), partition)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), **scales)

    @smp.step
    def step(model, x, y):
        loss = _loss(torch, model(x), y)
        model.backward(loss)
        return loss

    return model, optimizer, step


def _train(torch, smp, started, numbers, bad_rank, max_norm):
    model, optimizer, step = started
    scales, skipped, losses = [], [], []
    for number in numbers:
        optimizer.zero_grad()
        losses += [float(loss) for loss in step(model, *_batch(torch, number, smp.dp_rank())).outputs]
        if number in BAD and smp.rank() == bad_rank and optimizer.loss_scale != 1.0:
            # Of one rank alone: after the reduction over replicas.
            parameter = list(model.local_parameters())[-1]
            parameter.grad[0].fill_(torch.inf if number % 2 else torch.nan)
        if max_norm:
            norm = optimizer.clip_master_grads(max_norm)
            assert (norm == -1.0) == (number in BAD and optimizer.loss_scale != 1.0), norm
        scales.append(optimizer.loss_scale)
        optimizer.step()
        skipped.append(optimizer.overflow)
    return losses, scales, skipped


def _equality_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    cases = [
        ({"fp16": True, "partitions": 2, "ddp": True}, 3, 0.0),
        # Two ranks without parameters take part in the decision.
        ({"fp16": True, "partitions": 4, "pipeline": "zero_bubble"}, 1, 0.5),
        ({"fp16": True, "partitions": 1, "ddp": True}, 2, 0.5),
        ({"bf16": True, "partitions": 2, "ddp": True}, 3, 0.5),
    ]
    for config, bad_rank, max_norm in cases:
        half = bool(config.get("fp16"))
        scales = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALES} if half else {}
        started = _start(torch, smp, config, **scales)
        replicas = smp.dp_size()
        found = _train(torch, smp, started, range(STEPS), bad_rank, max_norm)
        wanted = _alone(torch, replicas, torch.float16 if half else torch.bfloat16, max_norm)
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


def test_overflows_on_one_rank_are_skipped_by_all_and_the_training_is_that_of_one_process():
    run_ranks(_equality_body, 4, launcher=Forked("torch"), timeout=100)


def _exact_body():
    """One rank, so nothing is rounded in another order: bit for bit."""
    import torch

    import smdistributed.modelparallel.torch as smp

    for dtype, key in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        more = {"dynamic_loss_scaling": True, **SCALES} if key == "fp16" else {}
        started = _start(torch, smp, {key: True}, **more)
        found = _train(torch, smp, started, range(STEPS), 0, 0.0)
        wanted = _alone(torch, 1, dtype, 0.0)
        assert found[1:] == wanted[1:3]
        assert found[0] == wanted[0]
        masters = started[1].state_dict()["master_weights"]
        assert all(torch.equal(masters[name], each.detach()) for name, each in wanted[3].items())
        smp.shutdown()

    # What does not go together is told.
    model, optimizer, _step = _start(torch, smp, {"fp16": True}, static_loss_scale=8.0)
    x, y = _batch(torch, 0)
    _loss(torch, model(x), y).backward()
    with pytest.raises(smp.exceptions.SMPUsageError, match=r"call `model.backward\(loss\)`"):
        optimizer.step()
    optimizer.zero_grad()
    model.backward(_loss(torch, model(x), y))
    with pytest.raises(smp.exceptions.SMPUsageError, match="gradients with the loss scale"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = smp.clip_grad_norm_(model.parameters(), 1e-3)
    assert optimizer.clip_master_grads(1.0) == pytest.approx(1e-3, rel=1e-3)
    assert float(norm) > 1e-3
    optimizer.step()
    assert optimizer.loss_scale == 8.0
    for arguments, text in (
        ({"static_loss_scale": None}, "without `dynamic_loss_scale`"),
        ({"static_loss_scale": 0.0}, "the loss scale is 0"),
        ({"dynamic_loss_scale": True, "scale_factor": 1.0}, "`scale_factor` is 1"),
        ({"dynamic_loss_scale": True, "scale_window": 0.5}, "`scale_window` is 0.5"),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"consecutive_hysteresis": 1}}, "`consecutive_hysteresis`"),
    ):
        with pytest.raises(smp.exceptions.SMPValidationError, match=text):
            smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **arguments)
    smp.shutdown()


def test_one_rank_trains_as_plain_pytorch_bit_for_bit():
    run_ranks(_exact_body, 1, launcher=Forked("torch"), timeout=60)


def _resume_body(folder):
    import torch

    import smdistributed.modelparallel.torch as smp

    config = {"fp16": True, "partitions": 2, "ddp": True}
    scales = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALES}

    def content(started):
        model, optimizer, _ = started
        return model.local_state_dict(), optimizer.local_state_dict(), optimizer._loss_scale.state()

    started = _start(torch, smp, config, **scales)
    before = _train(torch, smp, started, range(5), 3, 0.5)
    saved = [_clone(torch, each) for each in content(started)]
    whole = started[0].state_dict(), started[1].state_dict()
    smp.save_checkpoint(folder, "t", model=started[0], optimizer=started[1])
    with smp.CheckpointManager(f"{folder}/sharded") as manager:
        manager.save(5)
    after = _train(torch, smp, started, range(5, STEPS), 3, 0.5)
    final = content(started)
    assert before[1] != after[1]
    smp.shutdown()

    def from_files():
        smp.resume_from_checkpoint(folder, "t")

    def from_shards():
        smp.CheckpointManager(f"{folder}/sharded").load()

    def from_dicts():
        smp.state.model.load_state_dict(whole[0])
        smp.state.optimizer.load_state_dict(whole[1])

    def from_parts():
        # In the other order: masters are not lost by what is loaded after them.
        smp.state.optimizer.load_state_dict(saved[1])
        smp.state.model.load_state_dict(saved[0])

    for load in (from_files, from_shards, from_dicts, from_parts):
        again = _start(torch, smp, config, **scales)
        load()
        assert _train(torch, smp, again, range(5, STEPS), 3, 0.5) == after, load.__name__
        _same(torch, content(again), final, load.__name__)
        smp.shutdown()
    torch.distributed.destroy_process_group()


def _clone(torch, value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _clone(torch, item) for key, item in value.items()}
    return value


def _same(torch, one, other, where):
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _same(torch, one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        for place, pair in enumerate(zip(one, other, strict=True)):
            _same(torch, *pair, f"{where}/{place}")
    else:
        assert one == other, where


def test_master_weights_and_scale_are_resumed_bit_for_bit(tmp_path):
    run_ranks(_resume_body, 4, str(tmp_path), launcher=Forked("torch"), timeout=100)
