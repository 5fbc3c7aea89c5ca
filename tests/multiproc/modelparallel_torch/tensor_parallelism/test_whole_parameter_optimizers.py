"""LAMB and NovoGrad, whose updates depend on norms of whole parameters: model parallelism is compared with one
process."""

from __future__ import annotations

import itertools
import math

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.timeout(150)

#: The class and its arguments, by name.
KINDS = {
    "clipped": ("FusedLAMB", {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": 0.05}),
    "coupled": ("FusedLAMB", {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": 0.0, "adam_w_mode": False}),
    "nvlamb": ("FusedLAMB", {"lr": 0.02, "weight_decay": 0.0, "use_nvlamb": True}),
    "novograd": ("FusedNovoGrad", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.7)}),
    "largest": ("FusedNovoGrad", {"lr": 0.02, "norm_type": 0, "init_zero": True}),
}


def _check(names, layout, modes=((False, "memory"),)):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, close, config, gathered, gpt_between_layers, tokens

    torch.set_default_dtype(torch.float64)
    tp, pp, rdp = layout
    for name, (prescaled, optimize) in itertools.product(names, modes):
        kind, arguments = KINDS[name]
        smp.init({})
        torch.manual_seed(0)
        alone = gpt_between_layers()
        smp.shutdown()
        optimizer = getattr(smp.optimizers, kind)(alone.parameters(), **arguments)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = torch.stack([alone(tokens(step, replica)) for replica in range(tp * rdp)]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        smp.init(config(tp, pp, prescaled, optimize))
        torch.manual_seed(0)
        model = smp.DistributedModel(gpt_between_layers())
        wrapped = smp.DistributedOptimizer(getattr(smp.optimizers, kind)(model.parameters(), **arguments))

        @smp.step
        def forward_backward(model, ids):
            loss = model(ids)
            model.backward(loss)
            return loss

        for step in range(4):
            wrapped.zero_grad()
            loss = forward_backward(model, batch_of(step, prescaled)).reduce_mean()
            mean = torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean().item()
            assert abs(mean - losses[step]) <= 1e-10 * abs(losses[step]), (name, step, mean, losses[step])
            wrapped.step()
        found = gathered(model, lambda each: each)
        for key, parameter in alone.named_parameters():
            # A softmax does not depend on the bias of the keys. Its gradient is only rounding error, which the
            # normalization by the norm makes large.
            if not key.endswith("key.bias"):
                close(found[key], parameter.detach(), 1e-9, f"{name}: parameter {key}")
        smp.shutdown()


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_norms_are_those_of_whole_parameters(layout):
    run_ranks(_check, 2, list(KINDS), layout, launcher=Forked("torch"), timeout=140)


@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.more)], ids=str)
def test_norms_on_more_ranks(layout):
    run_ranks(_check, math.prod(layout), ["clipped", "novograd"], layout, launcher=Forked("torch"), timeout=140)


def test_norms_in_other_modes():
    modes = [(True, "memory"), (True, "speed"), (False, "speed")]
    run_ranks(_check, 2, ["clipped", "novograd"], (2, 1, 1), modes, launcher=Forked("torch"), timeout=140)


def _reduced_in(function):
    """Returns the shapes of the tensors that `function` all-reduces."""
    import smdistributed.dataparallel.torch.distributed as dist

    original, shapes = dist.all_reduce, []

    def all_reduce(tensor, *args):
        shapes.append(tuple(tensor.shape))
        return original(tensor, *args)

    dist.all_reduce = all_reduce
    try:
        function()
    finally:
        dist.all_reduce = original
    return shapes


def _master_weights():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, config, gpt_between_layers

    counts = []
    for name in ("clipped", "novograd"):
        kind, arguments = KINDS[name]
        smp.init(config(2, 1, False, "memory", bf16=True))
        torch.manual_seed(0)
        model = smp.DistributedModel(gpt_between_layers())
        wrapped = smp.DistributedOptimizer(getattr(smp.optimizers, kind)(model.parameters(), **arguments))

        @smp.step
        def forward_backward(model, ids):
            loss = model(ids)
            model.backward(loss)
            return loss

        forward_backward(model, batch_of(0))
        counts.append(_reduced_in(wrapped.step))
        smp.shutdown()
    return counts


def test_master_weights_need_one_collective_for_all_parameters():
    for lamb, novograd in run_ranks(_master_weights, 2, launcher=Forked("torch"), timeout=100):
        # LAMB: the norm for clipping, then two norms of each sliced parameter (16 in the two layers, and two
        # embeddings).
        divided = lamb[1][0]
        assert lamb == [(), (divided, 2)]
        assert novograd == [(divided,)]
        assert divided >= 18
