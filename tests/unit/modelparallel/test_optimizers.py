"""``smp.optimizers`` compared with the equations of their papers and with PyTorch."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch import optimizers


def _parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 4, dtype=dtype)), torch.nn.Parameter(torch.randn(5, dtype=dtype))]


def _gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)]


def _run(kind, steps=4, **arguments):
    parameters = _parameters()
    optimizer = kind(parameters, **arguments)
    for step in range(steps):
        for parameter, gradient in zip(parameters, _gradients(step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_pytorchs(decoupled):
    ours = _run(optimizers.FusedAdam, lr=0.1, weight_decay=0.1, adam_w_mode=decoupled)
    theirs = _run(torch.optim.AdamW if decoupled else torch.optim.Adam, lr=0.1, weight_decay=0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(SMPUnsupportedError, match="amsgrad"):
        optimizers.FusedAdam(_parameters(), amsgrad=True)
    with pytest.raises(SMPUnsupportedError, match="bias_correction"):
        optimizers.FusedAdam(_parameters(), bias_correction=False)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_lamb_follows_its_paper(limit):
    rate, decay, eps, beta1, beta2 = 0.05, 0.1, 1e-6, 0.9, 0.999
    weights = [each.detach().double() for each in _parameters()]
    first = [torch.zeros_like(each) for each in weights]
    second = [torch.zeros_like(each) for each in weights]
    for step in range(4):
        gradients = [each.double() for each in _gradients(step)]
        if limit:
            norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
            gradients = [each / max(norm / limit, 1.0) for each in gradients]
        for at, gradient in enumerate(gradients):
            first[at] = beta1 * first[at] + (1 - beta1) * gradient
            second[at] = beta2 * second[at] + (1 - beta2) * gradient**2
            ratio = first[at] / (1 - beta1 ** (step + 1)) / ((second[at] / (1 - beta2 ** (step + 1))).sqrt() + eps)
            update = ratio + decay * weights[at]
            weights[at] = weights[at] - rate * weights[at].norm() / update.norm() * update
    ours = _run(optimizers.FusedLAMB, lr=rate, weight_decay=decay, max_grad_norm=limit)
    torch.testing.assert_close([each.double() for each in ours], weights, rtol=1e-5, atol=1e-6)
    assert optimizers.FusedLamb is optimizers.FusedLAMB


def test_novograd_follows_its_paper():
    rate, decay, beta1, beta2 = 0.05, 0.1, 0.95, 0.98
    weights = [each.detach().double() for each in _parameters()]
    moments = [torch.zeros_like(each) for each in weights]
    squares = [0.0, 0.0]
    for step in range(4):
        for at, gradient in enumerate(each.double() for each in _gradients(step)):
            square = float(gradient.square().sum())
            squares[at] = square if step == 0 else beta2 * squares[at] + (1 - beta2) * square
            moments[at] = beta1 * moments[at] + gradient / (math.sqrt(squares[at]) + 1e-8) + decay * weights[at]
            weights[at] = weights[at] - rate * moments[at]
    arguments = {"bias_correction": False, "grad_averaging": False, "reg_inside_moment": True}
    ours = _run(optimizers.FusedNovoGrad, lr=rate, weight_decay=decay, betas=(beta1, beta2), **arguments)
    torch.testing.assert_close([each.double() for each in ours], weights, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="`norm_type` is 1"):
        optimizers.FusedNovoGrad(_parameters(), norm_type=1)


@pytest.mark.parametrize("kind", [optimizers.FusedLAMB, optimizers.FusedNovoGrad])
def test_lamb_and_novograd_reduce_the_loss(kind):
    torch.manual_seed(1)
    model, x = torch.nn.Linear(4, 1), torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    optimizer = kind(model.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("kind", [optimizers.FusedAdam, optimizers.FusedLAMB, optimizers.FusedNovoGrad])
def test_gradients_that_zero_grad_should_keep_are_told(kind):
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            kind(_parameters(), set_grad_none=False)
            kind(_parameters())
    (text,) = (str(one.message) for one in caught)
    assert text.startswith(f"`set_grad_none=False` of `{kind.__name__}` is ignored: ")
