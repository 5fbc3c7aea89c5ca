"""What a rank says of the arguments of a step, before they are sent."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.torch.runtime import input_broadcast  # noqa: E402


def test_the_order_of_memory_is_not_that_of_addresses():
    block = torch.zeros(64)
    # Two tensors of one storage, and around it two that lie elsewhere.
    tensors = [torch.zeros(8), block[32:], torch.zeros(4, 4).T, block[:8], torch.zeros(0, 3)]
    for order in (tensors, [torch.zeros(8), block[32:], torch.zeros(4, 4).T, block[:8], torch.zeros(0, 3)]):
        segments, memory = [], []
        layouts = input_broadcast._layouts(order, segments, memory)
        assert [layout.segment for layout in layouts] == [0, 2, 3, 1, 4]
        assert [segment.size for segment in segments] == [32, 32, 128, 64, 0]


def test_ranks_with_other_addresses_say_the_same():
    def said(first, second):
        segments, memory = [], []
        return input_broadcast._layouts([first, second], segments, memory), segments

    one, other = torch.zeros(16), torch.zeros(64)
    low, high = sorted([one, other], key=torch.Tensor.data_ptr)
    assert said(low[:16], high[:16]) == said(high[:16], low[:16])
