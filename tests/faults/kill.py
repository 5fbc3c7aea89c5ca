"""Kills a random rank at a random moment of a training job, many times, and checks the errors of the survivors.

    python tests/faults/kill.py --runs 200 --seed 1
    python tests/faults/kill.py --runs 50 --cuda --at-once 10

The seed alone decides a run: the number of ranks, the launcher, the victim, the phase, and when in the phase (as a
share of its duration). A survivor must end with an error that names the dead rank within 5 s of the death, or within 10
s where a device has to be stopped first. No process or file of the job may be left. If the victim dies in `shutdown`,
it may have done its part already: then survivors may end without an error.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, devices, start_ranks

PHASES = ("init", "wrap", "forward", "backward", "collective", "shutdown")
#: Longest time from the death to a survivor's error, without and with devices.
LIMIT_SECONDS = {False: 5.0, True: 10.0}
#: Timeout of a run. Most of it is for the import of torch on a busy machine.
_TIMEOUT_SECONDS = 300.0
#: Approximate duration of the phases that happen once.
_ONCE_SECONDS = {"init": 0.05, "wrap": 0.05, "shutdown": 0.01}
#: The same on devices. In "wrap", ranks use their devices together for the first time.
_ONCE_SECONDS_CUDA = {"init": 0.05, "wrap": 1.0, "shutdown": 0.1}


@dataclass(frozen=True)
class Case:
    """The parameters of one run."""

    seed: int
    launcher: str | Forked
    n: int
    victim: int
    phase: str
    #: When the victim dies, as a share of the duration of the phase.
    share: float
    #: The step in which the victim dies, if the phase is part of each step.
    step: int
    #: Whether ranks train on CUDA devices: each on its own, or all on the only one.
    cuda: bool = False

    @classmethod
    def of(cls, seed: int, cuda: bool = False) -> Case:
        """Draws the case of this seed; six consecutive seeds cover all six phases."""
        rng = random.Random(seed)
        n = 2 if cuda else rng.choice((2, 2, 3))
        phase = PHASES[seed % len(PHASES)]
        # If a rank dies before it has met any other rank, only a launcher can know. Without one, the others wait until
        # SMD_INIT_TIMEOUT_SECONDS and then name the rank that is missing.
        launcher = "smdrun" if phase == "init" else rng.choice(("smdrun", "raw"))
        return cls(
            seed=seed,
            launcher=launcher,
            n=n,
            victim=rng.randrange(n),
            phase=phase,
            share=rng.random(),
            step=rng.randrange(2, 6),
            cuda=cuda,
        )

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.launcher}, rank {self.victim} of {self.n}{' on devices' * self.cuda} dies in "
            f"{self.phase} (step {self.step}, at {self.share:.0%})"
        )


def train(seed: int, folder: str, cuda: bool) -> None:
    """The function of every rank: a training loop that ends only with a death."""
    from support.rank_main import this_rank

    case, rank = Case.of(seed, cuda), this_rank()
    phase = _Phases(case, _Killer(case, Path(folder)) if rank == case.victim else None)
    try:
        _train(case, rank, phase)
    except BaseException:
        # A survivor that was still importing torch at the death could not learn of it before its next call.
        (Path(folder) / f"entered.{rank}").write_text(str(phase.entered))
        raise
    if rank == case.victim:
        time.sleep(_TIMEOUT_SECONDS)


def _train(case: Case, rank: int, phase: _Phases) -> None:
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

    torch.manual_seed(rank)
    device = torch.device("cuda", devices.own()) if case.cuda else torch.device("cpu")
    if case.cuda:
        torch.cuda.set_device(device)
        # Making the CUDA context takes seconds and does not involve other ranks; it is kept out of the phase "init".
        torch.zeros(1, device=device)
    with phase("init"):
        dist.init_process_group()
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    model = model.to(device)
    with phase("wrap"):
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(64, 256, device=device), torch.randint(10, (64,), device=device)
    metric = torch.ones(200_000, device=device)
    # If the victim dies in a phase of each step, the other ranks train until they notice.
    last_step = case.step if case.phase == "shutdown" else sys.maxsize
    for step in range(last_step):
        phase.step = step
        with phase("forward"):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        with phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with phase("collective"):
            dist.all_reduce(metric)
            if step % 2:
                # A rank on a device rarely synchronizes with it. Every other step does, so that deaths while the host
                # waits are tested too.
                metric[0].item()
    with phase("shutdown"):
        dist.destroy_process_group()


class _Killer:
    """Kills this process after a delay, from a thread, whatever the main thread then does."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._thread: threading.Thread | None = None

    def start_timer(self, phase_seconds: float) -> None:
        """Starts the delay: the share of `phase_seconds` at which this process dies."""
        if self._thread is None:
            delay = self._case.share * phase_seconds
            self._thread = threading.Thread(target=self._kill_at, args=(time.monotonic() + delay,), daemon=True)
            self._thread.start()

    def _kill_at(self, at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        (self._folder / "death").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


class _Phases:
    """Context manager that records the current phase and starts the victim's timer in the phase of the case."""

    def __init__(self, case: Case, killer: _Killer | None) -> None:
        self._case = case
        self._killer = killer
        self._seconds = dict(_ONCE_SECONDS_CUDA if case.cuda else _ONCE_SECONDS)
        self._name = ""
        self.step = 0
        #: `time.monotonic()` when the current phase began.
        self.entered = time.monotonic()

    def __call__(self, name: str) -> _Phases:
        self._name = name
        return self

    def __enter__(self) -> None:
        once = self._name in _ONCE_SECONDS
        if self._killer and self._name == self._case.phase and (once or self.step >= self._case.step):
            self._killer.start_timer(self._seconds.get(self._name, 0.01))
        self.entered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._name not in _ONCE_SECONDS:
            self._seconds[self._name] = time.monotonic() - self.entered


@dataclass
class CaseResult:
    """The result of one run."""

    case: Case
    #: Violations of the requirements; empty if there are none.
    problems: list[str]
    #: Seconds from the death to the last survivor's error. For a survivor that entered its phase later, the time counts
    #: from there.
    latency: float
    #: The output of the job.
    output: str


def run(case: Case, folder: Path, timeout: float = _TIMEOUT_SECONDS) -> CaseResult:
    """Runs one case. `folder` must be empty; the run writes its files there."""
    shared_before = _shared_memory()
    problems = []
    arguments = (case.seed, str(folder), case.cuda)
    with start_ranks(train, case.n, *arguments, launcher=case.launcher, timeout=timeout) as job:
        outcome = job.wait()
    if outcome.timed_out:
        problems.append(f"still running after {timeout:.0f} s")
    if outcome.left_behind:
        problems.append(f"processes left: {outcome.left_behind}")
    death_file = folder / "death"
    if not death_file.exists():
        return CaseResult(case, [*problems, "the rank did not die"], 0.0, outcome.describe())
    death = float(death_file.read_text())
    latency = 0.0
    for rank in outcome.ranks:
        if rank.rank == case.victim:
            continue
        if not rank.finished:
            problems.append(f"rank {rank.rank} neither returned nor raised")
            continue
        entered = folder / f"entered.{rank.rank}"
        since = max(death, float(entered.read_text())) if entered.exists() else death
        latency = max(latency, rank.ended_at - since)
        if rank.error is None:
            if case.phase != "shutdown":
                problems.append(f"rank {rank.rank} ended without an error")
        elif f"rank {case.victim} died" not in rank.error:
            problems.append(f"rank {rank.rank} does not name rank {case.victim}: {rank.error}")
    if latency > LIMIT_SECONDS[case.cuda]:
        problems.append(f"the last survivor raised after {latency:.1f} s")
    if case.launcher == "smdrun" and f"rank {case.victim} failed first: killed by SIGKILL" not in outcome.output:
        problems.append("smdrun does not name the rank that failed first")
    # On devices, NCCL may have temporary files in /dev/shm.
    if not case.cuda and (left := _shared_memory() - shared_before):
        # Another program's file may be there for a moment. A file that the job left would stay.
        time.sleep(1.0)
        if left := left & _shared_memory():
            problems.append(f"left in /dev/shm: {sorted(left)}")
    return CaseResult(case, problems, latency, outcome.describe())


def _shared_memory() -> set[str]:
    try:
        return set(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return set()


def _device_memory() -> list[int]:
    """Returns the memory in use on each device, in MiB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def _run_seed(seed: int, cuda: bool) -> CaseResult:
    with tempfile.TemporaryDirectory(prefix="smd-kill-") as folder:
        return run(Case.of(seed, cuda), Path(folder), _TIMEOUT_SECONDS / 5 if cuda else _TIMEOUT_SECONDS)


def main() -> int:
    """Runs many cases and prints a table of latencies by phase."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; run i has seed + i")
    parser.add_argument(
        "--cuda", action="store_true", help="two ranks that train on a device each, or share the only one"
    )
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at the same time")
    options = parser.parse_args()
    latencies: dict[str, list[float]] = {phase: [] for phase in PHASES}
    failed: Counter[str] = Counter()
    memory_before = _device_memory() if options.cuda else []
    seeds = range(options.seed, options.seed + options.runs)
    with ThreadPoolExecutor(options.at_once) as jobs:
        for done, result in enumerate(jobs.map(_run_seed, seeds, [options.cuda] * options.runs), 1):
            latencies[result.case.phase].append(result.latency)
            if result.problems:
                failed[result.case.phase] += 1
                print(f"FAILED {result.case}: {'; '.join(result.problems)}\n{result.output}", flush=True)
            elif sys.stdout.isatty():
                print(f"\r{done}/{options.runs}", end="", flush=True)
    print(f"\n{'died in':12} {'runs':>5} {'failed':>7} {'median ms':>10} {'worst ms':>9}")
    for phase, values in latencies.items():
        if values:
            values.sort()
            median, worst = values[len(values) // 2] * 1e3, values[-1] * 1e3
            print(f"{phase:12} {len(values):5} {failed[phase]:7} {median:10.0f} {worst:9.0f}")
    print(f"{options.runs - failed.total()} passed, {failed.total()} failed")
    if options.cuda:
        memory = _device_memory()
        print(f"device memory in use before and after: {memory_before} and {memory} MiB")
        # The driver itself may allocate some memory.
        failed["memory"] = sum(after > before + 64 for before, after in zip(memory_before, memory, strict=True))
    return int(failed.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
