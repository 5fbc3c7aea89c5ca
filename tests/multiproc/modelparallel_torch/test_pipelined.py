"""Models that the pipeline runs without synchronous calls: their modules change objects, read values of tensors or have
hooks. Calls that must run synchronously warn, or raise with `SMD_STRICT_PIPELINE`. Each model also runs in one process.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest

from support import Forked, RanksFailedError, run_ranks

STRICT = {"SMD_STRICT_PIPELINE": "1"}


def _normal(step, width=8, rows=8):
    import torch

    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def _steps(make, batch=None, partitions=2, **config):
    """Runs two steps on partitions and in one process, and compares them. A model's `parts` go to the partitions in turn."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.huggingface_steps import run_model

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = make()
    manual = {"auto_partition": False, "default_partition": 0} if hasattr(model, "parts") else {}

    def place(model):
        for number, part in enumerate(getattr(model, "parts", ())):
            smp.set_partition(part, number % partitions)

    batch = batch or (lambda step: {"x": _normal(step)})
    return run_model(model, batch, "interleaved", partitions, place=place, **manual, **config)


@dataclass
class Notes:
    """An object that modules change; `itself` makes it refer to itself."""

    seen: list
    total: object = None
    count: int = 0
    itself: object = None


def _objects_body():
    import torch
    from torch import nn

    class Part(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear, self.number = nn.Linear(8, 8), number

        def forward(self, x, notes, table, found):
            y = torch.tanh(self.linear(x))
            notes.itself.seen.append(y)
            notes.count += 1
            notes.total = y.square().sum() if notes.total is None else notes.total + y.square().sum()
            table[self.number] = {"mean": y.mean(), "shape": tuple(y.shape)}
            table.setdefault("of all", []).append(y.std())
            if self.number == 2:
                # Both factors are the output of part 0, from objects that part 1 on the other partition has changed since.
                y = y + found["first"] * notes.seen[0]
            found["first"] = y if self.number == 0 else found["first"]
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Part(number) for number in range(4))

        def forward(self, x):
            notes, table, found = Notes([]), {}, {}
            notes.itself = notes
            for part in self.parts:
                x = part(x, notes, table, found=found)
            assert notes.count == len(notes.seen) == len(table["of all"]) == 4
            assert table[3]["shape"] == (2, 8)
            means = sum(table[number]["mean"] for number in range(4)) + sum(table["of all"])
            return {"loss": x.square().mean() + notes.total / 50 + means + notes.seen[1].sum() / 9, "logits": x}

    return _steps(Model)


def test_modules_on_two_partitions_change_the_same_objects():
    for found in run_ranks(_objects_body, 2, launcher=Forked("torch"), env=STRICT, timeout=100):
        assert found["difference"] <= 1e-12
        assert found["partitions"] == [0, 1]


def _unread_body():
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime.transfers import Transfers

    sent = []
    send = Transfers.send
    Transfers.send = lambda self, tensor, to: (sent.append(tuple(tensor.shape)), send(self, tensor, to))[1]

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, cache):
            x = self.linear(x)
            assert all(each.dim() == 3 for each in cache)
            cache.append(x.new_ones(3, 1, 1) * x.mean())
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Part() for _ in range(4))

        def forward(self, x):
            cache = []
            for part in self.parts:
                x = part(x, cache)
            return {"loss": x.square().mean()}

    _steps(Model)
    del smp
    return sorted(set(sent))


def test_cache_entries_that_no_other_partition_reads_are_not_sent():
    assert run_ranks(_unread_body, 2, launcher=Forked("torch"), env=STRICT, timeout=100) == [[(2, 8)]] * 2


def _experts(torch, nn):
    class Experts(nn.Module):
        """A mixture of experts: each row goes to the expert with the largest gate value."""

        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            choice = self.gate(x).argmax(-1)
            y = torch.zeros_like(x)
            for number in choice.unique().tolist():
                (rows,) = torch.where(choice == number)
                y = y.index_add(0, rows, self.experts[number](x[rows]))
            return y + x * torch.softmax(self.gate(x), -1).amax(-1, keepdim=True)

    return Experts


def _check_routing(auto):
    import torch
    from torch import nn

    experts = _experts(torch, nn)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(experts() for _ in range(4))

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return {"loss": x.square().mean(), "logits": x}

    if not auto:
        return _steps(Model)
    # The trace must tie the modules of a mixture of experts, so that partitioning keeps them together.
    model = Model()
    from smdistributed.modelparallel.torch.partitioning import cost_trace

    trace = cost_trace.trace(model, (_normal(0),), {})
    tied = [[trace.modules[at].path for at in tie] for tie in trace.ties]
    assert ["parts.1", "parts.1.gate", *(f"parts.1.experts{rest}" for rest in ("", ".0", ".1", ".2"))] in tied
    return None


def test_mixtures_of_experts_run_in_the_pipeline():
    for found in run_ranks(_check_routing, 2, False, launcher=Forked("torch"), env=STRICT, timeout=100):
        assert found["difference"] <= 1e-12


def test_partitioning_keeps_each_mixture_of_experts_whole():
    run_ranks(_check_routing, 1, True, launcher=Forked("torch"), timeout=100)


def _check_reads_in_a_submodule():
    import os

    from torch import nn

    from smdistributed import _core

    class Clip(nn.Module):
        def forward(self, x):
            return x / 2 if x.abs().max().item() > 1e6 else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.clip = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), Clip()

        def forward(self, x):
            for layer in self.layers:
                x = self.clip(layer(x))
            return {"loss": x.square().mean()}

    found = _steps(Model)
    ((_, _, counts),) = _core.running_fallbacks(os.getpid()) or [(0, 0, [])]
    return found["difference"], found["partitions"], dict(counts).get("undivided_module", 0)


def test_reads_of_values_in_a_small_submodule_do_not_hinder_a_partition():
    # The remedy that the warning of a module that cannot be divided names.
    for difference, partitions, undivided in run_ranks(
        _check_reads_in_a_submodule, 2, launcher=Forked("torch"), env=STRICT, timeout=100
    ):
        assert difference <= 1e-12
        assert (partitions, undivided) == ([0, 1], 0)


def _unexpected_shape_body():
    from torch import nn

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            # The made-up values with which the library records the module are smaller, so it sees the other branch.
            return y[:1] if (x > 1e6).any() else y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Part() for _ in range(2))

        def forward(self, x):
            return {"loss": self.parts[1](self.parts[0](x)).mean()}

    return _steps(Model, lambda step: {"x": _normal(step) + 1e7})


def test_an_output_that_differs_from_the_recorded_one_raises_on_all_ranks():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_unexpected_shape_body, 2, launcher=Forked("torch"), timeout=100)
    text = str(caught.value)
    assert "`parts.0` on partition 0" in text
    assert "With made-up values it was always the same" in text
    assert "rank 1: " in text


def _check_leaves(strict):
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            y = self.parts[0](x)
            return {"loss": self.parts[1](y[y > 0].sum().reshape(1, 1).expand(2, 8)).square().mean()}

    if not strict:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = _steps(Model)
        texts = [str(each.message) for each in seen if "cannot be pipelined" in str(each.message)]
        assert len(texts) == 1
        assert "__getitem__" in texts[0]
        assert "depend on values" in texts[0]
        return found
    with pytest.raises(smp.exceptions.SMPUsageError, match="SMD_STRICT_PIPELINE=1"):
        _steps(Model)
    return None


def test_synchronous_calls_warn_once_and_are_counted():
    for found in run_ranks(_check_leaves, 2, False, launcher=Forked("torch"), timeout=100):
        assert found["difference"] <= 1e-12
        assert list(found["synchronous"].values()) == [8]


def test_synchronous_calls_raise_in_strict_mode():
    run_ranks(_check_leaves, 2, True, launcher=Forked("torch"), env=STRICT, timeout=100)


def _check_own_error():
    import torch
    from torch import nn

    class Part(nn.Linear):
        def forward(self, x):
            return super().forward(torch.cat([x, x], -1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), Part(8, 8)])

        def forward(self, x):
            return {"loss": self.parts[1](self.parts[0](x)).mean()}

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _steps(Model)


def test_an_error_of_a_module_is_raised_on_all_ranks():
    run_ranks(_check_own_error, 2, launcher=Forked("torch"), env=STRICT, timeout=100)


def _hooks_body():
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4))
            self.features = []
            for number in (0, 1, 3):
                self.parts[number][0].register_forward_hook(lambda module, args, output: self.features.append(output))
            self.parts[2].register_forward_hook(lambda module, args, output: output * 2)
            self.parts[3].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

        def __deepcopy__(self, memo):
            new = Model()
            new.load_state_dict(self.state_dict())
            return new

        def forward(self, x):
            self.features.clear()
            for part in self.parts:
                x = part(x)
            return {"loss": x.square().mean() + sum(each.square().mean() for each in self.features)}

    return _steps(Model)


def test_forward_hooks_see_the_tensors_of_the_step():
    for found in run_ranks(_hooks_body, 2, launcher=Forked("torch"), env=STRICT, timeout=100):
        assert found["difference"] <= 1e-12


def _vmap_body():
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x):
            x = self.parts[0](x)
            y = torch.vmap(lambda row, other: (row * other).sum().sin())(x, x + 1)
            z = torch.func.vmap(lambda column: column / column.norm(), in_dims=1, out_dims=1)(self.parts[1](x))
            return {"loss": y.mean() + (z**3).sum()}

    return _steps(Model)


def test_vmap_over_tensors_of_a_partition():
    for found in run_ranks(_vmap_body, 2, launcher=Forked("torch"), env=STRICT, timeout=100):
        assert found["difference"] <= 1e-12


def _mixed_types_body():
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x):
            x = self.parts[1](self.parts[0](x))
            labels = (x.detach() > 0).float()
            return {"loss": nn.functional.binary_cross_entropy_with_logits(x, labels), "logits": x}

    return _steps(Model)


def test_a_loss_whose_dtype_differs_from_that_of_fake_tensors():
    for found in run_ranks(_mixed_types_body, 2, launcher=Forked("torch"), env=STRICT, timeout=100):
        assert found["difference"] <= 1e-6


def _masks_body():
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x, mask):
            x = self.parts[1](self.parts[0](x))
            # The mask of a microbatch determines the sizes of these results, so they differ between microbatches.
            loss = x[mask].square().mean() + x.unsqueeze(1)[:, None, ..., mask[0]].sum()
            loss = loss + x.masked_select(mask[:, :1]).mean() + torch.masked_select(x[0], mask).square().sum()
            lengths = mask.sum(1)
            loss = (
                loss
                + x.repeat_interleave(lengths, 0).square().mean()
                + torch.repeat_interleave(x, repeats=lengths, dim=0)[-1].sum()
            )
            targets = torch.ones(int(lengths.sum()), dtype=torch.int64)
            steps = torch.full((x.shape[0],), 20)
            scores = x.log_softmax(1).expand(20, *x.shape)
            return {"loss": loss + nn.functional.ctc_loss(scores, targets, steps, lengths), "logits": x}

    def batch(step):
        mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(step)) > 0.5
        mask[:, 0] = True
        return {"x": _normal(step), "mask": mask}

    return _steps(Model, batch)


def test_sizes_that_depend_on_replicated_masks():
    for found in run_ranks(_masks_body, 2, launcher=Forked("torch"), env=STRICT, timeout=100):
        assert found["difference"] <= 1e-12
