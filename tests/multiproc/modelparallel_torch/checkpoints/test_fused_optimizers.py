"""Fused optimizers resume bitwise. Their kernels need parameters and states in the same memory layout."""

from __future__ import annotations

import copy
import os

import pytest

from support import Forked, run_ranks

#: Partitions and tensor-parallel degree of the job that saves, and those of jobs that resume.
SAVED_AND_LOADED = [((2, 2), [(2, 2)]), ((1, 4), [(1, 4), (4, 1)])]


def _started(layout, seed):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, config, gpt_between_layers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = gpt_between_layers()
            # A parameter in channels-last layout, as image models often have.
            self.images = torch.nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last)

        def forward(self, ids):
            image = ids[:, :4, None, None].expand(-1, -1, 3, 3).to(torch.get_default_dtype())
            return self.gpt(ids) + self.images(image).square().mean()

    partitions, degree = layout
    smp.init(config(degree, partitions, False, "memory"))
    torch.manual_seed(seed)
    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2, fused=True))

    @smp.step
    def step(model, ids):
        loss = model(ids)
        model.backward(loss)
        return loss

    def train(number):
        optimizer.zero_grad()
        step(model, batch_of(number))
        optimizer.step()

    return model, optimizer, train


def _check_memory(optimizer):
    """Asserts that states have the strides of their parameters, and storage of their own."""
    for parameter, states in optimizer.optimizer.state.items():
        for key, value in states.items():
            assert key == "step" or value.stride() == parameter.stride(), (key, value.stride(), parameter.stride())
            assert value.untyped_storage().nbytes() == value.nbytes, (key, value.shape)


def _equal(torch, one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(torch, one[key], other[key]) for key in one)
    return torch.equal(one, other)


def _check_resumed_steps(folder):
    import torch

    import smdistributed.modelparallel.torch as smp

    for number, (saved, others) in enumerate(SAVED_AND_LOADED):
        model, optimizer, train = _started(saved, 0)
        for step in range(3):
            train(step)
        where = os.path.join(folder, str(number))
        smp.save_checkpoint(where, "partial", model=model, optimizer=optimizer)
        smp.save_checkpoint(where, "core", format="sharded")
        weights, whole, own = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.local_state_dict()))
        train(3)
        after = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        smp.shutdown()
        for other in others:
            for kind in ("partial", "core", "whole", "own")[: 4 if other == saved else 2]:
                model, optimizer, train = _started(other, 7)
                if kind in ("partial", "core"):
                    smp.resume_from_checkpoint(where, kind)
                else:
                    model.load_state_dict(weights)
                    optimizer.load_state_dict(copy.deepcopy(whole if kind == "whole" else own))
                # A pipeline loads in its first step, which partitions the model.
                train(3)
                _check_memory(optimizer)
                if other == saved:
                    found = model.state_dict(), optimizer.state_dict()["state"]
                    assert _equal(torch, found[0], after[0]), (saved, other, kind)
                    assert _equal(torch, found[1], after[1]), (saved, other, kind)
                smp.shutdown()


@pytest.mark.timeout(150)
def test_fused_optimizers_resume_bit_for_bit(tmp_path):
    run_ranks(_check_resumed_steps, 4, os.fspath(tmp_path), launcher=Forked("torch"), timeout=140)
