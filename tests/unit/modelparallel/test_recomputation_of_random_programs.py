"""Random programs have the same outputs and gradients, bit by bit, with and without recomputation of saved tensors."""

from __future__ import annotations

import contextlib
import random

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from smdistributed._common import shims  # noqa: E402
from smdistributed.modelparallel.torch.runtime import recomputation  # noqa: E402

shims.load_torch()

_WIDTH = 8


class _OwnFunction(torch.autograd.Function):
    """Saves an input, a result of a pointwise operation, and its output."""

    @staticmethod
    def forward(ctx, x):
        inner = functional.silu(x * 2)
        output = inner.clone()
        ctx.save_for_backward(x, inner, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, inner, output = ctx.saved_tensors
        return gradient * inner + x * output


#: Operations on two values, each of `_WIDTH` x `_WIDTH`; the second one may be unused.
_OPERATIONS = {
    "silu": lambda x, _: functional.silu(x),
    "gelu": lambda x, _: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x, _: functional.softplus(x),
    "relu": lambda x, _: torch.relu(x),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "scaled": lambda x, _: 0.7 * x + 0.1,
    "cube": lambda x, _: x.pow(3) * 0.01,
    "narrow": lambda x, _: x.to(torch.bfloat16),
    "wide": lambda x, _: x.to(torch.float64),
    "clone": lambda x, _: x.clone(),
    "clamp": lambda x, _: x.clamp(min=-0.5),
    "masked": lambda x, y: torch.where(y > 0, x, x * 0.5),
    "product": lambda x, y: x * y,
    "sum": lambda x, y: x + y,
    "ratio": lambda x, y: x / (y.abs() + 1),
    "row": lambda x, y: x * y[:1],
    "matmul": lambda x, y: x @ y.to(x.dtype) * 0.3,
    "transposed": lambda x, y: x @ y.to(x.dtype).t() * 0.3,
    "view": lambda x, _: x.t(),
    "part": lambda x, y: torch.cat([x[: _WIDTH // 2], y.to(x.dtype)[_WIDTH // 2 :]]),
    "rows": lambda x, _: x.view(2, _WIDTH // 2, _WIDTH).flatten(0, 1) if x.is_contiguous() else x.contiguous(),
    "layer_norm": lambda x, _: functional.layer_norm(x, (_WIDTH,)),
    "rms_norm": lambda x, y: y[0].to(x.dtype) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)),
    "softmax": lambda x, _: torch.softmax(x, -1),
    "dropout": lambda x, _: functional.dropout(x, 0.3),
    "checkpoint": lambda x, _: torch.utils.checkpoint.checkpoint(
        lambda inner: functional.gelu(inner) * inner, x, use_reentrant=False
    ),
    "own": lambda x, _: _OwnFunction.apply(x),
    "added_in_place": lambda x, y: (x * 1.5).add_(y.to(x.dtype)),
    "relu_in_place": lambda x, _: functional.relu_(x * 2),
    # Writes to a value that others may have saved: an error with and without.
    "written": lambda x, _: x.mul_(1.1) if x.grad_fn is not None and x._base is None else x,
    "part_written": lambda x, y: x.clone().index_copy_(0, torch.tensor([1]), y.to(x.dtype)[:1]),
}


def _run(seed, context, autocast):
    """Runs the program of a seed; returns its output and all gradients, or the error of its backward."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    leaves = [torch.randn(_WIDTH, _WIDTH, dtype=dtype).requires_grad_() for _ in range(3)]
    values = list(leaves)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context:
        for _ in range(draw.randint(4, 16)):
            operation = _OPERATIONS[draw.choice(list(_OPERATIONS))]
            # Newer values are more likely, so that programs are deep.
            x, y = (values[-1 - min(int(draw.expovariate(0.6)), len(values) - 1)] for _ in range(2))
            values.append(operation(x, y))
        output = sum(value.float().sum() * (place + 1) for place, value in enumerate(values[-3:]))
    try:
        output.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
    return [output.detach(), *(each.grad for each in leaves)]


def _same(one, other):
    return all(
        (mine is None and theirs is None) or torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
        for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_programs_have_the_same_bits(monkeypatch, is_split, autocast):
    monkeypatch.setattr(recomputation, "_MIN_BYTES", 0)
    recorders, refused, equal = [], 0, 0

    @contextlib.contextmanager
    def observed():
        with recomputation.recomputed_pointwise_results(is_split) as recorder:
            recorders.append(recorder)
            yield

    for seed in range(400):
        alone = _run(seed, contextlib.nullcontext(), autocast)
        try:
            other = _run(seed, observed(), autocast)
        except recomputation.UnrepeatableForwardError:
            refused += 1
            continue
        # Without hooks, autograd has found a write to a saved tensor, too.
        assert (alone is None) == (other is None), seed
        if alone is not None:
            assert _same(alone, other), seed
            equal += 1
    # The test compares something, and most programs have something to drop.
    assert equal > 200
    assert refused < 150
    assert sum(each.dropped_bytes() > 0 for each in recorders) > 200
