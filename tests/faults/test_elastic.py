"""Failures of elastic jobs: the reason is clear and no process is left. elastic.py tests training while workers are killed
and added.
"""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

WORKER = """
    import os, sys, time
    from horovod.common.basics import HorovodBasics
    from horovod.common.elastic import ObjectState, run_fn
    hvd = HorovodBasics()
    def reset():
        hvd.shutdown()
        hvd.init()
    hvd.init()
    {body}
"""


def horovodrun(tmp_path, body, *options, timeout=90):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER).format(body=body))
    command = [sys.executable, "-m", "horovod.runner.launch", *options, sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_too_few_survivors_end_with_a_reason(tmp_path):
    body = "if hvd.rank() == 1: os.kill(os.getpid(), 9)\nreset()"
    done = horovodrun(
        tmp_path, body, "-np", "2", "--min-np", "2", "-H", "localhost:1,127.0.0.1:1", "--elastic-timeout", "10"
    )
    assert done.returncode == 1
    assert "waiting for the minimum number of slots to become available: there are 1 of 2" in done.stderr, done.stderr


def test_resets_have_a_limit(tmp_path):
    body = "if hvd.rank() == hvd.size() - 1 > 0: os.kill(os.getpid(), 9)\nreset(); reset()"
    options = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "--reset-limit", "1"]
    done = horovodrun(tmp_path, body, *options)
    assert done.returncode == 1
    assert "number of resets during elastic job exceeded limit: 1" in done.stderr, done.stderr


def test_failure_of_all_workers(tmp_path):
    options = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1"]
    done = horovodrun(tmp_path, "sys.exit(3)", *options)
    assert done.returncode == 1
    assert "RuntimeError: Horovod detected that one or more processes exited with non-zero status" in done.stderr


def is_running(pid):
    try:
        # A zombie still has an entry in /proc, but does not run.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_launcher_ends_all_workers(tmp_path, number):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER).format(body="print('pid', os.getpid(), flush=True); time.sleep(60)"))
    options = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1"]
    command = [sys.executable, "-m", "horovod.runner.launch", *options, sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(60) == (1 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
