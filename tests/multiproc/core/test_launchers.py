"""Every launcher gives the same ranks and one session; concurrent jobs get separate sessions."""

from __future__ import annotations

import subprocess
import time

import pytest

from support import RanksFailedError, missing, needs, run_ranks
from support.launchers import clean_environment, command


@pytest.fixture(params=["smdrun", "torchrun", "mpirun", "slurm", "raw"])
def launcher(request):
    if reason := missing(request.param):
        pytest.skip(reason)
    return request.param


def ranks_and_session():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    answer = (_core.rank(), _core.size(), _core.local_rank(), _core.local_size(), _core.session_id())
    _core.barrier(0)
    lifecycle.shutdown()
    return answer


def test_every_launcher_gives_the_same_ranks(launcher):
    values = run_ranks(ranks_and_session, 3, launcher=launcher)
    assert [value[:4] for value in values] == [(rank, 3, rank, 3) for rank in range(3)]
    assert len({value[4] for value in values}) == 1


def fail_on_rank_1():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    _core.barrier(0)
    if _core.rank() == 1:
        raise ValueError("bad batch")
    _core.barrier(0)


def test_an_exception_of_one_rank_reaches_the_others():
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(fail_on_rank_1, 3)
    assert time.monotonic() - start < 10
    outcome = failure.value.outcome
    assert outcome.ranks[1].error == "ValueError: bad batch"
    for rank in (0, 2):
        assert "rank 1 failed (ValueError: bad batch)" in outcome.ranks[rank].error
    assert "smdrun: rank 1 failed first: exit code 1" in outcome.output
    assert outcome.exit_code == 1


def test_contradictory_variables_are_an_error():
    env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(RanksFailedError, match="OMPI_COMM_WORLD_RANK"):
        run_ranks(ranks_and_session, 2, launcher="raw", env=env)


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=needs(name)) for name in ("smdrun", "torchrun", "mpirun")]
)
def test_concurrent_jobs_have_separate_sessions(launcher, tmp_path):
    """Without `smdrun`, ranks derive the rendezvous address from the launcher's variables."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom smdistributed import _core\nfrom smdistributed._common import lifecycle\n"
        "lifecycle.init()\n_core.barrier(0)\nprint('session', _core.session_id(), flush=True)\n"
    )
    jobs = [
        subprocess.Popen(
            [*command(launcher, 2, []), str(script)],
            env=clean_environment() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    sessions = [{line.split("session ")[1] for line in output.splitlines() if "session " in line} for output in outputs]
    assert [len(names) for names in sessions] == [1, 1], outputs
    assert sessions[0] != sessions[1]
