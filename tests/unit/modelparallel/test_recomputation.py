"""Recomputation of saved tensors: outputs and gradients keep their bits, cheap results are dropped, and unsafe forwards
raise.
"""

from __future__ import annotations

import gc
import threading

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
    gate = functional.silu(x @ weights[0])
    return functional.dropout(gate * 0.3, 0.5) * gate @ weights[2]


def two_uses(x, *weights):
    # The second use is the product, whose input is kept where its gradient is computed later.
    inner = functional.gelu(x @ weights[0])
    return inner * weights[3] @ weights[2] + inner @ weights[2]


class Written(torch.autograd.Function):
    """Writes without an operation, and tells autograd."""

    @staticmethod
    def forward(ctx, x):
        x.detach().numpy()[...] += 1
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def written_by_a_function(x, *weights):
    inner = functional.gelu((x @ weights[0]).float())
    return Written.apply(inner).to(weights[2].dtype) @ weights[2] + inner.sum()


class Changed(torch.autograd.Function):
    """Returns a copy to which it has written without an operation."""

    @staticmethod
    def forward(ctx, x):
        changed = x.detach().clone().float()
        changed.numpy()[...] += 1
        ctx.save_for_backward(changed)
        return changed

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def changed_by_a_function(x, *weights):
    wide = x @ weights[0]
    return Changed.apply(wide * wide) @ weights[2].float()


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
@pytest.mark.parametrize(
    "body",
    [
        swiglu, new_gelu, gelu, norm, random_numbers, two_uses, recomputed_module, written_by_a_function,
        changed_by_a_function,
    ],
)  # fmt: skip
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
        # The output of `silu` is dropped. The input of dropout is not saved, and its output is kept.
        (random_numbers, False, 512),
        (two_uses, False, 1024),
        (written_by_a_function, False, 0),
        (changed_by_a_function, False, 0),
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
        with pytest.raises(recomputation.UnrepeatableForwardError, match=r"`aten::(add|mul)_` writes to a tensor"):
            written(body)
    # The first write comes before autograd saves the tensor, so the forward is accepted.
    with recomputation.recomputed_pointwise_results(False):
        inner = x * 2
        inner.add_(1)
        source = x.detach() * 2
        result = functional.gelu(source) * x
        output = (inner * inner).sum() + result.sum()
    output.backward()
    assert torch.allclose(x.grad, 4 * (2 * x + 1) + functional.gelu(2 * x.detach()))


def test_collectives_and_normalizations_write_although_their_schemas_do_not_say_so():
    x, mean, variance = torch.randn(8, 4, requires_grad=True), torch.zeros(4), torch.ones(4)
    work = torch.ops.c10d.allreduce_
    assert not any(each.alias_info and each.alias_info.is_write for each in work.default._schema.arguments)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        dropped = []
        for reduces in (False, True):
            with recomputation.recomputed_pointwise_results(False) as recorder:
                inner = x * x
                doubled = functional.gelu(inner)
                if reduces:
                    torch.distributed.all_reduce(doubled.detach())
                _ = doubled * x
            dropped.append(recorder.dropped_bytes())
    finally:
        torch.distributed.destroy_process_group()
    # After a reduction, `doubled` is no longer what the operation returned.
    assert dropped == [128, 0]

    def normalize():
        with recomputation.recomputed_pointwise_results(False):
            _ = x * variance * variance.exp()
            functional.batch_norm(x, mean, variance, training=True)

    with pytest.raises(recomputation.UnrepeatableForwardError, match="batch_norm"):
        normalize()
    # What only autograd needs may change so: it is the same without hooks.
    with recomputation.recomputed_pointwise_results(False):
        for _ in range(2):
            output = functional.batch_norm(x, mean, variance, training=True)
    output.sum().backward()


def test_versions_are_compared_as_without_hooks():
    x = torch.randn(8, 8, requires_grad=True)
    # A write after the forward, to a saved tensor and to the source of a dropped one.
    for body in (lambda inner: inner * inner, lambda inner: functional.gelu(inner) @ x):
        with recomputation.recomputed_pointwise_results(False):
            inner = x * 2
            output = body(inner).sum()
        inner.detach().add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            output.backward()


def test_a_long_chain_of_dropped_tensors_is_cut():
    x = torch.ones(8, 8, requires_grad=True)
    scale = torch.tensor(1.5)
    with recomputation.recomputed_pointwise_results(False) as recorder:
        outputs = [x * scale]
        for _ in range(20_000):
            outputs.append(functional.silu(outputs[-1]))
    # `silu` saves its argument, which the one before returned.
    assert 20_000 * 256 * 0.9 < recorder.dropped_bytes() < 20_000 * 256
    outputs[-1].sum().backward()
    assert x.grad.isfinite().all()


def test_tensors_without_memory_of_their_own_are_kept():
    x = torch.randn(4, 4, requires_grad=True)
    zero = torch._efficientzerotensor(4, 4)
    with recomputation.recomputed_pointwise_results(False) as recorder:
        output = (x * (zero * 2)).sum() + (torch.nested.nested_tensor([x.detach()]) * 2).unbind()[0].sum()
    output.backward()
    assert recorder.dropped_bytes() == 0
    assert torch.equal(x.grad, torch.zeros(4, 4))


def test_only_the_thread_and_the_forward_are_observed():
    x = torch.randn(8, 8, requires_grad=True)

    def write_elsewhere():
        inner = x * 2
        _ = functional.gelu(inner) @ x
        inner.add_(1)

    with recomputation.recomputed_pointwise_results(False) as recorder:
        thread = threading.Thread(target=write_elsewhere)
        thread.start()
        thread.join()
        assert recorder.dropped_bytes() == 0
        nested = recomputation.recomputed_pointwise_results(False)
        with pytest.raises(RuntimeError, match="another recorder"):
            nested.__enter__()
    write_elsewhere()
    assert recorder.dropped_bytes() == 0
    with recomputation.recomputed_pointwise_results(False):
        pass
