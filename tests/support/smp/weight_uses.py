"""Uses of a weight in products of matrices, of batches of them and of groups of rows, and in convolutions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional


def _experts(weight, x):
    """A selected matrix for each group of rows, as Mixtral's experts in a loop."""
    return torch.cat([functional.linear(rows, weight[place]) for place, rows in enumerate(x.chunk(len(weight)))])


def _grouped(is_transposed):
    def use(weight, x):
        if not hasattr(functional, "grouped_mm"):
            pytest.skip("this PyTorch has no grouped_mm")
        ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=x.device)
        return functional.grouped_mm(x, weight.transpose(1, 2) if is_transposed else weight, offs=ends)

    return use


def _parts(weight, x):
    """Projections that are parts of one weight, as those of `nn.MultiheadAttention`."""
    query, key, value = weight.chunk(3)
    head, tail = weight[:5], weight.split([5, 7])[1]
    last = weight.view(3, 4, 12).unbind(0)[2]
    outputs = [functional.linear(x, query), x @ key.t(), functional.linear(x, value), x @ head.t(), x @ last.t()]
    return torch.cat([*outputs, functional.linear(x, tail), x @ weight.unsqueeze(0)[:, 1:11:3].squeeze(0).t()], 1)


#: For each use of a weight: its shape, the shape of the input, and the function.
USES = {
    "input @ weight": ((6, 5), (4, 6), lambda weight, x: x @ weight),
    "weight @ input": ((5, 4), (4, 6), lambda weight, x: weight @ x),
    "batches": ((3, 6, 5), (3, 4, 6), lambda weight, x: torch.bmm(x, weight)),
    "batches, weight first": ((3, 5, 6), (3, 6, 2), lambda weight, x: torch.bmm(weight, x)),
    "batches of transposed": ((3, 5, 6), (3, 4, 6), lambda weight, x: torch.bmm(x, weight.transpose(1, 2))),
    "batches with a bias": ((3, 6, 5), (3, 4, 6), lambda weight, x: torch.baddbmm(x[:, :, :5], x, weight)),
    "einsum over heads": ((6, 2, 5), (3, 4, 6), lambda weight, x: torch.einsum("bsd,dhk->bhsk", x, weight)),
    "einsum over experts": ((3, 6, 5), (4, 3, 6), lambda weight, x: torch.einsum("ted,edf->tef", x, weight)),
    "one matrix of several": ((3, 5, 4), (6, 4), _experts),
    "parts": ((12, 12), (4, 12), _parts),
    "groups of rows": ((3, 8, 16), (6, 8), _grouped(False)),
    "groups of rows, transposed": ((3, 16, 8), (6, 8), _grouped(True)),
    "reshaped": ((4, 2, 5), (3, 8), lambda weight, x: x @ weight.view(8, 5)),
    "a copy": ((2, 5, 4), (2, 3, 4), lambda weight, x: torch.bmm(x, weight.permute(0, 2, 1).contiguous())),
    "convolution": ((4, 3, 3, 3), (2, 3, 5, 5), lambda weight, x: functional.conv2d(x, weight)),
}
