"""Jobs that `mpirun` of Open MPI 4, Open MPI 5 and MPICH starts: ``make test-engines``."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import files_left, processes_left, shared_memory
from mpi import MPIS, ROOT
from waiting import NOTICE_SECONDS, VARIABLES, check_errors, wait_until_ranks_train, write_training

from support import hosts, neighbours
from support.neighbours import NOBODY, Job, Watch, as_user, processes

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


needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
needs_users = pytest.mark.skipif(neighbours.missing() is not None, reason=str(neighbours.missing()))


def start(command, environment, *arguments, script=TRAIN):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, script, *arguments], cwd=ROOT, env=environment, text=True, **pipes)


def test_two_ranks_train_as_one(mpi, losses_of_one, tmp_path):
    job = start(mpi.command(2), mpi.environment(tmp_path), "--epochs", "2")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert losses(output) == pytest.approx(losses_of_one, abs=2e-5)
    assert "on 2 ranks" in output


def meet(start_job, users):
    """Runs two jobs at the same time; returns the secrets of each, and the places where they could be read."""
    with Watch() as watch:
        starts = [partial(start_job, user, 10**number) for number, user in enumerate(users)]
        found, outputs = neighbours.meet(watch, starts)
    return found, watch.places(outputs)


@needs_users
@pytest.mark.parametrize("has_secret", [False, True], ids=["no secret", "a secret"])
@pytest.mark.parametrize("second", [0, NOBODY], ids=["one user", "two users"])
def test_two_jobs_side_by_side_do_not_meet_and_keep_their_secrets(mpi, second, has_secret, tmp_path):
    """Those of MPICH have equal variables."""

    def start_job(user, factor):
        # mpirun asks `access` about the program, which disregards the capability; `env` disregards nothing.
        command = [*as_user(user), *mpi.command(2)[:-1], "env", sys.executable]
        own = {"SMD_SECRET": secrets.token_hex(32)} if has_secret else {}
        return Job(user, command, {**mpi.environment(tmp_path), **own}, factor)

    found, places = meet(start_job, (0, second))
    assert [bool(each) for each in found] == [has_secret] * 2
    assert not found[0] & found[1]
    assert places == []


@needs_users
@needs_network
def test_two_jobs_on_the_same_hosts_keep_their_secrets(mpi, tmp_path):
    """`mpirun -x SMD_SECRET` passes the secret to the other host, as docs/security.md says."""
    with hosts.Hosts(2) as two:
        two.name_each_other()

        def start_job(user, factor):
            command = mpi.on_hosts(two, 2, ["SMD_SECRET"])
            environment = {**mpi.environment(tmp_path), "SMD_SECRET": secrets.token_hex(32)}
            return Job(user, command, environment, factor)

        found, places = meet(start_job, (0, 0))
    assert all(found)
    assert not found[0] & found[1]
    assert places == []


@needs_network
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


@pytest.fixture
def temporary(tmp_path):
    """The folder for temporary files of a job whose script is in `tmp_path`."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def wait_until_processes_end(temporary, script=None):
    """Waits for the end of the processes of a job, or of those that run its script."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while left := processes.ranks(temporary, script) if script else processes.having("TMPDIR", temporary):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_all_survivors_name_the_rank_that_is_killed(mpi, tmp_path, temporary):
    """With the option that lets ranks survive. MPICH even so ends the others of the host at once, and says how the rank has ended."""
    before, script = shared_memory(), write_training(tmp_path)
    job = start(mpi.command(3, mpi.survival()), mpi.environment(temporary), script=script)
    try:
        wait_until_ranks_train(tmp_path, 3, job)
        os.kill(processes.ranks(temporary, str(script))[1], signal.SIGKILL)
        killed = time.time()
        if mpi.family != "mpich":
            check_errors(tmp_path, {0: [1], 2: [1]}, killed)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    if mpi.family == "mpich":
        assert time.time() - killed < NOTICE_SECONDS, output
        assert "Killed (signal 9)" in output, output
        assert job.returncode == signal.SIGKILL, output
    # With this option Open MPI 4 exits with 0.
    assert processes_left(temporary) == {}, output
    assert files_left(temporary, before) == []


@needs_network
@pytest.mark.parametrize("mpi", ["mpich4", "mpich"], indirect=True)
def test_survivors_on_another_host_name_the_rank_that_is_killed(mpi, tmp_path, temporary):
    """With the option that lets ranks survive, MPICH ends at most the ranks of the killed one's host."""
    before, script = shared_memory(), write_training(tmp_path)
    with hosts.Hosts(2) as network:
        network.name_each_other()
        job = start(mpi.on_hosts(network, 4, options=mpi.survival()), mpi.environment(temporary), script=script)
        try:
            wait_until_ranks_train(tmp_path, 4, job)
            os.kill(processes.ranks(temporary, str(script))[3], signal.SIGKILL)
            check_errors(tmp_path, {0: [3], 1: [3]}, time.time())
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
            job.wait()
    assert "Killed (signal 9)" in output, output
    assert job.returncode == signal.SIGKILL, output
    assert processes_left(temporary) == {}, output
    remove_segments_of_mpich(temporary, before)
    assert files_left(temporary, before) == []


def remove_segments_of_mpich(temporary, before):
    """Removes what ranks of MPICH leave that have not finalized MPI: the segments of their hosts."""
    for path in files_left(temporary, before):
        if path.startswith("/dev/shm/mpich_shm_"):
            Path(path).unlink()


def daemons(temporary, job):
    """Processes of a job but those of `mpirun` itself."""
    return {pid: each.words for pid, each in processes.having("TMPDIR", temporary).items() if pid != job.pid}


@needs_network
def test_every_rank_names_the_host_whose_link_is_cut(mpi, tmp_path, temporary):
    """On both sides of the cut. `mpirun` and its daemon on the lost host wait for each other, so they get SIGTERM, the daemon first."""
    before, script = shared_memory(), write_training(tmp_path)
    with hosts.Hosts(2) as network:
        network.name_each_other()
        command = mpi.on_hosts(network, 4, list(VARIABLES))
        job = start(command, {**mpi.environment(temporary), **VARIABLES}, script=script)
        try:
            wait_until_ranks_train(tmp_path, 4, job)
            network.cut(1)
            check_errors(tmp_path, {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}, time.time())
            wait_until_processes_end(temporary, str(script))
            for pid in daemons(temporary, job):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            # Open MPI 4 does not end if it gets SIGTERM before it has lost the daemon.
            deadline = time.monotonic() + NOTICE_SECONDS
            while left := daemons(temporary, job):
                assert time.monotonic() < deadline, left
                time.sleep(0.05)
            job.terminate()
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
        wait_until_processes_end(temporary)
    named = re.findall(r"rank [23] died \(no sign of host smd-host-1, .*?\) while rank (\d)", output)
    assert {"0", "1"} <= set(named), output
    if mpi.family == "mpich":
        remove_segments_of_mpich(temporary, before)
    assert files_left(temporary, before) == []
