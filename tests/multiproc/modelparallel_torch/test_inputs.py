"""All ranks of a pipeline run a step with the arguments that its first rank passes."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any

import pytest

from support import Forked, run_ranks

Row = collections.namedtuple("Row", "tokens labels")


@dataclasses.dataclass
class Batch:
    """A batch as a dataclass, with a tensor and a number."""

    tokens: Any
    weight: float


class Sliced:
    """Divides itself into microbatches with `smp_slice`."""

    def __init__(self, rows):
        self.rows = rows

    def smp_slice(self, microbatches, index, axis):
        return self.rows.chunk(microbatches, axis)[index]


def _model(torch, smp, partitions):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(partitions)))
    for place, layer in enumerate(model):
        smp.set_partition(layer, place)
    return smp.DistributedModel(model)


def _arguments_body(partitions):
    """Returns the arguments that the body sees on this rank. Only the first rank passes the right ones."""
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": partitions, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = _model(torch, smp, partitions)
    is_first = smp.pp_rank() == 0
    tokens = torch.arange(4 * 7).view(4, 7)
    x = torch.arange(24.0).view(4, 6)
    passed = {
        "empty": (x, torch.empty(0)),
        "same structure": (x, torch.zeros(4, 6)),
        "None on other ranks": (x, None),
        "another length": (x, torch.zeros(16, 6)),
        "another dtype": (x, torch.zeros(4, 6, dtype=torch.bfloat16)),
        "another structure": ({"x": [x, "text"]}, 5.0),
        "views of one tensor": ([tokens[:, :-1], tokens[:, 1:]], []),
        "transposed": (torch.arange(24.0).view(6, 4).t(), x),
        "strided view": (torch.arange(400.0).view(4, 100)[:, 3:5], None),
        "expanded": (torch.ones(1, 6).expand(4, 6), torch.ones(4, 6)),
        "named tuple": (Row(x, x + 1), Row(x, None)),
        "dataclass": (Batch(x, 2.0), Batch(x * 0, 3.0)),
        "sliced": (Sliced(x), Sliced(None)),
        "plain": ([1, "one", None, True, torch.float16], [2, "two", 1, False, torch.float32]),
        "sparse": ([x.to_sparse()], None),
        "complex": (torch.view_as_complex(x.view(4, 3, 2)).conj(), None),
        "None on the first rank": (None, x),
        "large": (torch.arange(4.0 * 40000).view(4, 40000), None),
        "views with other dtypes": (
            [x.view(torch.uint8).view(-1)[:96].view(4, 24), x, x.view(torch.int32)[:, 1:]],
            None,
        ),
        "an object": (types.SimpleNamespace(rate=0.5), None),
    }
    seen = {}

    @smp.step(non_split_inputs=["whole"])
    def step(model, x, value, whole=None):
        model.backward(model(x).sum())
        seen.setdefault(name, []).append((value, whole))

    for name, (right, wrong) in passed.items():
        own = right if is_first else wrong
        rows = x if is_first else torch.zeros(3)
        if is_first:
            # Sparse tensors are not divided.
            step(model, rows, None if name == "sparse" else own, whole=own)
        else:
            step(model, rows, value=own)
    smp.shutdown()
    return [(name, [_shown(each) for each in values]) for name, values in seen.items()]


def _shown(value):
    import torch

    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.is_sparse else value
        return str(value.dtype), value.stride(), value.tolist()
    if isinstance(value, tuple | list):
        return type(value).__name__, [_shown(each) for each in value]
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    return type(value).__name__, _shown(vars(value)) if hasattr(value, "__dict__") else repr(value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("partitions", [2, 3])
def test_all_ranks_get_the_first_ranks_arguments(partitions):
    first, *others = run_ranks(_arguments_body, partitions, partitions, launcher=Forked("torch"), timeout=100)
    assert first
    assert all(len(values) == 2 for _, values in first)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert ours == theirs


def _local_objects_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = _model(torch, smp, 2)
    is_first = smp.pp_rank() == 0
    x, y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    kept = types.SimpleNamespace(calls=0, last=None)

    class Trainer:
        count = 0

        @smp.step
        def step(self, model, batch, kept):
            kept.calls += 1
            kept.last = torch.ones(2)
            self.count += 1
            # `left` is a view of `x` on the first rank, so this changes `x` on all ranks.
            batch["left"][0] = 5.0
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]) + batch["left"].sum() * 0
            model.backward(loss)
            return loss

    class Sliced:
        def smp_slice(self, num_mb, mb, axis):
            return mb

    # The other rank passes other rows, so it gets all arguments of the first one, even an object of a local class, which
    # cannot be imported by name.
    calls = []

    @smp.step
    def look(model, piece, rows):
        model(rows)
        calls.append(piece)

    look(model, Sliced(), x if is_first else torch.zeros(8, 6))
    assert calls == [0, 1]
    trainer = Trainer()
    dummy = {"left": torch.zeros(4, 2), "x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    losses = []
    for _ in range(3):
        rows = x.clone()
        batch = {"left": rows[:, :2], "x": rows, "y": y} if is_first else dummy
        losses.append(float(trainer.step(model, batch, kept).reduce_mean()))
    assert all(not each.any() for each in dummy.values())
    assert (kept.calls, trainer.count) == (6, 6)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    with torch.no_grad():
        for path, parameter in alone.named_parameters():
            parameter.copy_(dict(model.state_dict())[path])
    rows = x.clone()
    rows[0, :2] = rows[2, :2] = 5.0
    loss = torch.nn.functional.mse_loss(alone(rows), y)
    loss.backward()
    for path, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad / 3, alone.get_parameter(path).grad)
    return losses, float(loss)


@pytest.mark.timeout(120)
def test_tensors_come_from_the_first_rank_and_objects_stay_local():
    for losses, expected in run_ranks(_local_objects_body, 2, launcher=Forked("torch"), timeout=100):
        assert losses == pytest.approx([expected] * 3, rel=1e-6)


def _refused_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = _model(torch, smp, 2)
    is_first = smp.pp_rank() == 0
    x = torch.ones(4, 6)

    @smp.step
    def step(model, x, extra=None):
        model.backward(model(x).sum())

    with pytest.raises(
        smp.exceptions.SMPMismatchError, match=r"`extra` has a `.*ReLU` on partition 0.*none on partition 1"
    ):
        step(model, x, [torch.nn.ReLU()] if is_first else None)
    with pytest.raises(smp.exceptions.SMPMismatchError, match=r"`extra` has a `builtins.function` on partition 0"):
        step(model, x, (lambda: 1) if is_first else None)
    with pytest.raises(
        TypeError if is_first else smp.exceptions.SMPUsageError, match="missing a required argument: 'x'"
    ):
        step(model) if is_first else step(model, x)
    with pytest.raises(smp.exceptions.SMPValidationError, match="`x` has 3 rows"):
        step(model, torch.ones(3, 6) if is_first else x)
    step(model, x, lambda: 1)
    step(model, x) if is_first else step(None)
    gradients = [parameter.grad is not None for parameter in model.local_parameters()]
    smp.shutdown()
    return gradients


@pytest.mark.timeout(120)
def test_arguments_that_cannot_be_sent_raise_on_all_ranks():
    assert run_ranks(_refused_body, 2, launcher=Forked("torch"), timeout=100) == [[True, True]] * 2
