"""Data-parallel replicas: join, communication hooks, `model.cpu()`; also microbatches that differ, and ZB-V placement.

One job runs all checks.
"""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

CONFIG = {"partitions": 2, "microbatches": 2, "ddp": True, "auto_partition": False, "default_partition": 0}


def _model(torch, smp):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 6)]
    smp.set_partition(layers[3], 1)
    return torch.nn.Sequential(*layers)


def _batch(torch, number, replica):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + replica))


def _join_body(torch, smp, passes, counts):
    """The second replica has more batches than the first; gradients are always divided by the number of replicas."""
    import copy

    smp.init(CONFIG)
    whole = _model(torch, smp)
    alone = copy.deepcopy(whole)
    model = smp.DistributedModel(whole, backward_passes_per_step=passes)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)),
        torch.optim.SGD(alone.parameters(), 0.1),
    ]

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    model.eval()
    alone.eval()
    with model.join():
        with pytest.raises(smp.exceptions.SMPUsageError, match="inside of another"), model.join():
            pass
        for number in range(counts[smp.dp_rank()]):
            step(model, _batch(torch, number, smp.dp_rank()))
            if (number + 1) % passes == 0:
                optimizers[0].step()
                optimizers[0].zero_grad()
    for number in range(max(counts)):
        for replica, count in enumerate(counts):
            if number < count:
                for piece in _batch(torch, number, replica).chunk(2):
                    (alone(piece).square().mean() / 4).backward()
        if (number + 1) % passes == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()
    reference = dict(alone.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter, reference[name], rtol=1e-12, atol=1e-14), name

    # A joined replica may be in training mode while the other one evaluates.
    @smp.step
    def evaluate(model, x):
        return model(x)

    model.train(smp.dp_rank() == 0)
    with model.join():
        for number in range(2 * smp.dp_rank()):
            evaluate(model, _batch(torch, number, 0))
    model.eval()

    # `cpu()` returns the whole model on every rank; no more steps are possible.
    assert model.cpu() is model
    for name, parameter in model.module.named_parameters():
        assert type(parameter) is torch.nn.Parameter
        assert torch.allclose(parameter, reference[name], rtol=1e-12, atol=1e-14), name
    x = _batch(torch, 9, 0)
    assert torch.allclose(model.module(x), alone(x))
    assert torch.allclose(model(x), alone(x))
    with pytest.raises(smp.exceptions.SMPUsageError, match="as a whole"):
        step(model, x)
    smp.shutdown()


def _hook_body(torch, smp):
    """A hook that averages gives the same gradients as the library's own reduction."""
    found = []
    for hooked in (False, True):
        smp.init(CONFIG)
        model = smp.DistributedModel(_model(torch, smp), bucket_cap_mb=0.0001)
        seen = []

        def hook(divisor, bucket, seen=seen):
            seen.append((bucket.index(), bucket.is_last()))
            assert sum(each.numel() for each in bucket.parameters()) == bucket.buffer().numel()
            assert [each.shape for each in bucket.gradients()] == [each.shape for each in bucket.parameters()]
            bucket.set_buffer(bucket.buffer() / divisor)
            group = smp.get_dp_process_group()
            return torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()

        if hooked:
            model.register_comm_hook(smp.dp_size() * 2, hook)
            with pytest.raises(smp.exceptions.SMPUsageError, match="before"):
                model.register_comm_hook(None, hook)

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        step(model, _batch(torch, 0, smp.dp_rank()))
        assert (len(seen) > 1) == hooked
        assert seen == [(index, index == len(seen) - 1) for index in range(len(seen))]
        found.append({name: parameter.grad for name, parameter in model.local_named_parameters()})
        smp.shutdown()
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], rtol=1e-12, atol=1e-14), name


def _differing_body(torch, smp):
    """Microbatches skip layers and use other constants than the microbatches before them."""
    import copy

    smp.init({**CONFIG, "microbatches": 4, "partitions": 4})
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]
    for place, layer in enumerate(layers):
        smp.set_partition(layer, place)
    whole = torch.nn.ModuleList(layers)
    alone = copy.deepcopy(whole)

    class Chain(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x, skip, factor):
            for place, layer in enumerate(self.layers):
                if place != skip:
                    x = layer(x) * factor
            x += 1
            return x

    model, alone = smp.DistributedModel(Chain(whole)), Chain(alone)
    calls = [0, 0]

    def body(model, x, backward, counter):
        calls[counter] += 1
        number = calls[counter]
        output = model(x, 2 if number % 3 == 0 else -1, 1.0 if number % 4 else -0.5)
        loss = output.square().mean()
        loss /= 2 if number % 2 else 3
        backward(loss)
        return loss, output if number % 5 else output * 0.0

    @smp.step
    def step(model, x):
        return body(model, x, model.backward, 0)

    for number in range(4):
        x = _batch(torch, number, 0)
        losses, outputs = step(model, x)
        for place, piece in enumerate(x.chunk(4)):
            loss, output = body(alone, piece, lambda loss: (loss / 4).backward(), 1)
            assert torch.allclose(losses[place], loss, rtol=1e-12), (number, place)
            assert torch.allclose(outputs[place], output, rtol=1e-12), (number, place)
    reference = dict(alone.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, reference[f"layers.{name.rpartition('layers.')[2]}"].grad, rtol=1e-10), (
            name
        )
    smp.shutdown()


def _zb_v_body(torch, smp):
    """ZB-V placement: the first and the last layer are on the first partition."""
    import copy

    smp.init({**CONFIG, "microbatches": 8, "partitions": 4, "pipeline": "zero_bubble"})
    torch.manual_seed(5)
    whole = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(8)))
    for place, layer in enumerate(whole):
        smp.set_partition(layer, min(place, 7 - place))
    alone = copy.deepcopy(whole)
    model = smp.DistributedModel(whole)

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for number in range(2):
        x = _batch(torch, number, 0)
        losses = step(model, x)
        for place, piece in enumerate(x.chunk(8)):
            loss = alone(piece).square().mean()
            (loss / 8).backward()
            assert torch.allclose(losses[place], loss, rtol=1e-12)
    reference = dict(alone.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, reference[name].grad, rtol=1e-10), name
    smp.shutdown()


def _check_models():
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)
    _join_body(torch, smp, 1, (3, 5))
    _join_body(torch, smp, 2, (3, 6))
    _hook_body(torch, smp)
    _differing_body(torch, smp)
    _zb_v_body(torch, smp)


@pytest.mark.timeout(200)
def test_replicas_and_differing_microbatches():
    run_ranks(_check_models, 4, launcher=Forked("torch"), timeout=180)
