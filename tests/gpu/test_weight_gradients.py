"""Gradients of weights apart from the rest of a backward, and attention masks, on a GPU."""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.devices import needs_four, needs_one

pytestmark = [pytest.mark.timeout(200), needs_one]


def _uses_body():
    """Returns the uses of a weight whose deferred gradient differs from that of PyTorch."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.weight_uses import USES

    smp.init({})
    torch.cuda.set_device(devices.own())
    torch.manual_seed(0)
    failed = []
    for use, (shape, shape_of_x, function) in USES.items():
        narrow = torch.bfloat16 if use.startswith("groups") else torch.float64
        for dtype, casts in ((narrow, False), (torch.float32, True)):
            own = torch.randn(shape, dtype=dtype, device="cuda")
            weight, expected = torch.nn.Parameter(own), torch.nn.Parameter(own.clone())
            waiting = []
            for _ in range(3):
                x = torch.randn(shape_of_x, dtype=dtype, device="cuda")
                ours, theirs = (x.clone().requires_grad_() for _ in range(2))
                with torch.autocast("cuda", torch.bfloat16, enabled=casts):
                    if casts and use.startswith("groups"):
                        # Autocast does not know this product.
                        output = function(weight.bfloat16(), ours.bfloat16())
                        whole = function(expected.bfloat16(), theirs.bfloat16())
                    else:
                        output, whole = function(weight, ours), function(expected, theirs)
                gradient = torch.randn_like(whole)
                weights = torch.classes.smd.WeightGradients([output], [ours])
                torch.autograd.backward(output, gradient, inputs=weights.begin(True))
                weights.end()
                waiting.append(weights)
                whole.backward(gradient)
            if weight.grad is not None or any(each.unsplit_node() for each in waiting):
                failed.append(f"{use}, {dtype}: the gradient was not deferred")
                continue
            for weights in waiting:
                weights.run()
            error = (weight.grad - expected.grad).double().norm() / expected.grad.double().norm()
            if error > (1e-12 if dtype == torch.float64 else 1e-2) or weight.grad.dtype != dtype:
                failed.append(f"{use}, {dtype}: {error.item():.1e}")
    smp.shutdown()
    return failed


def test_uses_of_a_weight_have_their_gradient_later():
    assert run_ranks(_uses_body, 1, timeout=100) == [[]]


def _check_masks(partitions):
    """Trains a Llama under tensor parallelism, with masks that mask nothing and with others, beside one process."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.exact_models import exact
    from support.smp.huggingface import causal_configurations, make_causal
    from support.tensor_parallel import config, tokens

    torch.cuda.set_device(devices.own())
    torch.set_default_dtype(torch.float64)
    settings = causal_configurations()["llama"]
    settings.num_hidden_layers = 3
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, bias=None, *rest, **more):
        calls.append(bias is None)
        return attend(query, key, value, bias, *rest, **more)

    def loss_of(model, ids, mask):
        logits = model(input_ids=ids, attention_mask=mask).logits
        labels = ids.masked_fill(mask == 0, -100)[:, 1:]
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())

    alone = exact(make_causal(settings)).cuda()
    smp.init(config(2, partitions, True, "speed", microbatches=4))
    with smp.tensor_parallelism():
        whole = exact(make_causal(settings))
    model = smp.DistributedModel(whole)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)), torch.optim.SGD(alone.parameters(), 0.1)
    ]  # fmt: skip

    @smp.step
    def step_function(model, ids, mask):
        loss = loss_of(model, ids, mask)
        model.backward(loss)
        return loss

    for step in range(4):
        ids = tokens(step, 0, batch=8).cuda()
        mask = torch.ones_like(ids)
        if step % 2:
            # Microbatches 1 and 3 have padding.
            mask[2, 4:] = mask[6, 3:] = 0
        expected = torch.stack([loss_of(alone, *each) for each in zip(ids.chunk(4), mask.chunk(4), strict=True)])
        expected.mean().backward()
        torch.nn.functional.scaled_dot_product_attention = attention
        calls.clear()
        found = torch.stack(list(step_function(model, ids, mask)))
        torch.nn.functional.scaled_dot_product_attention = attend
        torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-8)
        if step:
            # In the first step, fake tensors pass through the layers, too.
            assert calls.count(True) == len(calls) // (2 if step % 2 else 1), (step, calls)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=needs_four)])
def test_masks_without_padding_are_dropped(partitions):
    pytest.importorskip("transformers")
    run_ranks(_check_masks, 2 * partitions, partitions, timeout=180)
