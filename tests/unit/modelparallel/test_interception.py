"""Functions that are replaced while a step is recorded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.torch.tracing import interception  # noqa: E402 - needs PyTorch


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


# `_FunctionBase.apply` is implemented in C. Before PyTorch 2.15, `Function.apply` is a class method in Python.
@pytest.mark.parametrize("owner", [torch._C._FunctionBase, torch.autograd.Function])
def test_apply_may_be_implemented_in_c_or_in_python(owner):
    original = vars(owner)["apply"]
    replaced = interception._applied(original)
    x = torch.ones(3, requires_grad=True)
    for apply in (replaced.__get__(None, _Double), interception._Apply(_Double, original.__get__(None, _Double))):
        (gradient,) = torch.autograd.grad(apply(x).sum(), x)
        assert gradient.tolist() == [2, 2, 2]
