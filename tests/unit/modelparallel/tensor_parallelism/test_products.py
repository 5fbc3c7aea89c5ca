"""Products of tensor-parallel layers in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.torch.nn import products  # noqa: E402


def test_weights_are_cast_once_in_a_region_of_autocast():
    weight, x = torch.nn.Parameter(torch.randn(4, 6)), torch.randn(2, 6)
    gradient = torch.randn(2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        casts = [products._cast(x, weight, None) for _ in range(2)]
    (first, narrow, none), (second, again, _) = casts
    assert narrow.dtype == first.dtype == torch.bfloat16
    assert none is None
    assert again.data_ptr() == narrow.data_ptr()
    assert second.data_ptr() != first.data_ptr(), "activations are not cached"
    (first @ narrow.t() + second @ again.t()).backward(gradient)
    torch.testing.assert_close(weight.grad, 2 * gradient.float().t() @ x.bfloat16().float(), rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert products._cast(weight.detach().double())[0].dtype == torch.float64
    assert products._cast(weight)[0] is weight
