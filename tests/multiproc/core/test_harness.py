"""The test harness that starts ranks: return values, failures, timeouts, and that no process outlives a job."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support import Forked, HarnessBrokenError, RanksFailedError, missing, run_ranks, start_ranks

# `Forked` preloads a module; any small one will do here.
FORKED = Forked("json")


def rank_and_size(scale):
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
    print(f"rank {rank} runs")
    return rank * scale


@pytest.mark.parametrize("launcher", ["smdrun", "torchrun", "mpirun", "raw", FORKED])
def test_values_come_back_in_rank_order(launcher):
    if launcher != FORKED and (reason := missing(launcher)):
        pytest.skip(reason)
    assert run_ranks(rank_and_size, 3, 10, launcher=launcher) == [0, 10, 20]


def working_directory():
    return os.getcwd()


@pytest.mark.parametrize("launcher", ["raw", FORKED])
def test_ranks_run_in_the_working_directory_of_the_test(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(working_directory, 2, launcher=launcher) == [str(tmp_path)] * 2


def raise_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("bad batch")


@pytest.mark.parametrize("launcher", ["smdrun", "raw", FORKED])
def test_a_failure_shows_every_rank(launcher):
    with pytest.raises(RanksFailedError, match="rank 1: ValueError: bad batch") as failure:
        run_ranks(raise_on_rank_1, 2, launcher=launcher)
    ranks = failure.value.outcome.ranks
    assert ranks[1].error_types[:2] == ("ValueError", "Exception")
    assert ranks[0].finished
    assert ranks[0].error is None


def hang():
    time.sleep(600)


def test_a_hang_ends_at_the_deadline_with_stack_traces():
    with pytest.raises(RanksFailedError, match="still running after 10 s") as failure:
        run_ranks(hang, 2, timeout=10.0)
    assert "in hang" in failure.value.outcome.output


@pytest.mark.parametrize("launcher", ["smdrun", "raw", FORKED])
def test_nothing_outlives_a_job_that_is_not_awaited(launcher):
    with start_ranks(hang, 2, launcher=launcher) as job:
        pids = [job.pid(rank) for rank in range(2)]
    time.sleep(0.1)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def unpicklable():
    return lambda: None


def test_misuse_of_the_harness_is_an_error_of_its_own():
    with pytest.raises(HarnessBrokenError, match="the result cannot be pickled"):
        run_ranks(unpicklable, 1)
    with pytest.raises(HarnessBrokenError, match="module-level function"):
        run_ranks(lambda: None, 1)


@pytest.mark.parametrize("launcher", ["raw", FORKED])
def test_a_rank_can_be_killed(launcher):
    with start_ranks(hang, 2, launcher=launcher) as job:
        job.kill(1)
        job.kill(0, signal.SIGTERM)
        outcome = job.wait()
    assert [rank.exit_code for rank in outcome.ranks] == [-signal.SIGTERM, -signal.SIGKILL]
    assert not any(rank.finished for rank in outcome.ranks)
