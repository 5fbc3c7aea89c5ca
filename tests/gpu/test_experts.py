"""The experts' products in bfloat16 on a GPU: equal to products in float32, without a wait of the host for the router."""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(150), needs_one]

#: Experts, features, inner features, tokens, and experts that a token uses.
SIZES = [(8, 1024, 2816, 4096, 2), (4, 64, 96, 5, 2), (16, 256, 512, 1, 1), (3, 128, 64, 777, 3)]


def _check_experts(degree):
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn.experts import Experts

    torch.cuda.set_device(devices.own())
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    smp.init({"tensor_parallel_degree": degree, "ddp": True})

    def run(experts, tokens, weights, chosen):
        tokens, weights = (each.clone().requires_grad_() for each in (tokens, weights))
        experts.zero_grad()
        output = experts(tokens, weights, chosen)
        output.float().square().sum().backward()
        return [output, tokens.grad, weights.grad, *(each.grad for each in experts.parameters())]

    for number, (count, hidden, inner, rows, each) in enumerate(SIZES):
        torch.manual_seed(number)
        wide = Experts(count, hidden, inner, "silu", hidden**-0.5, True)
        narrow = Experts(count, hidden, inner, "silu", hidden**-0.5, True).bfloat16()
        with torch.no_grad():
            for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
                one.copy_(other.copy_(one))
        # The last expert has no token.
        chosen = torch.stack([torch.randperm(max(count - 1, each))[:each] for _ in range(rows)])
        tokens, weights = torch.randn(rows, hidden).bfloat16(), torch.rand(rows, each)
        expected = run(wide, tokens.float(), weights, chosen)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = run(narrow, tokens, weights, chosen)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            error = (one.float() - other).norm() / other.norm()
            assert error < 2e-2, (SIZES[number], place, error)
    smp.shutdown()


@pytest.mark.parametrize("degree", [1, 2])
def test_experts_in_bfloat16_equal_float32_without_a_wait_of_the_host(degree):
    run_ranks(_check_experts, NUM_RANKS, degree, timeout=120)
