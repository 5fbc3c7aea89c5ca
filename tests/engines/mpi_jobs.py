"""Jobs that `mpirun` of Open MPI 4, Open MPI 5 and MPICH starts: ``make test-engines``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import processes
from leftovers import files_left, processes_left, shared_memory
from mpi import MPIS, ROOT

from support import hosts

pytestmark = pytest.mark.timeout(400)

TRAIN = "examples/resumable_digits.py"


@pytest.fixture(params=list(MPIS))
def mpi(request):
    if reason := MPIS[request.param].missing():
        pytest.skip(reason)
    return MPIS[request.param]


@pytest.fixture(scope="module")
def losses_of_one():
    done = subprocess.run(
        [sys.executable, TRAIN, "--epochs", "2"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return losses(done.stdout)


def losses(output):
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([0-9.]+)", output)]


def start(command, environment, *arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, TRAIN, *arguments], cwd=ROOT, env=environment, text=True, **pipes)


def test_two_ranks_train_as_one(mpi, losses_of_one, tmp_path):
    job = start(mpi.command(2), mpi.environment(tmp_path), "--epochs", "2")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert losses(output) == pytest.approx(losses_of_one, abs=2e-5)
    assert "on 2 ranks" in output


def test_two_jobs_side_by_side_do_not_meet(mpi, tmp_path):
    """Those of MPICH have equal variables."""
    meet = tmp_path / "meet.py"
    meet.write_text(
        "from smdistributed import _core\nfrom smdistributed._common import lifecycle\nlifecycle.init()\n"
        "for _ in range(50): _core.barrier(0)\nprint(f'session {_core.session_id()}\\n', end='', flush=True)\n"
    )
    jobs = []
    for name in ("a", "b"):
        # Open MPI's files: two jobs would meet in one folder for sessions.
        (tmp_path / name).mkdir()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environment = mpi.environment(tmp_path / name)
        jobs.append(subprocess.Popen([*mpi.command(2), str(meet)], env=environment, text=True, **pipes))
    outputs = [job.communicate(timeout=200)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    sessions = [re.findall(r"session (\d+)", output) for output in outputs]
    assert [len(each) for each in sessions] == [2, 2], outputs
    assert [len(set(each)) for each in sessions] == [1, 1], outputs
    assert sessions[0] != sessions[1]


@pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
def test_two_hosts_train_as_one(mpi, losses_of_one, tmp_path):
    """The plug-in is compiled with the compiler of this MPI, which then moves what goes between the hosts."""
    with hosts.Hosts(2) as two:
        # Open MPI 5 and MPICH know the host of `mpirun` by its name.
        two.name_each_other()
        job = start(mpi.on_hosts(two, 2), mpi.environment(tmp_path), "--epochs", "2")
        output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert losses(output) == pytest.approx(losses_of_one, abs=2e-5)
    assert "on 2 ranks" in output
    assert "TCP moves CPU tensors between" not in output


@pytest.mark.parametrize("how", ["a rank is killed", "mpirun gets SIGTERM"])
def test_a_job_that_is_ended_leaves_nothing(mpi, how, tmp_path):
    before = shared_memory()
    job = start(mpi.command(2), mpi.environment(tmp_path), "--pause", "0.05", "--epochs", "1000")
    try:
        for line in job.stdout:
            if "epoch 1" in line:
                break
        pids = processes.ranks(tmp_path, TRAIN)
        assert sorted(pids) == [0, 1]
        if how == "a rank is killed":
            os.kill(pids[1], signal.SIGKILL)
        else:
            job.terminate()
        ended = time.monotonic()
        output, _ = job.communicate(timeout=60)
        assert time.monotonic() - ended < 10, output
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0
    if how == "a rank is killed":
        # mpirun ends the other rank at once, which may not get to say it.
        assert re.search(r"rank 1 died|signal 9|signal: 9|EXIT CODE: 9", output), output
    assert processes_left(tmp_path) == {}, output
    assert files_left(tmp_path, before) == []
