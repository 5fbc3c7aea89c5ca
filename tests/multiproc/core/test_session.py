"""Sessions of real processes without a framework: init, shutdown, groups, dead ranks, interrupts, forks and secrets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support import launchers, missing, run_ranks, start_ranks

LAUNCHERS = launchers.LAUNCHERS
#: Within this time all other ranks must report a dead rank.
NOTICE_SECONDS = 5.0


def describe_place():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    start = time.perf_counter()
    lifecycle.init()
    seconds = time.perf_counter() - start
    _core.barrier()
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    place = {
        "ranks": (_core.rank(), _core.size(), _core.local_rank(), _core.local_size()),
        "variables": tuple(int(os.environ[name]) for name in variables),
        "master": (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
        "session": _core.session_id(),
        "seconds": seconds,
    }
    lifecycle.shutdown()
    return place


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_one_session_and_torchs_variables(launcher):
    if reason := missing(launcher):
        pytest.skip(reason)
    places = run_ranks(describe_place, 3, launcher=launcher)
    for rank, place in enumerate(places):
        assert place["ranks"] == place["variables"] == (rank, 3, rank, 3)
        assert place["session"] == places[0]["session"]
        assert place["master"] == places[0]["master"]


def test_one_process_needs_no_launcher():
    assert run_ranks(describe_place, 1, launcher="raw")[0]["ranks"] == (0, 1, 0, 1)
    code = "from smdistributed import _core; _core.init(); _core.barrier(); print(_core.rank(), _core.size())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "0 1\n"


def test_two_launchers_that_disagree_are_an_error():
    code = "from smdistributed import _core; _core.init()"
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    run = subprocess.run([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "ConfigError: `RANK` is 0 but `OMPI_COMM_WORLD_RANK` is 1" in run.stderr


@pytest.mark.parametrize("name", ["SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES"])
def test_buffers_of_the_original_are_checked_and_otherwise_ignored(name):
    command = [sys.executable, "-c", "from smdistributed import _core; _core.init()"]
    for value in ("8192", ""):
        subprocess.run(command, env=launchers.clean_environment() | {name: value}, check=True, timeout=60)
    for value in ("8193", "0", "-8192", "16M"):
        env = launchers.clean_environment() | {name: value}
        run = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=60)
        assert f"ConfigError: `{name}` is `{value}`: expected a positive multiple of 8192 bytes" in run.stderr


def test_local_ranks_are_counted_if_no_launcher_sets_them():
    port = str(launchers.free_port())
    code = """
import os
from smdistributed import _core
from smdistributed._common import lifecycle
for _ in range(2):
    lifecycle.init()
    print(_core.local_rank(), _core.local_size(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
    lifecycle.shutdown()
    assert "LOCAL_RANK" not in os.environ
"""
    env = launchers.clean_environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["0 2 0 2\n" * 2, "1 2 1 2\n" * 2]


def test_two_hosts_without_mpi_talk_over_tcp():
    """A PID namespace simulates a second host: ranks find each other's shared memory through /proc."""
    other_host = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*other_host, "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("`unshare --pid` is not permitted here, so that a second host cannot be simulated")
    code = """
from smdistributed import _core
from smdistributed._common import lifecycle
for _ in range(2):
    lifecycle.init()
    for _ in range(20):
        _core.barrier()
    lifecycle.shutdown()
"""
    port = launchers.free_port()
    ranks = []
    for rank, prefix in enumerate(([], other_host)):
        place = launchers.raw_environment(rank, 2, port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env = launchers.clean_environment() | place
        command = [*prefix, sys.executable, "-c", code]
        env |= {"SMD_LOG": "info", "SMD_TIMEOUT_SECONDS": "40"}
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert "TCP moves CPU tensors between the 2 hosts, since no MPI launcher (`mpirun`) started the job" in texts[0]


def init_twice():
    from smdistributed import _core
    from smdistributed._common import errors

    with pytest.raises(errors.NotInitializedError, match="`rank` needs an initialised session"):
        _core.rank()
    sessions = []
    for _ in range(3):
        _core.init()
        with pytest.raises(errors.AlreadyInitializedError) as error:
            _core.init()
        assert str(error.value) == ("init() called more than once. smdistributed.dataparallel is already initialized.")
        _core.barrier()
        sessions.append(_core.session_id())
        _core.shutdown()
        _core.shutdown()
    assert not _core.is_initialized()
    return sessions


def test_init_can_be_repeated_after_shutdown():
    for launcher in ("smdrun", "raw"):
        first, second = run_ranks(init_twice, 2, launcher=launcher)
        assert first == second
        assert len(set(first)) == 3


def make_groups():
    from smdistributed import _core
    from smdistributed._common import errors

    _core.init()
    rank = _core.rank()
    found = {}
    # Each rank calls `new_group` only for the groups that contain it.
    for ranks in ([0, 1], [3, 2], [2, 0], [1, 3]) if rank != 3 else ([3, 2], [1, 3]):
        if rank in ranks:
            group = _core.new_group(ranks)
            _core.barrier(group)
            assert _core.group_ranks(group) == ranks
            found[tuple(ranks)] = group
    again = _core.new_group([0, 1, 2, 3])
    assert again != _core.new_group([0, 1, 2, 3])
    _core.remove_group(again)
    with pytest.raises(errors.InvalidArgumentError, match="is not a member of a group"):
        _core.barrier(again)
    for ranks, message in (
        ([], "is not a member"),
        ([0, 0], "is listed twice"),
        ([0, 9], "no rank 9"),
        ([rank ^ 1], "is not a member"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=message):
            _core.new_group(ranks)
    with pytest.raises(errors.InvalidArgumentError, match="as long as the session"):
        _core.remove_group(0)
    return found


def test_only_members_call_new_group():
    found = run_ranks(make_groups, 4)
    ids = {}
    for groups in found:
        for ranks, group in groups.items():
            assert ids.setdefault(ranks, group) == group
    assert len(set(ids.values())) == 4


def wait_in(where):
    """Rank 1 announces that it is ready to be killed; the other ranks wait for it in `where`."""
    from smdistributed import _core
    from support.rank_main import announce, this_rank

    rank = this_rank()
    if where != "init" or rank != 1:
        _core.init()
    if rank == 1:
        announce("ready")
        time.sleep(600)
    if where == "barrier":
        _core.barrier()
    elif where == "new_group":
        _core.new_group([1, 0, 2] if rank != 2 else [2, 1])


@pytest.mark.parametrize("where", ["init", "barrier", "new_group"])
def test_a_killed_rank_is_named_by_all_others_in_time(where):
    with start_ranks(wait_in, 3, where) as job:
        job.wait_for("ready")
        time.sleep(0.2)
        killed = job.kill(1)
        outcome = job.wait()
    for rank in (outcome.ranks[0], outcome.ranks[2]):
        assert "rank 1 died (killed by SIGKILL" in rank.error, outcome.describe()
        assert "PeerFailedError" in rank.error_types
        assert rank.ended_at - killed < NOTICE_SECONDS
    assert outcome.left_behind == []


@pytest.mark.parametrize("victim", [0, 1])
def test_without_smdrun_a_killed_rank_is_named_too(victim):
    with start_ranks(wait_or_sleep, 3, victim, launcher="raw") as job:
        job.wait_for("ready")
        time.sleep(0.2)
        killed = job.kill(victim)
        outcome = job.wait()
    for rank in outcome.ranks:
        if rank.rank != victim:
            assert f"rank {victim} died (" in rank.error, outcome.describe()
            assert rank.ended_at - killed < NOTICE_SECONDS


def wait_or_sleep(victim):
    from smdistributed import _core
    from support.rank_main import announce

    _core.init()
    if _core.rank() == victim:
        announce("ready")
        time.sleep(600)
    _core.barrier()


def fail_on_rank_1(how):
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    _core.barrier()
    if _core.rank() == 1:
        if how == "raise":
            raise ValueError("bad loss: nan")
        if how == "exit":
            sys.exit(0)
        os._exit(3)
    _core.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 failed \(ValueError: bad loss: nan\) while rank \d was in barrier"),
        ("exit", r"rank 1 left the job while rank \d was in barrier"),
        ("_exit", r"rank 1 died \(process \d+ on host .* ended without `shutdown\(\)`\) while rank \d was in barrier"),
    ],
)
def test_the_error_says_how_a_rank_ended(how, message):
    with start_ranks(fail_on_rank_1, 3, how, launcher="raw") as job:
        outcome = job.wait()
    for rank in (0, 2):
        assert re.search(message, outcome.ranks[rank].error or ""), outcome.describe()


def leave_at_different_times():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    rank = _core.rank()
    if rank == 0:
        return []  # rank 0 leaves first, although it serves the rendezvous if no launcher does
    group = _core.new_group([1, 2])
    for _ in range(20):
        time.sleep(0.02)
        _core.barrier(group)
    later = _core.new_group([2, 1])
    _core.barrier(later)
    return _core.group_ranks(later)


@pytest.mark.parametrize("launcher", ["smdrun", "raw"])
def test_ranks_continue_after_one_has_left(launcher):
    assert run_ranks(leave_at_different_times, 3, launcher=launcher) == [[], [2, 1], [2, 1]]


def interrupt_rank_1(where):
    from smdistributed import _core
    from support.rank_main import announce, this_rank

    if where == "init" and this_rank() == 0:
        time.sleep(1.0)
    if this_rank() == 1:
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        start = time.monotonic()
        try:
            _core.init()
            _core.barrier()
        except KeyboardInterrupt:
            assert time.monotonic() - start < NOTICE_SECONDS
            announce("interrupted")
            return "interrupted"
    elif where == "barrier":
        _core.init()
        time.sleep(2.0)
    return None


@pytest.mark.parametrize("where", ["init", "barrier"])
def test_ctrl_c_ends_a_wait(where):
    assert run_ranks(interrupt_rank_1, 2, where, launcher="raw")[1] == "interrupted"


def raise_from_handler():
    from smdistributed import _core
    from support.rank_main import this_rank

    class AlarmError(Exception):
        pass

    def handle(*_):
        raise AlarmError

    _core.init()
    if this_rank() == 0:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(AlarmError):
            _core.barrier()
    else:
        time.sleep(1.0)


def test_an_exception_of_a_signal_handler_is_raised():
    """The assertions are in `raise_from_handler`, which runs on each rank."""
    run_ranks(raise_from_handler, 2)


def fork_children():
    from smdistributed import _core
    from smdistributed._common import lifecycle
    from support.rank_main import announce

    lifecycle.init()
    _core.barrier()
    if _core.rank() == 1:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                assert _core.rank() == 1
                _core.barrier()
            except Exception as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            _core.shutdown()
            _core.report_failure("a failure of the child")
            _core.finish()
            time.sleep(600)
        text = os.read(reading, 1000).decode()
        assert text.startswith("ClosedError: no further operation runs: this process was forked"), text
        announce("forked")
        time.sleep(600)
    _core.barrier()


def test_a_forked_child_cannot_call_collectives_or_hide_its_parents_death():
    with start_ranks(fork_children, 2, launcher="raw") as job:
        job.wait_for("forked")
        time.sleep(0.2)
        assert job._processes[0].poll() is None, job.output()  # calls of the forked child do not affect the job
        killed = job.kill(1)
        while job._processes[0].poll() is None:
            assert time.monotonic() - killed < NOTICE_SECONDS, job.output()
            time.sleep(0.01)
        outcome = job.wait()
    assert "rank 1 died" in outcome.ranks[0].error


SPAWN = """
import multiprocessing, os, sys

def run(rank, port, how, results):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    _core.barrier()
    if rank == 1:
        if how == "raise":
            raise ValueError("bad loss")
        return
    try:
        _core.barrier()
    except RuntimeError as error:
        results.put(str(error))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=run, args=(rank, *sys.argv[1:], results)) for rank in range(2)]
    for child in children:
        child.start()
    print(results.get(timeout=50))
    for child in children:
        child.join()
"""


@pytest.mark.parametrize(
    ("how", "message"), [("raise", "rank 1 failed (ValueError: bad loss)"), ("return", "rank 1 left the job")]
)
def test_the_error_says_how_a_multiprocessing_child_ended(tmp_path, how, message):
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    command = [sys.executable, str(script), str(launchers.free_port()), how]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, env=launchers.clean_environment())
    assert run.stdout.startswith(message)


def test_a_process_without_the_secret_is_rejected():
    with start_ranks(describe_slowly, 2) as job:
        job.wait_for("running")
        environ = Path(f"/proc/{job.pid(0)}/environ").read_text().split("\0")
        address = next(entry for entry in environ if entry.startswith("SMD_RENDEZVOUS=")).split("=", 1)[1]
        env = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "SMD_RENDEZVOUS": address, "SMD_SECRET": "a guess"}
        code = "from smdistributed import _core; _core.init()"
        intruder = subprocess.run([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True, timeout=60)
        outcome = job.wait()
    assert "RendezvousError" in intruder.stderr
    assert "does not accept this process's secret" in intruder.stderr
    assert outcome.exit_code == 0, outcome.describe()
    assert "refused a connection from 127.0.0.1" in outcome.output
    assert "it does not know the job's secret" in outcome.output


def describe_slowly():
    from smdistributed import _core
    from support.rank_main import announce

    _core.init()
    announce("running")
    for _ in range(100):
        time.sleep(0.02)
        _core.barrier()


@pytest.mark.parametrize(("rank", "size"), [("RANK", "WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")])
def test_a_single_rank_needs_no_local_rank(rank, size):
    """A Kubernetes operator that starts one process per pod sets no local rank."""
    code = "from smdistributed import _core as c; c.init(); print(c.rank(), c.size(), c.local_rank(), c.local_size())"
    place = {rank: "0", size: "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment = {**launchers.clean_environment(), **place}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("0 1 0 1\n", 0), done.stderr
