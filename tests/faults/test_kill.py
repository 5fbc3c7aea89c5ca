"""A few of the cases of kill.py; `make bench-faults` runs many."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from support import Forked, more, run_ranks
from support.devices import needs_one

_spec = importlib.util.spec_from_file_location("kill", Path(__file__).with_name("kill.py"))
kill = importlib.util.module_from_spec(_spec)
sys.modules["kill"] = kill
_spec.loader.exec_module(kill)

pytest.importorskip("torch", reason="torch is not installed")


def warm_up():
    """Imports torch and builds the shim before the first timed case."""
    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()


@pytest.fixture(scope="module", autouse=True)
def shim():
    run_ranks(warm_up, 1, launcher=Forked("torch"), timeout=110)


@pytest.mark.parametrize("seed", [*range(2), *map(more, range(2, 12))])
def test_survivors_name_the_dead(seed, tmp_path):
    case = kill.Case.of(seed)
    # Seeds from 6 on repeat the phases. Ranks under smdrun import torch anew, so only phase "init", which needs it,
    # uses it there.
    if case.launcher == "raw" or (seed >= 6 and case.phase != "init"):
        case = dataclasses.replace(case, launcher=Forked("torch"))
    result = kill.run(case, tmp_path, timeout=110.0)
    assert not result.problems, f"{case}: {'; '.join(result.problems)}\n{result.output}"


@needs_one
@pytest.mark.parametrize("seed", range(6))
def test_survivors_on_devices_name_the_dead(seed, tmp_path):
    case = kill.Case.of(seed, cuda=True)
    result = kill.run(case, tmp_path, timeout=60.0)
    assert not result.problems, f"{case}: {'; '.join(result.problems)}\n{result.output}"
