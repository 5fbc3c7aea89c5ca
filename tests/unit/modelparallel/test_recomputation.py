"""Saved tensors that a backward computes again: which are dropped, that all bits stay the same, and what is refused."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn import functional  # noqa: E402

from smdistributed._common import shims  # noqa: E402
from smdistributed.modelparallel.torch.runtime import recomputation  # noqa: E402

shims.load_torch()


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch):
    monkeypatch.setattr(recomputation, "_MIN_BYTES", 0)


def swiglu(x, *weights):
    return (functional.silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]


def new_gelu(x, *weights):
    wide = x @ weights[0]
    return (0.5 * wide * (1.0 + torch.tanh(0.8 * (wide + 0.04 * torch.pow(wide, 3.0))))) @ weights[2]


def gelu(x, *weights):
    # A view of the dropped tensor is saved.
    return functional.gelu(x @ weights[0]).view(2, 4, 16) @ weights[2]


def norm(x, *weights):
    wide = (x @ weights[0]).to(torch.float64)
    # The result is used by three products, whose backwards need it.
    normed = weights[3] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)
    return normed @ weights[2] + functional.softplus(normed) @ weights[2] + normed @ weights[2]


def random_numbers(x, *weights):
    return functional.dropout(functional.silu(x @ weights[0]), 0.5) @ weights[2]


def recomputed_module(x, *weights):
    run = torch.utils.checkpoint.checkpoint
    return run(lambda inner: functional.gelu(inner @ weights[0]), x, use_reentrant=False) @ weights[2]


def tensors(dtype=torch.float32):
    torch.manual_seed(3)
    shapes = (8, 4), (4, 16), (4, 16), (16, 4), (16,)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def outputs_and_gradients(body, context, dtype=torch.float32, autocast=False):
    inputs = tensors(dtype)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if context is None:
            output = body(*inputs)
        else:
            with context:
                output = body(*inputs)
    output.float().pow(2).sum().backward()
    return [output, *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("body", [swiglu, new_gelu, gelu, norm, random_numbers, recomputed_module])
def test_outputs_and_gradients_have_the_same_bits(body, dtype, autocast, is_split):
    alone = outputs_and_gradients(body, None, dtype, autocast)
    other = outputs_and_gradients(body, recomputation.recomputed_pointwise_results(is_split), dtype, autocast)
    assert len(alone) == len(other) >= 3
    assert all(map(torch.equal, alone, other))


@pytest.mark.parametrize(
    ("body", "is_split", "dropped"),
    [
        # Of 8 rows of 16 float32: the result of silu, which the product saves.
        (swiglu, False, 512),
        (swiglu, True, 512),
        # 0.5 * wide and 1 + tanh; the product reads two tensors, so it is kept.
        (new_gelu, False, 1024),
        # The input of a matrix product, which is kept where its gradient is computed later.
        (gelu, False, 512),
        (gelu, True, 0),
        # Dropout draws; and silu's result is not saved by it.
        (random_numbers, False, 0),
    ],
)
def test_results_of_cheap_operations_are_dropped(body, is_split, dropped):
    with recomputation.recomputed_pointwise_results(is_split) as recorder:
        body(*tensors())
    assert recorder.dropped_bytes() == dropped


def test_dropped_tensors_are_freed_in_the_forward_and_their_sources_in_the_backward():
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with recomputation.recomputed_pointwise_results(False):
        inner = x @ weight
        dropped = functional.gelu(inner)
        output = (dropped @ weight).sum()
        result, source = StorageWeakRef(dropped.untyped_storage()), StorageWeakRef(inner.untyped_storage())
        del dropped, inner
        assert result.expired()
    gc.collect()
    assert not source.expired()
    output.backward()
    del output
    gc.collect()
    assert source.expired()
    assert x.grad is not None


def test_a_graph_may_be_used_twice():
    x = torch.randn(8, 8, requires_grad=True)
    with recomputation.recomputed_pointwise_results(False):
        inner = functional.gelu(x * 2)
        output = (inner @ inner).sum()
    output.backward(retain_graph=True)
    first, x.grad = x.grad, None
    output.backward()
    assert torch.equal(first, x.grad)


def test_forwards_that_write_to_saved_tensors_are_refused():
    x = torch.randn(8, 8, requires_grad=True)

    def written(run):
        with recomputation.recomputed_pointwise_results(False):
            run()

    def saved_itself():
        inner = x * 2
        _ = inner * inner
        inner.add_(1)

    def source_of_a_dropped_one():
        inner = x * 2
        _ = functional.gelu(inner) @ x
        inner.mul_(3)

    for body in (saved_itself, source_of_a_dropped_one):
        with pytest.raises(recomputation.WrittenSavedTensorError, match=r"`aten::(add|mul)_` writes to a tensor"):
            written(body)
    # A write before the tensor is saved concerns nobody, and one to the source of a result that is not dropped yet
    # keeps the result.
    with recomputation.recomputed_pointwise_results(False):
        inner = x * 2
        inner.add_(1)
        source = x.detach() * 2
        result = functional.gelu(source) * x
        output = (inner * inner).sum() + result.sum()
    output.backward()
    assert torch.allclose(x.grad, 4 * (2 * x + 1) + functional.gelu(2 * x.detach()))


def test_other_threads_and_later_forwards_are_not_observed():
    x = torch.randn(8, 8, requires_grad=True)
    with recomputation.recomputed_pointwise_results(False):
        pass
    inner = x * 2
    _ = inner * inner
    inner.add_(1)
    nested = recomputation.recomputed_pointwise_results(False)
    with recomputation.recomputed_pointwise_results(False), pytest.raises(RuntimeError, match="another recorder"):
        nested.__enter__()
    with recomputation.recomputed_pointwise_results(False):
        pass
