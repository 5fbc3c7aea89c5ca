"""The harness for tests that need several processes; start with `run_ranks`."""

from support.forks import Forked
from support.launchers import missing, more, needs
from support.ranks import HarnessBrokenError, Job, JobResult, RankResult, RanksFailedError, run_ranks, start_ranks

__all__ = [
    "Forked",
    "HarnessBrokenError",
    "Job",
    "JobResult",
    "RankResult",
    "RanksFailedError",
    "missing",
    "more",
    "needs",
    "run_ranks",
    "start_ranks",
]
