"""Estimated times and memory of calls."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from smdistributed.modelparallel.torch import activation_checkpointing  # noqa: E402
from smdistributed.modelparallel.torch.partitioning import cost_model, cost_trace  # noqa: E402
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpecs  # noqa: E402
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta  # noqa: E402


class _Block(nn.Module):
    def __init__(self, width, checkpointed):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if checkpointed:
            activation_checkpointing.set_activation_checkpointing(self)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _cost(call, module):
    specs, argument = OutputSpecs(), torch.ones(32, 64, requires_grad=True)
    return specs.of(specs.module(module, call or module), (argument,), {}, TensorMeta.of).cost


@pytest.mark.parametrize("how", ["set", "called"])
def test_checkpointing_saves_activations_but_not_deferred_weight_gradients(how):
    module = _Block(64, False)
    plain = _cost(None, module)
    if how == "set":
        again = _cost(None, _Block(64, True))
    else:
        again = _cost(lambda *args: activation_checkpointing._run(module, True, *args), module)
    row = 32 * 64 * 4
    # The norm keeps two numbers for each row and the input of the first layer; relu keeps the input of the second
    # layer.
    assert plain.kept_bytes == 2 * 32 * 4 + row + 4 * row
    assert again.kept_bytes == 0
    # Two layers, whose weight gradients wait: each keeps its input and the gradient of its output.
    assert plain.waiting_bytes == again.waiting_bytes == (row + 4 * row) + (4 * row + row)
    assert again.forward == plain.forward
    assert (again.input, again.weight) == (plain.input + plain.forward, plain.weight)


def test_the_gradient_of_an_embedding_belongs_to_the_second_part_of_a_backward():
    specs, numbers = OutputSpecs(), torch.zeros(32, 64, dtype=torch.int64)
    table = nn.Embedding(100, 16)
    cost = specs.of(specs.module(table, table), (numbers,), {}, TensorMeta.of).cost
    assert (cost.input, cost.weight) == (0, cost.forward)
    assert cost.waiting_bytes == 32 * 64 * (8 + 16 * 4)


class _Grouped(nn.Module):
    """Four heads of queries share two heads of keys and values."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        heads = self.project(x).view(1, 32, 4, 16).transpose(1, 2)
        shared = heads[:, ::2]
        return nn.functional.scaled_dot_product_attention(heads, shared, shared, enable_gqa=True)


def test_grouped_query_attention_has_a_cost():
    cost = _cost(None, _Grouped())
    assert cost.forward > _cost(None, nn.Linear(64, 64)).forward


def test_an_operation_whose_formula_fails_has_a_cost(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("shapes that the formula does not expect")

    known = _cost(None, nn.Linear(64, 64))
    monkeypatch.setitem(cost_model._FLOPS, torch.ops.aten.addmm, fails)
    assert _cost(None, nn.Linear(64, 64)) == known


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no grouped matrix product")
@pytest.mark.parametrize("how", ["call", "model"])
def test_operations_that_fail_on_fake_tensors_are_not_logged(how, caplog, monkeypatch):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 64, 64))

        def forward(self, x):
            # Runs on CPUs, but fails on fake tensors of float32.
            return torch._grouped_mm(x, self.weight, offs=torch.tensor([16, 32], dtype=torch.int32))

    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "propagate", True)
    if how == "call":
        cost = _cost(None, Experts())
        assert cost is not None
    else:
        tree = cost_trace.trace(Experts(), (torch.ones(32, 64),), {})
        assert len(tree.modules) == 1
    assert not caplog.records
