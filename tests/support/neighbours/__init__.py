"""Jobs beside each other on one host, of one user or of two, and the places where their secrets could be read.

with Watch(engine.folder) as watch:         # the folder with the logs and the state of what starts the jobs
    jobs = [Job(user, [*as_user(user), *launcher, sys.executable], environment) for user in (0, NOBODY)]
    ...
    watch.look((job.user, job.secrets()) for job in jobs)
    outputs = [job.finish() for job in jobs]
check_sessions(outputs)
assert watch.places(outputs) == []
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from support import forks
from support.neighbours.processes import having

#: Id of the user `nobody`.
NOBODY = 65534
_AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
#: The Python of the tests may lie where only root may look; reading is all that this adds.
_READING = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
#: Folders that all users share.
_SHARED = ("/tmp", "/dev/shm", "/var/tmp")
#: Variables with a secret of a job.
_SECRETS = ("SMD_SECRET", "_HOROVOD_SECRET_KEY", "HOROVOD_RUN_FUNCTION_SERVER")
_SHORTEST_SECRET = 16
#: Seconds between looks at the command lines of all processes.
_INTERVAL = 0.1

#: Joins the job, prints the session, waits for the file `go`, and runs collectives. Arguments: a folder, and the job's factor.
_MEETING = """
import sys, time
from pathlib import Path
from smdistributed import _core
from smdistributed._common import lifecycle

folder, factor = Path(sys.argv[1]), int(sys.argv[2])
lifecycle.init()
rank, size = _core.rank(), _core.size()
if factor:
    import torch
    from smdistributed.dataparallel.torch import distributed
print(f"session {_core.session_id()} rank {rank} of {size}\\n", end="", flush=True)
Path(folder, f"ready{rank}").touch()
while not Path(folder, "go").exists():
    time.sleep(0.05)
for step in range(200):
    if factor:
        total = torch.ones(8) * factor * (rank + step)
        distributed.all_reduce(total)
        assert total.tolist() == [factor * (size * step + size * (size - 1) // 2)] * 8, (total, step)
    else:
        _core.barrier(0)
lifecycle.shutdown()
"""

#: A function for the scripts of engines that run functions. `add` sums a number over all ranks; `factor` is another one in each job.
MEET = """
def meet(folder, factor, add):
    import os, time
    from smdistributed import _core
    rank, size = _core.rank(), _core.size()
    with open(f"{folder}/keys", "a") as file:
        file.writelines(f"{os.environ.get(name, '')}\\n" for name in NAMES)
    with open(f"{folder}/ready{rank}", "w") as file:
        file.write(f"session {_core.session_id()} rank {rank} of {size} ")
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.05)
    for step in range(100):
        total = add(factor * (rank + step))
        assert total == factor * (size * step + size * (size - 1) // 2), (total, step)
""".replace("NAMES", repr(_SECRETS))


def missing() -> str | None:
    """Returns the reason why no job of another user can be started here; None if one can."""
    if os.getuid() != 0:
        return "another user's job can be started by root only"
    return None if shutil.which("setpriv") else "setpriv is not installed (package util-linux)"


def as_user(user: int, reads_all: bool = True) -> list[str]:
    """Returns the command prefix that runs a command as a user, 0 or `NOBODY`.

    Args:
        user: The id of the user.
        reads_all: Whether the command and its children may read every file, so that they find the Python of the tests.
    """
    return [*_AS_NOBODY, *(_READING if reads_all else [])] if user else []


def private_folder(user: int) -> Path:
    """Makes a folder in /tmp that only one user may enter; the test's own folder is closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="neighbours-", dir="/tmp"))
    os.chown(folder, user, user)
    return folder


def secrets_in(variables: Mapping[str, str]) -> set[bytes]:
    """Returns the secrets in variables of a job, in each form in which they could be written: text, hexadecimal, bytes."""
    found = set()
    for text in (variables[name].rpartition(":")[2] for name in _SECRETS if variables.get(name)):
        found.add(text.encode())
        with contextlib.suppress(ValueError):
            found.add(bytes.fromhex(text))
        with contextlib.suppress(ValueError):
            # A pickle of the bytes, with a few bytes of its own before and after them.
            key = re.search(rb"C\x20(.{32})", base64.b64decode(text, validate=True), re.DOTALL)
            found |= {key[1], key[1].hex().encode()} if key else set()
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def wait_for_secrets(folder: Path, is_over: Callable[[], bool], size: int = 2) -> set[bytes]:
    """Waits until all ranks of a job are in `MEET`. Takes the secrets away that they have written there, and returns them.

    Args:
        folder: The folder of the job's ranks.
        is_over: Whether the job has ended.
        size: The number of ranks.
    """
    while not all((folder / f"ready{rank}").exists() for rank in range(size)):
        assert not is_over(), "the job has ended before its ranks have met"
        time.sleep(0.1)
    keys = (folder / "keys").read_text().split()
    (folder / "keys").unlink()
    return set().union(*(secrets_in({name: key}) for key in keys for name in _SECRETS))


def text_of(folder: Path, size: int = 2) -> str:
    """Returns what the ranks of a job have written in `MEET`, for `check_sessions`. Engines may lose what ranks print at their end."""
    return "".join((folder / f"ready{rank}").read_text() for rank in range(size))


def readable_files(since: float) -> Iterator[Path]:
    """Yields files in shared folders that any user may read and that changed after a time."""
    for path, found in _changed_files(_SHARED, since):
        with contextlib.suppress(OSError):
            if found.st_mode & stat.S_IROTH and all(each.stat().st_mode & stat.S_IXOTH for each in path.parents):
                yield path


def _changed_files(folders: Iterable[str | Path], since: float) -> Iterator[tuple[Path, os.stat_result]]:
    for place in folders:
        for folder, _, names in os.walk(place):
            for path in (Path(folder, name) for name in names):
                # Files of other tests come and go meanwhile.
                with contextlib.suppress(OSError):
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode) and found.st_mtime >= since:
                        yield path, found


def check_sessions(outputs: Sequence[str], size: int = 2) -> None:
    """Checks that all ranks of each job were in one session, and that each job had a session of its own.

    Args:
        outputs: What each job has printed, or the text of the ranks that were in `MEET`.
        size: The number of ranks of each.
    """
    found = [re.findall(rf"session (\d+) rank (\d) of {size}", output) for output in outputs]
    ranks = [sorted(int(rank) for _, rank in each) for each in found]
    assert ranks == [list(range(size))] * len(outputs), outputs
    names = [{session for session, _ in each} for each in found]
    assert [len(each) for each in names] == [1] * len(outputs), outputs
    assert len(set.union(*names)) == len(outputs), names


class Watch:
    """Looks for secrets where other users, or those who get the logs, could read them; from `with` on until its end.

    Args:
        folders: Folders in which no file may have a secret, whatever its mode.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._since = time.time() - 1
        self._secrets: set[bytes] = set()
        self._found: set[str] = set()
        self._commands: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._collect_commands, name="watch-commands")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def look(self, secrets: Iterable[tuple[int, set[bytes]]]) -> None:
        """Looks for secrets in files, and in what `ps` shows the user `nobody`. Jobs run meanwhile.

        Args:
            secrets: The secrets of each job, and the id of its user.
        """
        by_job = list(secrets)
        self._secrets = self._secrets.union(*(own for _, own in by_job))
        # `e` shows the variables of processes that the caller may look into.
        shown = subprocess.run([*_AS_NOBODY, "ps", "axewwo", "user,args"], capture_output=True, check=True).stdout
        for user, own in by_job:
            if user != NOBODY and any(secret in shown for secret in own):
                self._found.add(f"`ps` of nobody: a secret of user {user}")
        shown = subprocess.run(["ps", "axwwo", "args"], capture_output=True, check=True).stdout
        self._commands.update(shown.splitlines())
        self.look_at_files()

    def look_at_files(self) -> None:
        """Looks for the secrets in files once more, such as after the end of the jobs."""
        own = (path for path, _ in _changed_files(self._folders, self._since))
        for path in (*readable_files(self._since), *own):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if any(secret in data for secret in self._secrets):
                    self._found.add(str(path))

    def places(self, outputs: Iterable[str] = ()) -> list[str]:
        """Returns the places with a secret: files, command lines at any time, and what jobs have printed."""
        named = [(f"the output of job {job}", output.encode()) for job, output in enumerate(outputs)]
        named += [(f"the command {command!r}", command) for command in self._commands]
        texts = [name for name, text in named if any(secret in text for secret in self._secrets)]
        return sorted({*self._found, *texts})

    def _collect_commands(self) -> None:
        while not self._over.wait(_INTERVAL):
            for name in os.listdir("/proc"):
                with contextlib.suppress(OSError):
                    if name.isdigit():
                        self._commands.add(Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" "))


class Job:
    """Ranks of a user, with a folder of their own. They meet, wait for `finish`, and run collectives.

    Args:
        user: The id of the user, 0 or `NOBODY`.
        command: What starts the ranks of a Python file; the file is appended.
        environment: The variables of the job; its folders, and a log of everything, are added.
        factor: The ranks add tensors with multiples of this number, another one in each job. With 0 they only run barriers, which
            needs no PyTorch.
        size: The number of ranks.
    """

    def __init__(
        self, user: int, command: Sequence[str], environment: Mapping[str, str], factor: int = 0, size: int = 2
    ) -> None:
        self.user = user
        self.folder = private_folder(user)
        script = self.folder / "meet.py"
        script.write_text(_MEETING)
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", "SMD_LOG": "debug"}
        self._size = size
        # Not a pipe: nothing reads it until the job has ended.
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(script), str(self.folder), str(factor)],
                env={**environment, **own},
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until_it_runs(self, seconds: float = 120.0) -> None:
        """Waits until all ranks have met."""
        deadline = time.monotonic() + seconds * forks.patience
        while not all((self.folder / f"ready{rank}").exists() for rank in range(self._size)):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def secrets(self) -> set[bytes]:
        """Returns the secrets in the environments of the job's processes."""
        return set().union(*(secrets_in(each.variables) for each in having("TMPDIR", self.folder).values()))

    def finish(self, seconds: float = 60.0) -> str:
        """Lets the ranks go on to their end, and returns what the job has printed."""
        (self.folder / "go").touch()
        code = self.process.wait(seconds * forks.patience)
        assert code == 0, self.output()
        return self.output()

    def output(self) -> str:
        """What the job has printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def end(self) -> None:
        """Kills what is left of the job, and removes its folder."""
        self.process.kill()
        self.process.wait()
        # Where a test has failed, ranks wait for `go`, and their launcher was killed without ending them.
        for pid in having("TMPDIR", self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def meet(watch: Watch, starts: Iterable[Callable[[], Job]]) -> tuple[list[set[bytes]], list[str]]:
    """Runs jobs at the same time, and checks that each has a session of its own.

    Args:
        watch: Looks for the secrets of the jobs while they run, and after their end.
        starts: What starts each job.

    Returns:
        The secrets of each job, and what each has printed.
    """
    jobs: list[Job] = []
    try:
        for start in starts:
            jobs.append(start())
        for job in jobs:
            job.wait_until_it_runs()
        found = [job.secrets() for job in jobs]
        watch.look((job.user, own) for job, own in zip(jobs, found, strict=True))
        outputs = [job.finish() for job in jobs]
        watch.look_at_files()
    finally:
        for job in jobs:
            job.end()
    check_sessions(outputs)
    return found, outputs
