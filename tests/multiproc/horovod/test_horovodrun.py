"""horovodrun and horovod.run with real processes, most of which import no framework."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import horovod
from horovod.runner import gloo_run
from horovod.runner.common.util import safe_shell_exec, settings
from horovod.runner.util.network import get_local_host_intfs
from support import run_ranks


def horovodrun(*words, env=None, timeout=60):
    command = [sys.executable, "-m", "horovod.runner.launch", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def test_output_and_exit_codes(tmp_path):
    script = "import os, sys; print('out', os.environ['HOROVOD_RANK']); print('err', file=sys.stderr)"
    options = ["--output-filename", tmp_path / "logs", "-prefix-timestamp", "--cycle-time-ms", "3"]
    done = horovodrun("-np", 2, *options, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert re.fullmatch(r"\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:out 0", lines[0]), lines
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "out 1\n"
    assert (tmp_path / "logs" / "rank.0" / "stderr").read_text() == "err\n"
    failing = "import os, sys, time; sys.exit(7) if os.environ['HOROVOD_RANK'] == '1' else time.sleep(60)"
    done = horovodrun("-np", 2, sys.executable, "-c", failing)
    assert done.returncode == 1
    assert "RuntimeError: Horovod detected that one or more processes exited with non-zero status" in done.stderr
    assert "Process 1 exit with status code 7.\n" in done.stderr
    assert "The first process to do so was:\nProcess name: 1\nExit code: 7\n" in done.stderr


def test_check_build():
    done = horovodrun("--check-build")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Horovod v{horovod.__version__}:\n\nAvailable Frameworks:\n")
    assert "    [X] Gloo\n" in done.stdout
    assert f"    [{'X' if shutil.which('mpicc') else ' '}] MPI\n" in done.stdout
    assert "    [ ] MXNet\n" in done.stdout


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no MPI")
def test_under_mpi(tmp_path):
    text = """
from horovod.common.basics import HorovodBasics
core = HorovodBasics()
before = core.mpi_enabled(), core.gloo_enabled()
core.init()
print(before, core.mpi_enabled(), core.gloo_enabled(), core.mpi_threads_supported())
"""
    done = mpirun(1, text)
    assert done.stdout == "(False, True) True False True\n", done.stdout + done.stderr
    # If MPI cannot be initialised, the ranks warn and run without it, and `mpi_threads_supported` raises.
    done = mpirun(2, text, MPICC="/nowhere/mpicc", SMD_CACHE_DIR=str(tmp_path))
    assert done.stdout == "", done.stdout
    assert "MPI is not enabled" in done.stderr, done.stderr
    assert "MPI is not initialised: rank 0: `/nowhere/mpicc` is not there" in done.stderr


#: A script that calls MPI from another thread. Unless `own` is set, it leaves the initialisation of MPI to
#: `hvd.init()`.
CALLS_MPI = """
import threading
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from horovod.common.basics import HorovodBasics
from horovod.common.process_sets import ProcessSet
own = {own}
if own:
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
hvd = HorovodBasics()
for session in range(2):
    hvd.init()
    assert MPI.Is_initialized() and hvd.mpi_enabled()
    assert hvd.mpi_threads_supported() == (not own)
    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (hvd.rank(), hvd.size())
    sums = []
    thread = threading.Thread(target=lambda: sums.append(MPI.COMM_WORLD.allreduce(hvd.rank() + 1)))
    thread.start()
    thread.join()
    assert sums == [3]
    hvd.shutdown()
    assert MPI.Is_initialized() and not MPI.Is_finalized()
mine = ProcessSet(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank, 0))
hvd.init(comm=MPI.COMM_WORLD, process_sets=[mine])
assert mine.ranks == [hvd.rank()]
if own:
    # The script has initialised MPI, so it finalizes it.
    hvd.shutdown()
    MPI.Finalize()
print("done")
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no MPI")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.parametrize("own", [False, True], ids=["hvd", "the script"])
def test_mpi_is_initialised_for_scripts(own):
    done = mpirun(2, CALLS_MPI.format(own=own))
    assert done.returncode == 0, done.stdout + done.stderr
    # The ranks share stdout and `print` writes the newline separately, so lines of two ranks may be joined.
    assert done.stdout.count("done") == 2, done.stdout


def mpirun(count, text, **env):
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    line = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(count), sys.executable, "-c", text]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, env={**os.environ, **env})


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Puts a fake ``ssh`` on PATH that logs its command line and runs the command locally. Returns the log's path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "ssh"
    # Options may precede and follow the host.
    skip = 'while [ "${1#-}" != "$1" ]; do shift 2; done'
    script.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{skip}\nshift\n{skip}\nexec sh -c "$*"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    # horovodrun caches the results of its checks in HOME for an hour.
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "calls"


def test_other_hosts_through_ssh(ssh):
    # 192.0.2.1 is reserved for documentation, so it is not a real host.
    script = (
        "import os; print(os.environ['LOCAL_RANK'], os.environ['HOROVOD_CROSS_RANK'], os.environ['NCCL_SOCKET_IFNAME'], "
        "os.environ['SMD_SECRET'][:0])"
    )
    job = ("-np", 3, "-H", "localhost:2,192.0.2.1:1", "-p", 2222)
    done = horovodrun(*job, "--verbose", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    common = ",".join(sorted(get_local_host_intfs()))
    assert sorted(line.split(":")[1].strip() for line in lines if line.startswith("[")) == [
        f"{place} {common}" for place in ("0 0", "0 1", "1 0")
    ]
    messages = [line for line in lines if not line.startswith(("[", "Launching"))]
    assert messages == [
        "Remote host found: 192.0.2.1",
        "Checking ssh on all remote hosts.",
        "SSH was successful into all the remote hosts.",
        "Testing interfaces on all the hosts.",
        f"Common interface found: {common.replace(',', ' ')}",
    ]
    assert len([line for line in lines if line.startswith("Launching horovod task function: ")]) == 3
    calls = ssh.read_text().splitlines()
    assert len(calls) == 3, "expected three ssh calls: the reachability check, the interfaces, and the job"
    assert all("-p 2222" in call and "192.0.2.1" in call for call in calls)
    assert not any("SECRET" in call for call in calls), "secrets are passed on stdin, not on the command line"
    assert horovodrun(*job, sys.executable, "-c", script).returncode == 0
    assert len(ssh.read_text().splitlines()) == 4, "the checks are cached, so the second job needs one ssh call"
    options = ("--disable-cache", "--network-interface", "lo")
    done = horovodrun("-np", 1, "-H", "192.0.2.1:1", *options, sys.executable, "-c", script + "; exit(5)")
    assert " lo " in done.stdout
    assert len(ssh.read_text().splitlines()) == 6, "a given interface is not checked, so this job needs two ssh calls"
    assert done.returncode == 1
    assert "Process 0 exit with status code 5.\n" in done.stderr
    # A fake ssh whose interface check fails, as on a host without the package.
    (ssh.parent / "bin" / "ssh").write_text(
        (ssh.parent / "bin" / "ssh")
        .read_text()
        .replace("exec", 'case "$*" in *task_fn*) echo no module >&2; exit 9;; esac; exec')
    )
    start = time.monotonic()
    done = horovodrun("-np", 1, "-H", "192.0.2.1:1", "--disable-cache", sys.executable, "-c", "print('runs')")
    assert (done.returncode, done.stdout.strip()) == (0, "[0]<stdout>:runs")
    assert "warning: the interfaces of the hosts could not be compared: 192.0.2.1: no module" in done.stderr
    assert time.monotonic() - start < 25, "the launcher does not wait for a task that has failed"


def test_a_function_on_all_ranks():
    factor = 10

    def work(offset, exponent=1):
        from horovod.common.basics import HorovodBasics

        hvd = HorovodBasics()
        hvd.init()
        return hvd.rank() * factor**exponent + offset, hvd.size()

    with pytest.warns(DeprecationWarning, match="np is deprecated"):
        assert horovod.run(work, args=(1,), kwargs={"exponent": 2}, np=2) == [(1, 2), (101, 2)]

    def fail():
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("lost")

    with pytest.raises(RuntimeError, match="one or more processes exited with non-zero status") as raised:
        horovod.run(fail, num_proc=2)
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(ValueError, match="hosts and hostfile"):
        horovod.run(fail, hosts="a:1", hostfile="b")


def test_launch_run_returns_the_results_of_a_function():
    from horovod.runner import _HorovodArgs, launch

    options = _HorovodArgs()
    options.num_proc = 2
    options.run_func = lambda: int(os.environ["HOROVOD_RANK"]) + 10
    assert launch._run(options) == [10, 11]


def test_processes_that_a_script_starts_itself(tmp_path):
    """Processes that a script starts itself rendezvous through the launcher's store, for several sessions."""
    script = (
        "from horovod.common.basics import HorovodBasics; import os, sys; hvd = HorovodBasics()\n"
        "for _ in range(2): hvd.init(); hvd.shutdown()\n"
        f"hvd.init(); open({str(tmp_path)!r} + f'/{{hvd.rank()}}', 'w').write(f'{{hvd.size()}} {{os.environ[\"A\"]}}')\n"
        "sys.exit(3 * hvd.rank())"
    )
    asked = settings.Settings(hosts="a:1,b:1", num_proc=2)
    seen = {}

    def start(line, slot, events):
        seen[slot.rank] = line, slot.hostname
        return safe_shell_exec.execute(line, env=dict(os.environ)), time.time()

    command = [sys.executable, "-W", "error", "-c", script]
    with pytest.raises(RuntimeError, match="Process name: 1\nExit code: 3"):
        gloo_run.launch_gloo(command, start, asked, ["lo"], {"A": "of all"}, "127.0.0.1")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 of all"] * 2
    assert [seen[rank][1] for rank in range(2)] == ["a", "b"]
    assert "A='of all' HOROVOD_HOSTNAME=b HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=0 " in seen[1][0]
    assert "SECRET" not in seen[1][0], "the secret is not on the command line, which any user of the host can read"


def test_killing_the_caller_ends_the_job(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, time, horovod\n"
        f"def work():\n    open({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w').close()\n    time.sleep(600)\n"
        "horovod.run(work, num_proc=2)\n"
    )
    caller = subprocess.Popen([sys.executable, script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def workers():
        return [int(file.stem) for file in tmp_path.glob("*.pid")]

    try:
        wait_until(lambda: len(workers()) == 2)
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers()))


def wait_until(holds, timeout=60):
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Communicator:
    """A fake mpi4py communicator. `allgather` returns `gathered` without communication."""

    __module__ = "mpi4py.MPI"

    def __init__(self, ranks, gathered=None):
        self.ranks, self.gathered = list(ranks), gathered

    def Get_group(self):  # noqa: N802
        return self

    def Get_size(self):  # noqa: N802
        return len(self.ranks)

    def Translate_ranks(self, places, other):  # noqa: N802
        return [other.ranks.index(self.ranks[place]) for place in places]

    def allgather(self, own):
        return self.gathered


def _sessions(folder):
    """A session without rank 2, then process sets from communicators, then timelines."""
    import torch

    import horovod.torch as hvd

    found = {}
    hvd.init(comm=[1, 0])
    found["part"] = hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()

    world = Communicator(range(3))
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(COMM_WORLD=world)
    sys.modules["mpi4py"] = module
    groups = [[0, 2], [1], [0, 2]]
    world.gathered = [[group] for group in groups]
    mine = hvd.ProcessSet(Communicator(groups[int(os.environ["RANK"])]))
    with pytest.raises(NotImplementedError):
        hvd.init(process_sets=[mine])
    hvd.init(comm=world, process_sets=[mine])
    total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum, process_set=mine).item()
    found["sets"] = mine.process_set_id, mine.ranks, mine.rank(), mine.size(), total
    found["world"] = hvd.global_process_set.mpi_comm is world

    def events(path, wanted):
        """Waits until the timeline contains all of `wanted`; returns its process names."""
        deadline = time.monotonic() + 30
        while True:
            # The file may be read in the middle of a write.
            with contextlib.suppress(json.JSONDecodeError):
                events = json.loads(path.read_text())
                found = {event.get("name") or event.get("args", {}).get("dtype") for event in events}
                found |= {event.get("args", {}).get("shape") for event in events}
                if wanted <= found:
                    break
            assert time.monotonic() < deadline, (wanted, path.read_text())
            time.sleep(0.02)
        assert {event["ph"] for event in events} <= {"M", "B", "E", "X", "i"}
        return {event["args"].get("name") for event in events if event.get("name") == "process_name"}

    first, second = Path(folder) / "first.json", Path(folder) / "second.json"
    hvd.start_timeline(str(first), mark_cycles=True)
    hvd.allreduce(torch.ones(4), name="w")
    hvd.grouped_allreduce([torch.ones(4), torch.ones(4)], name="together")
    hvd.start_timeline(str(first))
    if hvd.rank() == 0:
        wanted = {"NEGOTIATE_ALLREDUCE", "0", "1", "2", "ALLREDUCE", "SHM_ALLREDUCE", "CYCLE_START", "float32"}
        wanted |= {"QUEUE", "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"}
        found["first"] = events(first, wanted)
    hvd.barrier()
    # A timeline that cannot be written does not raise.
    hvd.start_timeline(str(Path(folder) / "nowhere" / "lost.json"))
    hvd.start_timeline(second)
    hvd.broadcast(torch.ones(4), 1, name="w")
    hvd.allgather(torch.ones(hvd.rank() + 1, 4), name="w")
    hvd.alltoall(torch.ones(3 * (hvd.rank() + 1), 5), name="w")
    hvd.stop_timeline()
    hvd.stop_timeline()
    # Rank 0 writes the timeline. Without the barrier it could still record the next call of a faster rank.
    hvd.barrier()
    hvd.allreduce(torch.ones(4), name="later")
    if hvd.rank() == 0:
        # ALLOCATE_OUTPUT: the output is allocated once the row counts of all ranks are known.
        wanted = {"ALLOCATE_OUTPUT", "SHM_ALLGATHER", "[6, 4]", "SHM_ALLTOALL", "[6, 5]"}
        found["second"] = events(second, {"NEGOTIATE_BROADCAST", "BROADCAST", "SHM_BROADCAST", *wanted})
    hvd.shutdown()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.start_timeline(str(first))
    return found


def test_worlds_communicators_and_timelines(tmp_path):
    found = run_ranks(_sessions, 3, str(tmp_path))
    assert [one["part"] for one in found] == [(1, 2, 2.0), (0, 2, 2.0), (0, 1, 1.0)]
    assert [one["sets"] for one in found] == [(1, [0, 2], 0, 2, 2.0), (2, [1], 0, 1, 1.0), (1, [0, 2], 1, 2, 2.0)]
    assert all(one["world"] for one in found)
    assert "allreduce.w" in found[0]["first"]
    assert "allreduce.later" not in found[0]["second"]


def test_timestamps_in_the_log():
    script = "from horovod.common.basics import HorovodBasics; hvd = HorovodBasics(); hvd.init(); hvd.shutdown()"
    # `--thread-affinity 0` gives one core for two processes, which logs an error.
    job = ("-np", 2, "--thread-affinity", "0", "--gloo-timeout-seconds", 60, "--hierarchical-allreduce")
    for option, line in (
        ("--log-with-timestamp", r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: E affinity\.rs:\d+\] \[%d\]: "),
        ("--log-without-timestamp", r"\[smd %d\] ERROR "),
    ):
        done = horovodrun(*job, option, sys.executable, "-W", "error", "-c", script)
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            expected = (
                rf"\[{rank}\]<stderr>:" + line % rank + "`HOROVOD_THREAD_AFFINITY` is `0`: expected 2 numbers of cores"
            )
            assert re.search(expected, done.stderr), done.stderr
