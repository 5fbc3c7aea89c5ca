"""Timeout errors name the setting that sets the timeout."""

from __future__ import annotations

import os
import time

import pytest

from support import run_ranks
from support.forks import Forked

LIMIT = 2.0
#: Slack in seconds for loaded machines.
LATE = 8.0
COLLECTIVE = "to wait longer, set `SMD_TIMEOUT_SECONDS`, or the process group's `timeout` where it has one"


def wait_for_timeout(kind):
    """Rank 0 calls an operation that rank 1 never calls; rank 1 stays alive until rank 0's timeout."""
    import torch

    import horovod.torch as hvd
    import smdistributed.dataparallel.torch.distributed as dist

    waits = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "recv": lambda: dist.recv(torch.ones(3), 1),
        "barrier": lambda: dist.barrier(),
        "group": lambda: dist.new_group([0, 1]),
        "named": lambda: hvd.allreduce(torch.ones(3), name="late"),
    }
    hvd.init()
    done = os.path.join(os.environ["SMD_TEST_FOLDER"], "done")
    if hvd.rank() == 1:
        deadline = time.monotonic() + 40
        while not os.path.exists(done) and time.monotonic() < deadline:
            time.sleep(0.02)
        return None
    start = time.monotonic()
    try:
        waits[kind]()
    except Exception as error:
        return str(error), time.monotonic() - start
    finally:
        with open(done, "w"):
            pass
    return "no error", 0.0


@pytest.mark.parametrize("kind", ["all_reduce", "recv", "barrier", "group", "named"])
def test_a_timeout_of_a_collective_names_its_setting(kind):
    (text, waited), _ = run_ranks(
        wait_for_timeout, 2, kind, launcher=Forked("torch"), env={"SMD_TIMEOUT_SECONDS": str(LIMIT)}
    )
    assert "timed out after" in text, text
    named = "to wait longer, set `SMD_TIMEOUT_SECONDS` and `SMD_STALL_SHUTDOWN_SECONDS`"
    assert (named if kind == "named" else COLLECTIVE) in text, text
    assert "no sign of rank(s) [1]" in text
    assert LIMIT - 0.1 <= waited < LIMIT + LATE, waited


def join_alone(limit):
    from smdistributed import _core
    from smdistributed._common import errors

    if os.environ["RANK"] == "1":
        return None
    os.environ["SMD_INIT_TIMEOUT_SECONDS"] = str(limit)
    start = time.monotonic()
    with pytest.raises(errors.WaitTimeoutError) as caught:
        _core.init()
    return str(caught.value), time.monotonic() - start


def test_a_timeout_of_init_names_its_setting():
    (text, waited), _ = run_ranks(join_alone, 2, LIMIT, launcher="raw")
    assert "no sign of rank(s) [1]" in text
    assert text.endswith("to wait longer, set `SMD_INIT_TIMEOUT_SECONDS`"), text
    assert LIMIT - 0.1 <= waited < LIMIT + LATE, waited
