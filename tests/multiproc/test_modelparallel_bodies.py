"""Random step bodies on partitions do what they do in one process, or raise; `parity/step_bodies.py` runs thousands."""

from __future__ import annotations

import pytest

from parity.step_bodies import DEFECTS, run_all
from support.step_bodies import draw

#: Seeds by numbers of partitions.
SEEDS = {
    2: [5, 8, 19, 24, 42, 47, 49, 71, 85, 91],
    3: [12, 14, 17, 29, 30, 33],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("partitions", list(SEEDS))
def test_random_bodies_are_those_of_one_process_or_raise(partitions):
    ends = run_all({seed: draw(seed, partitions) for seed in SEEDS[partitions]}, partitions)
    assert sorted(ends) == sorted(SEEDS[partitions])
    wrong = [f"seed {seed}: {kind}: {story}" for seed, (kind, story) in ends.items() if kind in (*DEFECTS, "invalid")]
    assert not wrong, "\n".join(wrong)
