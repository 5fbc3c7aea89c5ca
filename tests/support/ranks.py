"""Starts a job of several ranks, waits for it with a deadline, and returns the result of each rank.

A test body is a module-level function of the test file. Every rank imports the file and calls it:

    def body(scale):
        from smdistributed import _core          # import frameworks inside: pytest's process needs none
        _core.init()
        ...
        return scale * rank                      # anything that can be pickled

    def test_something():
        assert run_ranks(body, 2, 10) == [0, 10]

No process outlives a job: at the deadline every rank prints its stacks and is then killed by its process id.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import forks, launchers
from support.forks import Forked, ForkedProcess, fork_ranks
from support.hosts import ByHand, Hosts, Torchrun
from support.rank_main import BROKEN

_MAIN = Path(__file__).with_name("rank_main.py")
_TESTS = _MAIN.parents[1]
_SHOWN_BYTES = 20_000


class RanksFailedError(AssertionError):
    """A job failed; the text holds the output of all ranks."""

    def __init__(self, outcome: JobResult, why: str) -> None:
        super().__init__(f"{why}\n{outcome.describe()}")
        self.outcome = outcome


class HarnessBrokenError(Exception):
    """The test itself is broken: it cannot be imported, or its arguments cannot be pickled."""


@dataclass
class RankResult:
    """The result of one rank."""

    rank: int
    #: The return value of the body.
    value: Any = None
    #: `Type: text` of the exception that ended the body.
    error: str | None = None
    #: Class names of that exception and its bases, most derived first.
    error_types: tuple[str, ...] = ()
    #: Whether the body returned or raised; false for a rank that was killed.
    finished: bool = False
    #: `time.monotonic()` when the body ended.
    ended_at: float | None = None
    #: As in `subprocess`: negative if a signal ended the process. Known only where each rank is started on its own.
    exit_code: int | None = None


@dataclass
class JobResult:
    """The result of a job."""

    command: list[str]
    exit_code: int
    output: str
    seconds: float
    timed_out: bool
    ranks: list[RankResult] = field(default_factory=list)
    #: Process ids of ranks that still ran after the launcher had ended.
    left_behind: list[int] = field(default_factory=list)

    @property
    def values(self) -> list[Any]:
        """The return value of each rank."""
        return [rank.value for rank in self.ranks]

    def describe(self) -> str:
        """Returns command, exit codes, errors and output as text."""
        lines = [f"command: {' '.join(self.command)}", f"exit code {self.exit_code} after {self.seconds:.1f} s"]
        for rank in self.ranks:
            state = rank.error or ("returned" if rank.finished else "neither returned nor raised")
            lines.append(f"rank {rank.rank}: {state}")
        if self.left_behind:
            lines.append(f"left behind: processes {self.left_behind}")
        output = self.output if len(self.output) <= _SHOWN_BYTES else "...\n" + self.output[-_SHOWN_BYTES:]
        return "\n".join([*lines, "output:", output])


def run_ranks(
    target: Callable[..., Any] | str | os.PathLike[str],
    n: int,
    *args: Any,
    launcher: launchers.Launcher = "smdrun",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> list[Any]:
    """Runs `target` in `n` ranks and returns the return value of each, in rank order.

    Args:
        target: A module-level function, called with `args`; or a script, whose arguments are `args` as text.
        n: Number of ranks.
        launcher: `smdrun`, `torchrun` or `mpirun`. `slurm` and `raw` start each process by itself, with the variables
            of `srun` or of `torchrun`. `Forked` forks ranks with a framework already imported. `Hosts` runs mpirun
            over several hosts; `ByHand` and `Torchrun` are its other launchers.
        options: Options of the launcher, before the script.
        env: Variables in addition to those of this process.
        timeout: Seconds for the whole job.

    Raises:
        RanksFailedError: A rank failed, or the job did not end in time; the text shows every rank's output.
        HarnessBrokenError: The test itself is broken.
    """
    with start_ranks(target, n, *args, launcher=launcher, options=options, env=env, timeout=timeout) as job:
        outcome = job.wait()
    if outcome.timed_out:
        raise RanksFailedError(outcome, f"the job was still running after {timeout:.0f} s")
    if outcome.exit_code != 0 or any(rank.error for rank in outcome.ranks):
        raise RanksFailedError(outcome, "the job failed")
    if outcome.left_behind:
        raise RanksFailedError(outcome, "the job left processes behind")
    return outcome.values


@contextlib.contextmanager
def start_ranks(
    target: Callable[..., Any] | str | os.PathLike[str],
    n: int,
    *args: Any,
    launcher: launchers.Launcher = "smdrun",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Iterator[Job]:
    """Like `run_ranks`, for tests that watch or disturb the job: yields the running job, and ends it afterwards."""
    with tempfile.TemporaryDirectory(prefix="smd-test-") as folder:
        job = Job(Path(folder), target, n, args, launcher, list(options), dict(env or {}), timeout)
        try:
            yield job
        finally:
            job.end()


class Job:
    """A running job; `start_ranks` makes it."""

    def __init__(
        self,
        folder: Path,
        target: Callable[..., Any] | str | os.PathLike[str],
        n: int,
        args: tuple[Any, ...],
        launcher: launchers.Launcher,
        options: list[str],
        env: dict[str, str],
        timeout: float,
    ) -> None:
        if "SMD_TEST_FOLDER" in os.environ:
            raise HarnessBrokenError(
                "a rank starts a job: the script that starts jobs is imported by its ranks and lacks "
                "`if __name__ == '__main__'`"
            )
        timeout *= forks.patience
        self.n = n
        self._folder = folder
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._outcome: JobResult | None = None
        self._is_body = callable(target)
        # mpirun does not wait until its daemons on other hosts have ended.
        self._patience = 10.0 if isinstance(launcher, Hosts) else 0.0
        if callable(target):
            (folder / "call").write_bytes(_pickled_call(target, args, timeout))
            program = [str(_MAIN), str(folder)]
        else:
            program = [os.fspath(target), *map(str, args)]

        variables = launchers.clean_environment()
        # The folder is where ranks leave their results. The variable also identifies the processes of this job.
        variables.update(SMD_TEST_FOLDER=str(folder), OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
        # The library's timeouts are shorter than the job's, so that a hang ends with an error of the library.
        for name in ("SMD_TIMEOUT_SECONDS", "SMD_INIT_TIMEOUT_SECONDS", "SMD_EXIT_TIMEOUT_SECONDS"):
            variables[name] = str(max(5.0, timeout - 10.0))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_TESTS), variables.get("PYTHONPATH")]))
        variables.update(env)

        self._processes: list[subprocess.Popen | ForkedProcess] = []
        self._outputs: list[Path] = []
        if isinstance(launcher, Forked):
            self._fork(launcher, variables)
            return
        if isinstance(launcher, ByHand | Torchrun):
            starts = launcher.starts(n, [*options, *program])
        elif launcher in launchers.COMMANDLESS:
            command = [sys.executable, *options, *program]
            starts = [(command, place) for place in launchers.environments(launcher, n)]
        else:
            starts = [([*launchers.command(launcher, n, options), *program], {})]
        self.command = starts[0][0]
        for index, (command, place) in enumerate(starts):
            self._outputs.append(folder / f"output.{index}")
            with self._outputs[-1].open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=variables | place,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def _fork(self, launcher: Forked, variables: dict[str, str]) -> None:
        if not self._is_body:
            raise HarnessBrokenError("a script cannot be forked: only a body can")
        self.command = ["fork", launcher.module]
        environments = [variables | place for place in launchers.environments("raw", self.n)]
        self._outputs += [self._folder / f"output.{rank}" for rank in range(self.n)]
        for output in self._outputs:
            output.touch()
        self._processes += fork_ranks(launcher.module, self._folder, self._outputs, environments)
        # The first job of a server waits for its imports; that time does not count.
        self._deadline += time.monotonic() - self._started

    @property
    def launcher_pid(self) -> int:
        """Process id of the launcher, or of rank 0 if there is no launcher."""
        return self._processes[0].pid

    def pid(self, rank: int) -> int:
        """Process id of `rank`; waits until it runs Python."""
        path = self._folder / f"{rank}.pid"
        while not path.exists():
            self._check_time(f"rank {rank} to start")
            time.sleep(0.005)
        return int(path.read_text())

    def wait_for(self, name: str) -> None:
        """Waits until a rank has called `support.rank_main.announce(name)`."""
        while not (self._folder / f"event.{name}").exists():
            self._check_time(f"`{name}`")
            time.sleep(0.005)

    def wait_for_end(self, rank: int) -> None:
        """Waits until the body has returned or raised in `rank`."""
        while not (self._folder / f"{rank}.result").exists():
            self._check_time(f"rank {rank} to end")
            time.sleep(0.005)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Sends a signal to `rank`; returns the time of `time.monotonic()`."""
        pid = self.pid(rank)
        # The server reaps a forked rank that has ended, so its process id may belong to another process by now.
        ended = [
            process.pid
            for process in self._processes
            if isinstance(process, ForkedProcess) and process.poll() is not None
        ]
        if pid not in ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return time.monotonic()

    def output(self) -> str:
        """Returns the output so far."""
        texts = [path.read_text(errors="replace") for path in self._outputs]
        if len(texts) == 1:
            return texts[0]
        what = "rank" if len(texts) == self.n else "host"
        return "".join(f"--- {what} {index} ---\n{text}" for index, text in enumerate(texts))

    def wait(self) -> JobResult:
        """Waits for the end of the job; kills it at the deadline."""
        if self._outcome is None:
            timed_out = False
            while any(process.poll() is None for process in self._processes):
                if time.monotonic() > self._deadline:
                    timed_out = True
                    break
                time.sleep(0.005)
            seconds = time.monotonic() - self._started
            left_behind = [] if timed_out else self._living_ranks()
            ended_well = all(process.returncode == 0 for process in self._processes)
            while ended_well and left_behind and time.monotonic() - self._started < seconds + self._patience:
                time.sleep(0.005)
                left_behind = self._living_ranks()
            self.end()
            self._outcome = self._read_outcome(seconds, timed_out, left_behind)
        return self._outcome

    def end(self) -> None:
        """Ends all processes of the job that still run."""
        for number, patience in ((signal.SIGTERM, 7.0), (signal.SIGKILL, 5.0)):
            running = [process for process in self._processes if process.poll() is None]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
        for pid in self._living_ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _check_time(self, what: str) -> None:
        if time.monotonic() > self._deadline or all(process.poll() is not None for process in self._processes):
            raise RanksFailedError(self.wait(), f"the job ended while the test waited for {what}")

    def _living_ranks(self) -> list[int]:
        """Returns the processes that have this job's folder in their environment."""
        mark = f"SMD_TEST_FOLDER={self._folder}".encode()
        # /proc shows a forked rank with the environment of its server, so these are listed separately.
        living = [
            process.pid for process in self._processes if isinstance(process, ForkedProcess) and process.poll() is None
        ]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        living.append(int(entry.name))
        return living

    def _read_outcome(self, seconds: float, timed_out: bool, left_behind: list[int]) -> JobResult:
        codes = [process.returncode for process in self._processes]
        exit_code = next((code for code in codes if code != 0), 0)
        outcome = JobResult(self.command, exit_code, self.output(), seconds, timed_out, left_behind=left_behind)
        for index in range(self.n if self._is_body else 0):
            rank = RankResult(index)
            if len(codes) == self.n > 1:
                rank.exit_code = codes[index]
            path = self._folder / f"{index}.result"
            if path.exists():
                kind, rank.ended_at, *content = pickle.loads(path.read_bytes())
                if kind == "broken":
                    raise HarnessBrokenError(f"rank {index}: {content[0]}\n{outcome.describe()}")
                rank.finished = True
                if kind == "value":
                    rank.value = content[0]
                else:
                    rank.error, rank.error_types = content
            outcome.ranks.append(rank)
        if BROKEN in codes:
            raise HarnessBrokenError(outcome.describe())
        return outcome


def _pickled_call(body: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> bytes:
    if body.__qualname__ != body.__name__:
        raise HarnessBrokenError(
            f"`{body.__qualname__}` cannot be found by its name: a body must be a module-level function"
        )
    file = body.__code__.co_filename
    try:
        return pickle.dumps((file, body.__name__, timeout, pickle.dumps(args)))
    except Exception as error:
        raise HarnessBrokenError(f"the arguments of `{body.__name__}` cannot be pickled: {error}") from error
