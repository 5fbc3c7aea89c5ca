"""The command `smdrun`: environment, output, exit codes, signals, and that no process outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.launchers import clean_environment

SMDRUN = [sys.executable, "-m", "smdistributed"]


def smdrun(*words, script=None, tmp_path=None, env=None, stdin=subprocess.DEVNULL, **options):
    """Runs `smdrun` to its end; returns the completed process with its output as text."""
    if script is not None:
        path = tmp_path / "script.py"
        path.write_text(script)
        words = [*words, str(path)]
    return subprocess.run(
        [*SMDRUN, *map(str, words)],
        env=clean_environment() | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **({"stdin": stdin} if "input" not in options else {}),
        **options,
    )


@contextlib.contextmanager
def running(tmp_path, script, *options):
    """Starts a job whose script may leave files with process ids in `tmp_path`; kills it at the end."""
    path = tmp_path / "script.py"
    path.write_text(script)
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [*SMDRUN, *options, str(path)],
        env=clean_environment() | {"WORK": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.close()


def wait_for(condition, what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no sign of {what}"
        time.sleep(0.01)


def pids(tmp_path, n):
    """Waits until the script has written `n` process ids to files, and returns them."""
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == n, f"{n} processes")
    return [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Each rank starts a child process, writes both process ids to files, and sleeps.
SLEEPING = """
import os, subprocess, sys, time
def note(name, pid):
    path = os.path.join(os.environ["WORK"], name)
    with open(path + ".part", "w") as file: file.write(str(pid))
    os.rename(path + ".part", path + ".pid")
rank = os.environ["RANK"]
note(f"child{rank}", subprocess.Popen(["sleep", "100"]).pid)
note(f"rank{rank}", os.getpid())
time.sleep(100)
"""


def test_environment_and_arguments(tmp_path):
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    (tmp_path / "show.py").write_text(script)
    done = smdrun(
        "-n", 3, "--env", "COLOR=a b", tmp_path / "show.py", "$HOME", "--env", "*", env={"OMP_NUM_THREADS": ""}
    )
    assert done.returncode == 0, done.stderr
    seen = sorted(
        (json.loads(line.split("] ", 1)[1]) for line in done.stdout.splitlines()), key=lambda job: job[1]["RANK"]
    )
    for rank, (args, env) in enumerate(seen):
        assert args == ["$HOME", "--env", "*"], "arguments are not expanded by a shell"
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert env["COLOR"] == "a b"
        assert len(env["SMD_SECRET"]) == 64
        assert re.fullmatch(r"127\.0\.0\.1:\d+", env["SMD_RENDEZVOUS"])
    assert len({env["SMD_SECRET"] for _, env in seen}) == 1


def test_horovods_rank_variables_are_set(tmp_path):
    names = [f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
    script = f"import os; print(*(os.environ.get(name) for name in {names}))"
    done = smdrun("-n", 2, script=script, tmp_path=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 0 2 0 1", "[1] 1 2 1 2 0 1"], done.stderr


def test_folders_of_a_training_container_are_created(tmp_path):
    script = """
import os
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
    with open(os.path.join(os.environ[name], "made"), "w") as file:
        file.write(name)
"""
    done = smdrun(
        "-n", 1, script=script, tmp_path=tmp_path, cwd=tmp_path, env={"SM_MODEL_DIR": str(tmp_path / "deep" / "model")}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deep" / "model" / "made").read_text() == "SM_MODEL_DIR"
    assert (tmp_path / "output" / "made").read_text() == "SM_OUTPUT_DATA_DIR"


def test_a_model_parallel_configuration_reaches_the_script(tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(
        "smdistributed:\n  modelparallel:\n    enabled: true\n    parameters: {partitions: 2, ddp: true}\n"
        "mpi: {enabled: true, processes_per_host: 2, custom_mpi_options: -x FROM_MPI=1}\n"
    )
    script = (
        "import os, sys; "
        "print(sys.argv[1:], os.environ['SM_HP_MP_PARAMETERS'], os.environ['FROM_MPI'], os.environ['WORLD_SIZE'])"
    )
    done = smdrun("--config", config, script=script, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = "['--mp_parameters', 'ddp=True,partitions=2'] {\"ddp\":true,\"partitions\":2} 1 2"
    assert sorted(done.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]
    wrong = smdrun("-n", 3, "--config", config, script=script, tmp_path=tmp_path)
    assert wrong.returncode == 2
    assert "3 processes do not divide into model-parallel groups of 2" in wrong.stderr


def test_modules_and_executables_run(tmp_path):
    done = smdrun("-n", 2, "-m", "platform")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2
    done = smdrun("-n", 2, "--no-python", "echo", "-n", "hello")
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2", "no/such/script.py"], "there is no script `no/such/script.py`"),
        (["script.py"], "how many processes? pass `-n N`, or `--config`"),
        (["-n", "2", "--config", "/no/such.json", "-m", "platform"], "cannot read the configuration `/no/such.json`"),
        (["-n", "2", "--no-python", "/no/such/program"], "starting `/no/such/program` on `localhost`"),
    ],
)
def test_usage_errors_exit_with_2_and_a_message(words, text):
    done = smdrun(*words)
    assert done.returncode == 2
    assert text in done.stderr


def test_the_first_failure_is_reported(tmp_path):
    script = """
import os, sys, time
if os.environ["RANK"] == "2":
    print("working", file=sys.stderr)
    raise KeyError("missing column")
time.sleep(100)
"""
    start = time.monotonic()
    done = smdrun("-n", 3, "--grace", 0.5, script=script, tmp_path=tmp_path)
    assert done.returncode == 1
    assert time.monotonic() - start < 10
    report = done.stderr[done.stderr.index("smdrun: rank 2 failed first: exit code 1") :]
    assert "KeyError: 'missing column'" in report
    assert "then rank 0: killed by SIGTERM (signal 15), ended by smdrun" in report


@pytest.mark.parametrize(("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134)])
def test_the_exit_code_is_that_of_the_first_failure(tmp_path, how, code):
    script = f"import os, sys, time\nif os.environ['RANK'] == '1': {how}\ntime.sleep(100)"
    assert smdrun("-n", 2, "--grace", 0, script=script, tmp_path=tmp_path).returncode == code


def test_a_stubborn_rank_is_killed(tmp_path):
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    time.sleep(0.5)
    sys.exit(3)
time.sleep(100)
"""
    done = smdrun("-n", 2, "--grace", 0.2, script=script, tmp_path=tmp_path)
    assert done.returncode == 3
    assert "rank(s) 1 did not end: sending SIGKILL" in done.stderr


def test_ctrl_c_reaches_the_ranks(tmp_path):
    script = (
        SLEEPING.replace("time.sleep(100)", "")
        + """
try:
    time.sleep(100)
except KeyboardInterrupt:
    print("saving", flush=True)
    sys.exit(0)
"""
    )
    with running(tmp_path, script, "-n", "2") as process:
        ranks = pids(tmp_path, 4)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0, "all ranks have exited with 0"
        assert (tmp_path / "log").read_text().count("saving") == 2
        assert not any(map(alive, ranks))


def test_a_second_ctrl_c_kills_ranks_that_ignore_the_first(tmp_path):
    script = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLEEPING
    with running(tmp_path, script, "-n", "2", "--grace", "100") as process:
        ranks = pids(tmp_path, 4)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "Ctrl-C" in (tmp_path / "log").read_text(), "the first Ctrl-C")
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 128 + signal.SIGINT
        assert not any(map(alive, ranks))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_job(tmp_path, number):
    with running(tmp_path, SLEEPING, "-n", "2") as process:
        ranks = pids(tmp_path, 4)
        process.send_signal(number)
        assert process.wait(15) == 128 + number
        assert not any(map(alive, ranks))


def test_nothing_outlives_a_killed_smdrun(tmp_path):
    with running(tmp_path, SLEEPING, "-n", "3") as process:
        ranks = pids(tmp_path, 6)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(alive, ranks)), "the end of the ranks and of their children", 5)


def test_leftover_processes_of_ranks_are_killed(tmp_path):
    script = SLEEPING.replace("time.sleep(100)", "").replace('["sleep", "100"]', '["setsid", "sleep", "100"]')
    with running(tmp_path, script, "-n", "2") as process:
        assert process.wait(15) == 0
        left = pids(tmp_path, 4)
        assert not any(map(alive, left))
        assert "left behind" in (tmp_path / "log").read_text()


def test_lines_do_not_mix_and_progress_bars_are_collapsed(tmp_path):
    script = """
import os, sys
for i in range(300):
    sys.stdout.write(f"\\r{i}%")
    sys.stdout.flush()
print()
for i in range(200):
    os.write(1, b"x" * 500)
    os.write(1, b"\\n")
sys.stdout.write("no newline")
"""
    done = smdrun("-n", 2, script=script, tmp_path=tmp_path)
    lines = done.stdout.splitlines()
    for rank in "01":
        own = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert own == ["299%", *["x" * 500] * 200, "no newline"]
    assert len(lines) == 404


def on_a_terminal(command, env):
    """Runs `command` on a pseudo-terminal and returns the bytes that it writes."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, env)
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 65536):
            shown += piece
    os.waitpid(pid, 0)
    return shown


def test_colours_on_a_terminal_only(tmp_path):
    (tmp_path / "script.py").write_text("print('hello')")
    command = [*SMDRUN, "-n", "1", str(tmp_path / "script.py")]
    env = clean_environment() | {"TERM": "xterm"}
    env.pop("NO_COLOR", None)
    assert b"\x1b[36m[0]\x1b[0m hello" in on_a_terminal(command, env)
    assert b"[0] hello" in on_a_terminal(command, env | {"NO_COLOR": "1"})


def test_a_closed_pipe_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text("while True: print('x' * 1000)")
    process = subprocess.Popen(
        [*SMDRUN, "-n", "2", str(tmp_path / "script.py")], env=clean_environment(), stdout=subprocess.PIPE
    )
    process.stdout.read(100)
    process.stdout.close()
    assert process.wait(15) == 128 + signal.SIGPIPE


def test_rank_0_reads_standard_input(tmp_path):
    script = "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))"
    done = smdrun("-n", 2, script=script, tmp_path=tmp_path, input="data\n")
    assert sorted(done.stdout.splitlines()) == [r"[0] 0 'data\n'", "[1] 1 ''"]


def test_the_originals_launchers_run_their_arguments():
    for name, words in [("smddprun", []), ("smddpmprun", ["-i", "ml.p4d.24xlarge", "--allow-bypass"])]:
        code = f"from smdistributed._launch import {name}; import sys; sys.exit({name}())"
        done = subprocess.run(
            [sys.executable, "-c", code, *words, "echo", "a b", "-i"], capture_output=True, text=True, check=True
        )
        assert done.stdout == "a b -i\n"


def test_an_ignored_signal_stays_ignored(tmp_path):
    """Under `nohup`, SIGHUP does not end the job."""
    script = tmp_path / "script.py"
    script.write_text(SLEEPING.replace("time.sleep(100)", "time.sleep(1)"))
    process = subprocess.Popen(
        ["nohup", *SMDRUN, "-n", "1", str(script)],
        env=clean_environment() | {"WORK": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(15) == 0


def with_stuck_ssh(folder):
    """Makes an `ssh` that neither reads its input nor ends by itself; returns the variables that let `smdrun` find it."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 120\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_an_ssh_that_does_not_read_blocks_no_other_rank(tmp_path):
    # The variables do not fit into a pipe. 192.0.2.1 is reserved for documentation, so it is not a real host.
    env = {**with_stuck_ssh(tmp_path), "LARGE": "x" * 100_000, "SMD_INIT_TIMEOUT_SECONDS": "3"}
    done = smdrun("--hosts", "192.0.2.1:1,localhost:1", script="print('runs')", tmp_path=tmp_path, env=env)
    assert "[1] runs" in done.stdout
    reason = "`ssh` to host `192.0.2.1` did not read the rank's variables within 3s (`SMD_INIT_TIMEOUT_SECONDS`)"
    assert f"smdrun: rank 0: {reason}" in done.stderr, done.stderr
    assert "rank 0 failed first: killed by SIGKILL (signal 9) after " in done.stderr, done.stderr
    assert f" s\n    {reason}\n" in done.stderr, "the report must contain the reason, too"
    assert done.returncode == 137


@pytest.mark.parametrize("is_large", [False, True], ids=["that connects nowhere", "that does not read"])
def test_an_elastic_job_does_not_wait_for_a_stuck_ssh(tmp_path, is_large):
    large = {"LARGE": "x" * 100_000, "SMD_INIT_TIMEOUT_SECONDS": "2"} if is_large else {}
    job = ("elastic", "-n", 1, "--hosts", "192.0.2.1:1", "--elastic-timeout", 3, "true")
    done = smdrun(*job, env={**with_stuck_ssh(tmp_path), **large})
    reason = (
        "process 0 was abandoned: `ssh` to host `192.0.2.1` did not read the rank's variables within 2s"
        if is_large
        else "workers on `192.0.2.1` did not call `init()` within the elastic timeout of 3s"
    )
    assert f"smdrun: workers have failed on all hosts; first: {reason}" in done.stderr, done.stderr
    assert done.returncode == 1
