"""Ranges of elements of a flattened tensor as slices of the tensor."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (4, 1, 3)])
def test_slices_have_the_elements_in_their_order(shape):
    from smdistributed.modelparallel.torch.checkpoint.sharded_tensors import slices

    tensor = torch.arange(math.prod(shape)).view(shape)
    for start, end in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        found, index = [], 0
        for first, lengths, offset in slices(start, end, shape):
            assert offset == index
            part = tensor[tuple(slice(low, low + length) for low, length in zip(first, lengths, strict=True))]
            found += part.flatten().tolist()
            index += part.numel()
        assert found == list(range(start, end)), (start, end)
