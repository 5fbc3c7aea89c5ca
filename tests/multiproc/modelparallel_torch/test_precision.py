"""16-bit training with master weights, compared with plain PyTorch: overflows on one rank, and resuming."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks


def _check_equality():
    from support.smp.precision import compare

    compare(
        [
            ({"fp16": True, "partitions": 2, "ddp": True}, 3, 0.0),
            # With four partitions two ranks have no parameters, but take part in the decision to skip a step.
            ({"fp16": True, "partitions": 4, "pipeline": "zero_bubble"}, 1, 0.5),
            ({"fp16": True, "partitions": 1, "ddp": True}, 2, 0.5),
            ({"bf16": True, "partitions": 2, "ddp": True}, 3, 0.5),
        ]
    )


def test_all_ranks_skip_overflows_and_training_equals_one_process():
    run_ranks(_check_equality, 4, launcher=Forked("torch"), timeout=100)


def _check_exact():
    """On one rank, sums have the same order as in plain PyTorch, so results are bitwise equal."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.precision import SCALES, STEPS, alone, batch_of, loss_of, start, train

    for dtype, key in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        more = {"dynamic_loss_scaling": True, **SCALES} if key == "fp16" else {}
        started = start({key: True}, **more)
        found = train(started, range(STEPS), 0, 0.0)
        wanted = alone(1, dtype, 0.0)
        assert found[1:] == wanted[1:3]
        assert found[0] == wanted[0]
        masters = started[1].state_dict()["master_weights"]
        assert all(torch.equal(masters[name], each.detach()) for name, each in wanted[3].items())
        smp.shutdown()

    # Calls that are invalid with master weights or loss scaling.
    model, optimizer, _step = start({"fp16": True}, static_loss_scale=8.0)
    x, y = batch_of(0)
    loss_of(model(x), y).backward()
    with pytest.raises(smp.exceptions.SMPUsageError, match=r"call `model.backward\(loss\)`"):
        optimizer.step()
    optimizer.zero_grad()
    model.backward(loss_of(model(x), y))
    with pytest.raises(smp.exceptions.SMPUsageError, match="gradients that are multiplied by the loss scale"):
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


def test_one_rank_is_bitwise_equal_to_plain_pytorch():
    run_ranks(_check_exact, 1, launcher=Forked("torch"), timeout=60)


def _check_resume(folder):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.precision import SCALES, STEPS, start, train

    config = {"fp16": True, "partitions": 2, "ddp": True}
    scales = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALES}

    def content(started):
        model, optimizer, _ = started
        return model.local_state_dict(), optimizer.local_state_dict(), optimizer._loss_scale.state()

    started = start(config, **scales)
    before = train(started, range(5), 3, 0.5)
    saved = [_clone(torch, each) for each in content(started)]
    whole = started[0].state_dict(), started[1].state_dict()
    smp.save_checkpoint(folder, "t", model=started[0], optimizer=started[1])
    with smp.CheckpointManager(f"{folder}/sharded") as manager:
        manager.save(5)
    after = train(started, range(5, STEPS), 3, 0.5)
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
        # The optimizer first: loading the model afterwards must not overwrite the master weights.
        smp.state.optimizer.load_state_dict(saved[1])
        smp.state.model.load_state_dict(saved[0])

    def after_a_step():
        # As the Trainer of transformers does: the optimizer is loaded after the first step, whose gradients were
        # computed with the initial loss scale.
        smp.state.model.load_state_dict(saved[0])
        smp.state.model.register_post_step_hook(lambda model, optimizer: optimizer.load_state_dict(saved[1]))

    for load in (from_files, from_shards, from_dicts, from_parts, after_a_step):
        again = start(config, **scales)
        load()
        found, wanted = train(again, range(5, STEPS), 3, 0.5), after
        if load is after_a_step:
            assert found[1][0] == SCALES["init_scale"] != wanted[1][0]
            found[1][0] = wanted[1][0]
        assert found == wanted, load.__name__
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
    run_ranks(_check_resume, 4, str(tmp_path), launcher=Forked("torch"), timeout=100)
