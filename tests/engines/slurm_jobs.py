"""Jobs on a real Slurm cluster of two network namespaces: ``make test-engines``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import files_left, shared_memory
from slurm import ROOT, SlurmCluster, missing
from waiting import VARIABLES, check_errors, wait_until_ranks_train, write_training

from support import neighbours
from support.neighbours import NOBODY, Job, Watch, as_user

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

TRAIN = "examples/resumable_digits.py"


@pytest.fixture(scope="module")
def cluster():
    with SlurmCluster() as running:
        running.environment["SMD_SECRET"] = secrets.token_hex(16)
        yield running


def srun(tasks=2):
    return ("srun", f"-N{tasks}", f"-n{tasks}", sys.executable)


@pytest.fixture
def leaves_no_files(cluster):
    """Checks after the test that its jobs have left no files."""
    folder, before = cluster.folder / "tmp", shared_memory()
    folder.mkdir()
    cluster.environment["TMPDIR"] = str(folder)
    yield
    del cluster.environment["TMPDIR"]
    assert files_left(folder, before) == []
    shutil.rmtree(folder)


def losses(output):
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([0-9.]+)$", output, re.MULTILINE)]


def wait_for(what, patience=300.0):
    deadline = time.monotonic() + patience
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def wait_for_training(job):
    """Reads what `srun` prints up to the first epoch. It says when a job waits until the previous one has left the hosts."""
    while "epoch 1" not in (line := job.stdout.readline()):
        assert line.startswith("srun: job "), line


def test_two_hosts_train_as_one(cluster):
    both = cluster.run(*srun(), TRAIN, "--epochs", "3")
    alone = cluster.run(*srun(1), TRAIN, "--epochs", "3")
    assert "on 2 ranks" in both
    assert "on 1 ranks" in alone
    assert len(losses(both)) == 3
    assert losses(both) == pytest.approx(losses(alone), abs=1e-4)
    assert "open to the network" not in both


@pytest.mark.skipif(shutil.which("mpicc") is None, reason="Open MPI is not installed (package libopenmpi-dev)")
def test_open_mpi_moves_tensors_with_pmix(cluster):
    job, *words = srun()
    output = cluster.run(job, "--mpi=pmix", *words, TRAIN, "--epochs", "3", SMD_LOG="info")
    assert len(re.findall("Open MPI v4.* moves CPU tensors between hosts", output)) == 2, output
    assert losses(output) == pytest.approx(losses(cluster.run(*srun(1), TRAIN, "--epochs", "3")), abs=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_trains_on_two_hosts_as_on_one(cluster):
    """The tape of the example, from equal initial weights: the loss of each step is that of one process."""
    script = cluster.folder / "tensorflow_digits.py"
    script.write_text(
        "import runpy\nimport tensorflow as tf\ntf.keras.utils.set_random_seed(0)\n"
        "runpy.run_path('examples/tensorflow_digits.py', run_name='__main__')\n"
    )
    results = []
    for tasks in (2, 1):
        out = cluster.folder / f"tensorflow-{tasks}"
        cluster.run(*srun(tasks), script, "--epochs", "2", "--out", out, TF_CPP_MIN_LOG_LEVEL="2")
        results.append(json.loads((out / "results.json").read_text()))
    two, one = results
    assert two["replicas_are_equal"]
    assert len(two["losses"]) == len(one["losses"]) == 2 * (1437 // 32)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-3)
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)


def test_horovod(cluster):
    output = cluster.run(*srun(), "examples/horovod/torch_digits.py", "--epochs", "2")
    assert "on 2 ranks" in output


def test_model_parallelism(cluster):
    output = cluster.run(*srun(), "examples/modelparallel_digits.py", "--epochs", "1")
    assert "right" in output
    assert "rank 1 is partition 1 of replica 0" in output, output


def test_a_killed_rank_is_named(cluster, leaves_no_files):
    job = cluster.start("srun", "-N2", "-n2", "--kill-on-bad-exit=0", sys.executable, TRAIN, "--pause", "0.1")
    wait_for_training(job)
    os.kill(cluster.ranks(TRAIN)[1], signal.SIGKILL)
    killed = time.monotonic()
    while not re.search(r"Error: rank 1 died .* on host smd-host-1", line := job.stdout.readline()):
        assert line, "rank 0 ended without naming rank 1"
    assert time.monotonic() - killed < 10
    job.communicate(timeout=120)
    assert job.returncode != 0
    assert not cluster.ranks(TRAIN)


def test_scancel_leaves_nothing(cluster, leaves_no_files):
    job = cluster.start("srun", "--job-name", "long", "-N2", "-n2", sys.executable, TRAIN, "--pause", "0.1")
    wait_for_training(job)
    assert len(cluster.ranks(TRAIN)) == 2
    cluster.run("scancel", "--name", "long")
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert re.search(r"STEP [0-9.]+ ON smd-host-0 CANCELLED AT", output), output
    for rank in range(2):
        # A rank that learns of the other one's end before it gets SIGTERM names it, and exits with 1.
        assert re.search(rf"smd-host-{rank}: task {rank}: (Terminated|Exited with exit code 1)", output), output
    wait_for(lambda: not cluster.ranks(TRAIN), 10)
    wait_for(lambda: not cluster.ask("squeue", "--noheader"), 30)


def test_every_rank_names_the_host_whose_link_is_cut(cluster, leaves_no_files):
    """On both sides of the cut. `srun` learns of the lost host minutes later, when `slurmctld` gives it up; `scancel` ends it before."""
    folder = cluster.folder / "cut"
    folder.mkdir()
    script = write_training(folder)
    job = cluster.start(
        "srun", "--job-name", "cut", "-N2", "-n4", "--kill-on-bad-exit=0", sys.executable, script, **VARIABLES
    )
    try:
        wait_until_ranks_train(folder, 4, job)
        with cluster.without_link(1):
            check_errors(folder, {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}, time.time())
            wait_for(lambda: not cluster.ranks(script.name), 10)
            cluster.run("scancel", "--name", "cut")
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0
    # What the second host's ranks print reaches `srun` when the link is back.
    found = re.findall(r"rank [0-3] died \(no sign of .*?\) while rank (\d)", output)
    assert {"0", "1"} <= set(found), output
    wait_for(lambda: not cluster.ask("squeue", "--noheader"), 60)
    wait_for(lambda: cluster.ask("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"], 60)


def test_a_job_that_is_queued_again_goes_on_from_its_newest_checkpoint(cluster):
    checkpoints, output = cluster.folder / "checkpoints", cluster.folder / "job.txt"
    arguments = ("--epochs", "4", "--pause", "0.1")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = ("sbatch", "--parsable", f"--output={output}", "examples/slurm/train.sbatch", *arguments)
    cluster.run(*line, CHECKPOINTS=str(checkpoints), PATH=path)
    wait_for(lambda: list(checkpoints.glob("epoch-2.pt")))
    os.kill(cluster.ranks(TRAIN)[1], signal.SIGKILL)
    # Slurm starts the job again after two minutes at the latest.
    wait_for(lambda: not cluster.ask("squeue", "--noheader"), 600)
    text = output.read_text()
    # Slurm ends the step when it sees the killed task, mostly after the other rank's error.
    assert re.search("rank 1 died|task 1: Killed", text), text
    assert re.search(r"going on from epoch-[23]\.pt", text), text
    assert "accuracy" in text, text
    alone = cluster.run(*srun(1), TRAIN, "--epochs", "4")
    assert losses(text)[-1] == pytest.approx(losses(alone)[-1], abs=1e-4)


needs_users = pytest.mark.skipif(neighbours.missing() is not None, reason=str(neighbours.missing()))

#: The variable by which a Python outside of the environment of the tests finds its packages.
PACKAGES = [f"PYTHONPATH={ROOT / 'python'}:{sysconfig.get_path('purelib')}"]


def python_of(user):
    """A Python that a user may run. `srun` passes no capability on, and the tests' own Python may lie where only root may look."""
    for path in (sys.executable, "/usr/bin/python3"):
        words = [*as_user(user, reads_all=False), "env", *PACKAGES, path, "-c", "import smdistributed, torch"]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip("the user nobody can run no Python with this library")


def meet(cluster, starter, users, own_secrets):
    """Two jobs at once, each in a session of its own. Returns the places with their secrets, and what they have printed."""
    environment = {name: value for name, value in cluster.environment.items() if name != "SMD_SECRET"}

    # Before any job starts: a skipped test must leave none.
    pythons = {user: python_of(user) for user in users}

    def start(number, user, secret):
        words = [*cluster.command(*as_user(user, reads_all=False), "env", *PACKAGES), *starter, pythons[user]]
        own = {"SMD_SECRET": secret} if secret else {}
        return Job(user, words, environment | own, factor=10**number)

    jobs = zip(range(len(users)), users, own_secrets, strict=True)
    with Watch(cluster.folder) as watch:
        try:
            found, outputs = neighbours.meet(watch, [partial(start, *job) for job in jobs])
        finally:
            cluster.ask("scancel", "--user=root,nobody")
            wait_for(lambda: not cluster.ask("squeue", "--noheader"), 60)
    assert all(secret is None or secret.encode() in own for secret, own in zip(own_secrets, found, strict=True))
    return watch.places(outputs), outputs


@needs_users
@pytest.mark.parametrize("second", [0, NOBODY], ids=["one user", "two users"])
@pytest.mark.parametrize(
    ("options", "has_secret"),
    [
        (("-N2", "-n2"), True),
        (("-N2", "-n2"), False),
        (("-N1", "-n2", "--overcommit", "--nodelist=smd-host-0"), False),
    ],
    ids=["two hosts", "two hosts without a secret", "one host without a secret"],
)
def test_two_jobs_at_once_do_not_meet_and_keep_their_secrets(cluster, options, has_secret, second):
    """On two hosts without a secret, Slurm's variables tell the jobs apart, and each says that it is open to the network."""
    own = [secrets.token_hex(32) if has_secret else None for _ in range(2)]
    places, outputs = meet(cluster, ["srun", *options], (0, second), own)
    assert places == []
    is_open = "-N2" in options and not has_secret
    assert ["open to the network" in output for output in outputs] == [is_open] * 2, outputs


@needs_users
def test_slurm_keeps_the_secrets_of_batch_jobs_where_only_root_can_read(cluster):
    """`slurmctld` keeps the variables of a batch job in its state, so that it can queue the job again. No other file has them."""
    script = cluster.folder / "meet.sbatch"
    script.write_text('#!/bin/sh\nsrun "$@" && touch "$TMPDIR/done"\n')
    submit = f'sbatch --output="$TMPDIR/printed" -N2 -n2 {script} "$@" || exit 1'
    # `sbatch --wait` asks only every few seconds.
    wait = 'until [ -e "$TMPDIR/done" ]; do sleep 0.1; done; cat "$TMPDIR/printed"'
    own = [secrets.token_hex(32) for _ in range(2)]
    places, _ = meet(cluster, ["sh", "-c", f"{submit}; {wait}", "sh"], (0, 0), own)
    state = re.compile(rf"{re.escape(str(cluster.folder))}/state/hash\.\d/job\.\d+/environment")
    assert [place for place in places if not state.fullmatch(place)] == []
    kept = [Path(place).stat() for place in places]
    assert [(stat.S_IMODE(each.st_mode), each.st_uid) for each in kept] == [(0o600, 0)] * len(own)
