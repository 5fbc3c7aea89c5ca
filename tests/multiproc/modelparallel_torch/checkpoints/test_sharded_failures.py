"""A rank fails while the ranks put sharded tensors together: all ranks raise its error, and can save afterwards."""

from __future__ import annotations

import os
import sys
import time

import pytest

from support import Forked, forks, run_ranks

#: Seconds within which all ranks raise the error.
SOON = 10.0
SETTINGS = {
    "parameters": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10},
    "states": {"shard_optimizer_state": True},
}


def _job(kind):
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 1, "ddp": True, **SETTINGS[kind]})
    torch.manual_seed(3)
    model = smp.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(33, 33) for _ in range(4))))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(2, 33))
    optimizer.step()
    return smp, model


def _error(smp, soon, call):
    """Returns the text of the error that ``call`` raises; asserts that it is prompt and equal on all ranks."""
    begin = time.monotonic()
    with pytest.raises(smp.exceptions.SMPCheckpointError) as caught:
        call()
    assert time.monotonic() - begin < soon
    texts = smp.allgather(str(caught.value), smp.WORLD)
    assert len(set(texts)) == 1, texts
    return texts[0]


def _failing(original, wanted, after):
    """Returns a function like ``original`` that raises in the calls for which ``wanted`` is true, but the first ones."""
    seen = []

    def call(*arguments, **options):
        if wanted(*arguments, **options):
            seen.append(1)
            if len(seen) > after:
                raise RuntimeError("out of memory")
        return original(*arguments, **options)

    return call


def _called_by(package):
    """Returns a condition: whether the call comes from a module of a package."""
    return lambda *_, **__: f"modelparallel.torch.{package}" in sys._getframe(2).f_globals["__name__"]


def _check_saves(folder, kind, soon):
    import torch

    from smdistributed.modelparallel.torch.checkpoint import sharded_tensors

    smp, _ = _job(kind)
    manager = smp.CheckpointManager(folder, asynchronous=False)
    manager.save(1)
    is_failing = smp.rank() == 1
    # Memory of the device for the first tensor, a copy of a shard to it, and memory of the host for the third one.
    for owner, name, wanted, after in (
        (sharded_tensors, "current_device", lambda: True, 0),
        (torch.Tensor, "copy_", _called_by("checkpoint.sharded_tensors"), 2),
        (sharded_tensors, "_written", lambda *_: True, 2),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if is_failing:
                patch.setattr(owner, name, _failing(getattr(owner, name), wanted, after))
            text = _error(smp, soon, lambda: manager.save(2))
        assert "rank 1: RuntimeError: out of memory" in text, text
        assert manager.latest() == "step-1"
    manager.save(2)
    assert manager.latest() == "step-2"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_a_save_of_sharded_tensors_that_fails_on_one_rank_raises_on_all(kind, tmp_path):
    soon = SOON * forks.patience
    run_ranks(_check_saves, 2, os.fspath(tmp_path), kind, soon, launcher=Forked("torch"), timeout=90)


def _check_states(to_first, soon):
    import torch

    smp, model = _job("parameters")
    expected = model.state_dict(gather_to_rank0=to_first)
    assert bool(expected) == (smp.rank() == 0 or not to_first)
    failing = 0 if to_first else 1
    # Memory of the device for a unit, and of the host for the third parameter.
    for owner, name, wanted, after in (
        (torch, "empty", _called_by("sharding"), 0),
        (torch.Tensor, "to", lambda *_, copy=False: copy, 2),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if smp.rank() == failing:
                patch.setattr(owner, name, _failing(getattr(owner, name), wanted, after))
            text = _error(smp, soon, lambda: model.state_dict(gather_to_rank0=to_first))
        assert f"rank {failing}: RuntimeError: out of memory" in text, text
    found = model.state_dict(gather_to_rank0=to_first)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("to_first", [False, True], ids=["on all ranks", "on the first"])
def test_a_state_of_sharded_parameters_that_fails_on_one_rank_raises_on_all(to_first):
    run_ranks(_check_states, 2, to_first, SOON * forks.patience, launcher=Forked("torch"), timeout=90)
