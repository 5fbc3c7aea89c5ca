"""Pipelines compared with one process: a sample of the cases that `tests/parity/pipelines.py` runs.

Two steps each, because the second one replays the recordings of the first one and uses its momentum.
"""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks


def _table_body(dtype, partitions, rows, names=None):
    import torch

    from support.pipelines import run_table

    return len(run_table(getattr(torch, dtype), partitions, rows, names, steps=2))


ROWS = [
    pytest.param(1, [(4, "interleaved", False)], id="1"),
    pytest.param(2, [(4, "simple", False), (4, "interleaved", True)], id="2"),
    more(2, [(1, "interleaved", False), (4, "zero_bubble", False)], id="2, other schedules"),
    pytest.param(3, [(4, "interleaved", False)], id="3"),
    more(3, [(4, "interleaved", True)], id="3, looped"),
    more(4, [(8, "interleaved", False), (4, "zero_bubble", False)], id="4"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("partitions", "rows"), ROWS)
def test_pipelines_equal_one_process(partitions, rows):
    pytest.importorskip("transformers")
    found = run_ranks(
        _table_body, partitions, "float64", partitions, rows, launcher=Forked("transformers"), timeout=290
    )
    assert found == [16] * partitions


@pytest.mark.timeout(300)
def test_pipelines_equal_one_process_in_float32():
    names = ["mlp", "resnet18", "tied", "batch_norm"]
    found = run_ranks(
        _table_body, 2, "float32", 2, [(8, "zero_bubble_2", False)], names, launcher=Forked("transformers"), timeout=290
    )
    assert found == [4, 4]
