"""Random numbers in steps. The body draws the same numbers on all ranks. They are those of one process, unless modules on
other partitions draw before it.
"""

from __future__ import annotations

import pytest

from support import Forked, run_ranks


def _check_choices(partitions, seeds_differ):
    """Drops layers and masks columns at random with the generators of Python, NumPy and PyTorch, and compares with one process.

    No module draws. With `seeds_differ`, each rank has another seed, and all use that of the first.
    """
    import random

    import numpy
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": partitions, "microbatches": 4, "auto_partition": False, "default_partition": 0})

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def forward(self, x):
            start = numpy.random.randint(0, 3)
            x = x.clone()
            x[:, start : start + 2] = torch.rand(2)
            for layer in self.layers:
                if random.random() < 0.3 or torch.rand([]) < 0.3:
                    continue
                x = layer(x)
            return x

    torch.manual_seed(1)
    alone, model = Encoder(), Encoder()
    model.load_state_dict(alone.state_dict())
    for place, layer in enumerate(model.layers):
        smp.set_partition(layer, place % partitions)
    model = smp.DistributedModel(model)
    x = torch.randn(8, 6)

    @smp.step
    def step(model, x):
        loss = model(x).square().sum() + model.module.layers[0].weight.sum() * 0
        model.backward(loss)
        return loss

    def seed(number):
        for each in (torch.manual_seed, random.seed, numpy.random.seed):
            each(number)

    def drawn():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    found, numbers_after_steps = [], []
    seed(5 + smp.pp_rank() * seeds_differ)
    for number in range(4):
        if number == 2:
            # Scripts may also seed between two steps.
            seed(9 + smp.pp_rank() * seeds_differ)
        found.append(step(model, x).outputs)
        numbers_after_steps.append(drawn())
    expected, expected_numbers = [], []
    seed(5)
    for number in range(4):
        if number == 2:
            seed(9)
        expected.append([alone(piece).square().sum() for piece in x.chunk(4)])
        expected_numbers.append(drawn())
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other.detach())
    assert numbers_after_steps == expected_numbers


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("partitions", "seeds_differ"), [(2, False), (3, True)])
def test_random_control_flow_equals_one_process(partitions, seeds_differ):
    run_ranks(_check_choices, partitions, partitions, seeds_differ, launcher=Forked("torch"), timeout=100)


class _Forwards:
    """Forwards of a model on two partitions that seed, or restore a generator's state, around modules that draw."""

    def seeded(self, torch, model, x):
        torch.manual_seed(3)
        h = model.a(x)
        torch.manual_seed(4)
        return model.b(h)

    def forked(self, torch, model, x):
        h = model.b(x)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            h = model.b(h)
        return model.b(h)

    def restored(self, torch, model, x):
        state = torch.get_rng_state()
        h = model.b(x)
        torch.set_rng_state(state)
        # Draws the same dropout mask again.
        return model.b(h)

    def drawn_before(self, torch, model, x):
        return model.b(model.a.linear(x) + torch.rand(6))

    def drawn_by_operations(self, torch, model, x):
        torch.manual_seed(5)
        h = torch.nn.functional.dropout(model.a.linear(x), 0.5)
        torch.manual_seed(5)
        return h + torch.nn.functional.dropout(model.b.linear(x), 0.5)

    def python(self, torch, model, x):
        import random

        random.seed(5)
        return model.c(x) + random.random() * 0


def _check_seeds(schedule):
    import random

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.linear(x))

    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(x) * random.random()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Drop(), Drop(), Choice()
            self.body = None

        def forward(self, x):
            return self.body(torch, self, x)

    for name in [name for name in vars(_Forwards) if not name.startswith("_")]:
        smp.init(
            {"partitions": 2, "microbatches": 4, "pipeline": schedule, "auto_partition": False, "default_partition": 0}
        )
        torch.manual_seed(1)
        alone, model = Net(), Net()
        model.load_state_dict(alone.state_dict())
        alone.body = model.body = getattr(_Forwards(), name)
        smp.set_partition(model.b, 1)
        smp.set_partition(model.c, 1)
        model = smp.DistributedModel(model)

        @smp.step
        def step(model, x):
            loss = model(x).square().sum()
            model.backward(loss)
            return loss

        x = torch.randn(8, 6)
        torch.manual_seed(7)
        random.seed(7)
        found = [step(model, x).outputs for _ in range(3)]
        torch.manual_seed(7)
        random.seed(7)
        expected = [[alone(piece).square().sum().detach() for piece in x.chunk(4)] for _ in range(3)]
        # After modules on partitions have drawn, the body's own numbers are not those of one process. So for
        # `drawn_before`, only the first microbatch of the first step is compared.
        comparable = 1 if name == "drawn_before" else 4
        for ours, theirs in list(zip(found, expected, strict=True))[: 1 if name == "drawn_before" else 3]:
            for mine, other in list(zip(ours, theirs, strict=True))[:comparable]:
                torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")
        assert len({float(each) for row in found for each in row}) > 3, name
        smp.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_seeds_around_calls_equal_one_process(schedule):
    run_ranks(_check_seeds, 2, schedule, launcher=Forked("torch"), timeout=100)


def _fresh_body():
    """Checks that neither the noise that the body draws nor the dropout masks repeat; returns the noise."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    smp.set_partition(model[1], 1)
    model = smp.DistributedModel(model)
    seen = []

    @smp.step
    def step(model, x):
        for _ in range(2):
            noise = torch.rand(64, 4)
            seen.append(noise)
            mask = model.module[1](model.module[0](x) * 0 + 1)
            seen.append(mask.detach())
        model.backward(model(x).sum() + noise.sum() * 0)
        return seen[-3:]

    masks = []
    for _ in range(3):
        masks += step(model, torch.ones(128, 4))[1].outputs
    # The masks in `seen` are `RemoteTensor` objects.
    noises = [each for each in seen if type(each) is torch.Tensor]
    assert len(noises) == 12
    for tensors in (noises, masks):
        texts = {str((each > 0.5).tolist()) for each in tensors}
        assert len(texts) == len(tensors)
    return [each.tolist() for each in noises], torch.rand(3).tolist()


@pytest.mark.timeout(120)
def test_noise_never_repeats_and_is_equal_on_all_ranks():
    first, second = run_ranks(_fresh_body, 2, launcher=Forked("torch"), timeout=100)
    assert first == second
