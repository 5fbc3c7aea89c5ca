"""The description of a step's arguments that a rank sends before their contents."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.torch.runtime import input_broadcast  # noqa: E402


def test_segments_are_ordered_by_first_use_of_their_storage():
    block = torch.zeros(64)
    # Two tensors share one storage; the others have storages of their own.
    tensors = [torch.zeros(8), block[32:], torch.zeros(4, 4).T, block[:8], torch.zeros(0, 3)]
    for order in (tensors, [torch.zeros(8), block[32:], torch.zeros(4, 4).T, block[:8], torch.zeros(0, 3)]):
        segments, memory = [], []
        layouts = input_broadcast._layouts(order, segments, memory)
        assert [layout.segment for layout in layouts] == [0, 2, 3, 1, 4]
        assert [segment.size for segment in segments] == [32, 32, 128, 64, 0]


def test_descriptions_do_not_depend_on_addresses():
    def describe(first, second):
        segments, memory = [], []
        return input_broadcast._layouts([first, second], segments, memory), segments

    one, other = torch.zeros(16), torch.zeros(64)
    low, high = sorted([one, other], key=torch.Tensor.data_ptr)
    assert describe(low[:16], high[:16]) == describe(high[:16], low[:16])


def test_tensors_of_one_storage_are_in_one_storage_on_other_ranks():
    block, columns = torch.arange(64.0), torch.arange(40.0).view(10, 4)
    tensors = [block[32:], block[:8].view(2, 4), columns[:, 1], torch.zeros(0, 3), columns.to(torch.int16)[1:, 2:].T]
    segments, memory = [], []
    layouts = input_broadcast._layouts(tensors, segments, memory)
    assert [segment.is_dense for segment in segments] == [False, False, True, False, True]
    header = input_broadcast._Header({}, (), layouts, tuple(segments))
    storages_of_segments = input_broadcast._new_memory(header, torch.empty)
    for home, segment, sent in zip(storages_of_segments, segments, memory, strict=True):
        home[: segment.size].copy_(input_broadcast._dense(sent) if segment.is_dense else sent)
    received = [input_broadcast._placed(layout, segments[layout.segment], storages_of_segments) for layout in layouts]
    for ours, theirs in zip(received, tensors, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    storages = [tensor.untyped_storage().data_ptr() for tensor in received]
    assert storages[0] == storages[1]
    assert len(set(storages)) == 4
    # The storage has only the bytes that the views cover.
    assert received[0].untyped_storage().nbytes() == 160
