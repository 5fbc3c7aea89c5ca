"""Gradients of several models under DistributedDataParallel, in every step.

They are compared with those of torch's DistributedDataParallel over smddp and over gloo, and with those of one process
on the whole batch. `pytest -s` prints the largest differences.
"""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks

BATCH = 4
STEPS = 4


def _start():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    return torch, dist, DistributedDataParallel


def _mlp(torch):
    nn = torch.nn
    return nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))


def _resnet(torch):
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
            self.shortcut = nn.Identity()
            if stride != 1 or inputs != outputs:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )

        def forward(self, x):
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(y + self.shortcut(x))

    widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        *(Block(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def _gpt(torch):
    nn = torch.nn
    vocabulary, width, heads, length = 50, 32, 4, 8

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.mlp(self.ln2(x))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.ln = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            x = self.tokens(ids) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            return self.head(self.ln(x))

    return GPT()


def _branches(torch):
    class Branches(torch.nn.Module):
        """No rank uses branch 3, only rank 0 uses branch 2, in step 0; branches 0 and 1 alternate."""

        def __init__(self):
            super().__init__()
            self.trunk = torch.nn.Linear(12, 12)
            self.branches = torch.nn.ModuleList(torch.nn.Linear(12, 3) for _ in range(4))

        def forward(self, x):
            y = self.trunk(x)
            # The first feature of a row selects its branch, so one process on the whole batch selects the same ones.
            return torch.stack([self.branches[int(row[0].item())](hidden) for row, hidden in zip(x, y, strict=True)])

    return Branches()


def _fixed_branches(torch):
    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.head = (torch.nn.Linear(12, 12) for _ in range(3))

        def forward(self, x):
            return self.head(torch.tanh(self.used(x)))[:, :3]

    return Fixed()


def _sparse(torch):
    nn = torch.nn

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 12, sparse=True)
            self.bags = nn.EmbeddingBag(50, 12, sparse=True, mode="sum")
            self.head = nn.Linear(12, 3)

        def forward(self, ids):
            return self.head(self.words(ids).mean(1) + self.bags(ids))

    return Sparse()


def _dtypes(torch):
    nn = torch.nn

    class Dtypes(nn.Module):
        """Parameters of several types, complex ones among them, and one used twice."""

        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(12, 12).double()
            self.phase = nn.Parameter(torch.randn(12, dtype=torch.complex64))
            self.wide_phase = nn.Parameter(torch.randn(12, dtype=torch.complex128))
            self.single = nn.Linear(12, 3)

        def forward(self, x):
            y = self.wide(self.wide(x.double())) * self.phase * self.wide_phase
            return self.single(y.abs().float())

    return Dtypes()


MODELS = {
    "mlp": (_mlp, [{}, {"bucket_cap_mb": 2048 / 2**20}, {"static_graph": True}]),
    "resnet": (_resnet, [{}, {"broadcast_buffers": False}]),
    "gpt": (_gpt, [{}, {"static_graph": True}, {"find_unused_parameters": True}]),
    "branches": (_branches, [{"find_unused_parameters": True}]),
    "fixed_branches": (_fixed_branches, [{"find_unused_parameters": True}, {"static_graph": True}]),
    "sparse": (_sparse, [{}, {"find_unused_parameters": True}]),
    "dtypes": (_dtypes, [{}]),
}


def _share(torch, name, rank, step):
    """Returns one rank's share of a batch."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name in ("gpt", "sparse"):
        return torch.randint(0, 50, (BATCH, 8), generator=generator)
    if name == "resnet":
        return torch.randn(BATCH, 3, 16, 16, generator=generator)
    x = torch.randn(BATCH, 12, generator=generator)
    if name == "branches":
        x[:, 0] = 2 if (rank, step) == (0, 0) else (rank + step) % 2
    return x


def _gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _compare(torch, where, mine, expected, tolerance):
    """Returns the largest difference of the gradients, each relative to the largest magnitude in the gradient."""
    assert mine.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        if value is None:
            assert mine[name] is None, f"{where}: `{name}` has a gradient"
            continue
        assert mine[name] is not None, f"{where}: `{name}` has no gradient"
        assert mine[name].layout == value.layout, f"{where}: `{name}`"
        a, b = (g.to_dense() if g.is_sparse else g for g in (mine[name], value))
        scale = b.abs().max().item() or 1.0
        difference = (a - b).abs().max().item() / scale
        assert difference <= tolerance, f"{where}: `{name}` has a relative difference of {difference:.1e}"
        worst = max(worst, difference)
    return worst


def _table_body():
    """Returns for each model the number of steps and the largest differences from torch's DDP and from one process."""
    import copy
    import warnings

    torch, dist, ddp_class = _start()
    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    theirs_class = torch.nn.parallel.DistributedDataParallel
    smddp = torch.distributed.new_group(backend="smddp")
    # With two ranks the sum has only one order, so the gradients are bitwise equal.
    tolerance = 0.0 if size == 2 else 1e-6
    found = {}
    for name, (make, options) in MODELS.items():
        compared, from_torch, from_one = 0, 0.0, 0.0
        for keywords in options:
            alone = make(torch)
            ours, theirs = (kind(copy.deepcopy(alone), **keywords) for kind in (ddp_class, theirs_class))
            over_smddp = theirs_class(copy.deepcopy(alone), process_group=smddp, **keywords)
            models = (ours, over_smddp, theirs, alone)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
            for step in range(STEPS):
                where = f"rank {rank}, {name}, {keywords}, step {step}"
                for optimizer in optimizers:
                    optimizer.zero_grad()
                x = _share(torch, name, rank, step)
                for model in (ours, over_smddp, theirs):
                    model(x).square().mean().backward()
                expected = _gradients(theirs.module)
                mine, smddps = _gradients(ours.module), _gradients(over_smddp.module)
                for what, gradients in (("", mine), (", smddp", smddps)):
                    difference = _compare(torch, where + what, gradients, expected, tolerance)
                    from_torch = max(from_torch, difference)
                if name != "resnet":
                    # BatchNorm normalizes over one rank's share, so one process on the whole batch gets other values.
                    for r in range(size):
                        (alone(_share(torch, name, r, step)).square().mean() / size).backward()
                    difference = _compare(torch, f"{where}, alone", mine, _gradients(alone), 2e-5)
                    from_one = max(from_one, difference)
                for (key, buffer), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
                    if keywords.get("broadcast_buffers", True) and rank != 0:
                        break  # torch's DDP broadcasts rank 0's buffers in the next forward only
                    torch.testing.assert_close(buffer, other, msg=key)
                compared += 1
                for optimizer in optimizers:
                    optimizer.step()
                for (key, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
                    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")
                if size > 2:
                    # All models start the next step from bitwise equal parameters.
                    with torch.no_grad():
                        for model in models[1:]:
                            for mine, other in zip(ours.parameters(), model.parameters(), strict=True):
                                other.copy_(mine)
        found[name] = compared, from_torch, from_one
    return found


@pytest.mark.parametrize("size", [more(2), 3, more(4)])
def test_gradients_equal_torchs_and_those_of_one_process(size):
    ranks = run_ranks(_table_body, size, launcher=Forked("torch"), timeout=90)
    for name, (_, options) in MODELS.items():
        steps, from_torch, from_one = (max(found[name][at] for found in ranks) for at in range(3))
        assert steps == STEPS * len(options)
        # The model with BatchNorm is not compared with one process.
        one = "" if name == "resnet" else f", {from_one:.1e} from one process's"
        print(f"{size} ranks, {name}: {steps} steps, {from_torch:.1e} from torch's{one}")
