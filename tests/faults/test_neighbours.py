"""Jobs of two users, and two of one user, on one host at the same time; and where the secret of a job can be read."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support import more
from support.launchers import clean_environment, command

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
#: The Python of the tests may lie where only root may look; reading is all that this adds.
READING = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
SECRETS = ("SMD_SECRET", "_HOROVOD_SECRET_KEY")

#: Joins the job, prints the session, waits for the file `go`, and runs barriers.
SCRIPT = """
import sys, time
from pathlib import Path
from smdistributed import _core
from smdistributed._common import lifecycle

lifecycle.init()
rank = _core.rank()
print(f"session {_core.session_id()} rank {rank} of {_core.size()}\\n", end="", flush=True)
Path(sys.argv[1], f"ready{rank}").touch()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
for _ in range(200):
    _core.barrier(0)
lifecycle.shutdown()
"""

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(os.getuid() != 0, reason="another user's job can be started by root only"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed (package util-linux)"),
]


class Job:
    """Two ranks of a user, started by a launcher, with a folder of their own."""

    def __init__(self, launcher, user, script):
        # The test's own folder is closed to other users.
        self.folder = Path(tempfile.mkdtemp(prefix="neighbours-", dir="/tmp"))
        os.chown(self.folder, user, user)
        words = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable]
        words = words if launcher == "horovodrun" else command(launcher, 2, [])
        if launcher == "mpirun":
            # The folder for its sessions would be root's.
            at = words.index("orte_tmpdir_base")
            words = [*words[: at - 1], *words[at + 2 :]]
            # mpirun asks `access` about the program, which disregards the capability; `env` disregards nothing.
            words.insert(len(words) - 1, "env")
        variables = {"HOME": self.folder, "TMPDIR": self.folder, "OMP_NUM_THREADS": "1", "SMD_LOG": "debug"}
        self.process = subprocess.Popen(
            [*([*AS_NOBODY, *READING] if user else []), *words, str(script), str(self.folder)],
            env=clean_environment() | {name: str(value) for name, value in variables.items()},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_until_it_runs(self):
        deadline = time.monotonic() + 120
        while not all((self.folder / f"ready{rank}").exists() for rank in range(2)):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def processes(self):
        """Yields id and variables of each process of the job."""
        for folder in Path("/proc").iterdir():
            try:
                entries = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
            except OSError:
                continue
            if f"TMPDIR={self.folder}".encode() in entries:
                yield int(folder.name), [each.partition(b"=") for each in entries]

    def secrets(self):
        """The secrets in the environment of the job's processes."""
        named = (each for _, entries in self.processes() for each in entries)
        return {value for name, _, value in named if name.decode() in SECRETS}

    def finish(self):
        (self.folder / "go").touch()
        output, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, output
        return output

    def end(self):
        self.process.kill()
        self.process.wait()
        # Where the test has failed, ranks wait for `go`, and mpirun was killed without ending them.
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def readable_files(since):
    """Yields path and content of files in shared folders that any user may read and that changed after `since`."""
    for place in ("/tmp", "/dev/shm", "/var/tmp"):
        # Other tests' folders come and go meanwhile.
        for folder, _, names in os.walk(place):
            for path in (Path(folder, name) for name in names):
                try:
                    found = path.lstat()
                    is_open = all(each.stat().st_mode & stat.S_IXOTH for each in path.parents)
                    if (
                        stat.S_ISREG(found.st_mode)
                        and found.st_mode & stat.S_IROTH
                        and is_open
                        and found.st_mtime >= since
                    ):
                        yield path, path.read_bytes()
                except OSError:
                    continue


@pytest.mark.parametrize("second", [0, NOBODY], ids=["one user", "two users"])
@pytest.mark.parametrize("launcher", ["smdrun", more("torchrun"), more("mpirun"), more("horovodrun")])
def test_two_jobs_do_not_disturb_each_other_and_keep_their_secrets(launcher, second, tmp_path):
    script = Path(tempfile.mkdtemp(prefix="neighbours-script-", dir="/tmp")) / "meet.py"
    script.parent.chmod(0o755)
    script.write_text(SCRIPT)
    since = time.time() - 1
    jobs = []
    try:
        for user in (0, second):
            jobs.append(Job(launcher, user, script))
        for job in jobs:
            job.wait_until_it_runs()
        secrets = [job.secrets() for job in jobs]
        # `e` shows the variables of processes that the caller may look into.
        seen = subprocess.run([*AS_NOBODY, "ps", "axewwo", "user,args"], capture_output=True, check=True).stdout
        files = dict(readable_files(since))
        outputs = [job.finish() for job in jobs]
    finally:
        for job in jobs:
            job.end()
        shutil.rmtree(script.parent)
    sessions = [re.findall(r"session (\d+) rank (\d) of 2", output) for output in outputs]
    assert [sorted(rank for _, rank in each) for each in sessions] == [["0", "1"]] * 2, outputs
    names = [{session for session, _ in each} for each in sessions]
    assert [len(each) for each in names] == [1, 1], outputs
    assert names[0] != names[1]
    if launcher in ("smdrun", "horovodrun"):
        # The other launchers pass no secret in a variable.
        assert all(secrets), "each job has a secret"
        assert not secrets[0] & secrets[1]
    arguments = subprocess.run(["ps", "axwwo", "args"], capture_output=True, check=True).stdout
    for secret in secrets[0] | secrets[1]:
        assert secret not in arguments
        assert all(secret not in output.encode() for output in outputs)
        assert [path for path, data in files.items() if secret in data] == []
    others = secrets[0] if second else set()
    assert not [secret for secret in others if secret in seen]
