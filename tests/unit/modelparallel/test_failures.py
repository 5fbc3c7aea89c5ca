"""A failure of one rank, and of what tells the others about it."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel import failures


def test_an_error_of_the_gather_names_the_failure_of_this_rank_as_its_cause():
    def fail():
        raise MemoryError("no memory")

    def gather(_):
        raise TimeoutError("rank 1 does not arrive")

    with pytest.raises(TimeoutError, match="rank 1 does not arrive") as caught:
        failures.raise_on_all_ranks(fail, 0, gather, "it could not be saved")
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(TimeoutError) as caught:
        failures.raise_on_all_ranks(lambda: 1, 0, gather, "it could not be saved")
    assert caught.value.__cause__ is None
