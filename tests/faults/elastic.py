"""Elastic training while a script kills, adds and removes workers: ``python tests/faults/elastic.py --runs 30``.

Each run is a job of ``horovodrun --host-discovery-script`` on this host; its "hosts" are addresses of the loopback
interface. A seed decides the events and their times. Afterwards every sample of every epoch must have been seen
(padding aside) once, and the loss must be that of an undisturbed run. With ``--worker``, this file is the training
script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

SAMPLES = 96
BATCH = 4
EPOCHS = 3
HOSTS = ["localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6"]
#: Longest time for a whole run, and from an event to the next session, in seconds.
LONGEST_RUN = 240.0
LONGEST_RESET = 150.0


def train(folder: Path, pace: float) -> None:
    """The training script of each worker."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1234)
    inputs = torch.randn(SAMPLES, 8)
    targets = inputs @ torch.arange(8.0) + 0.1 * torch.randn(SAMPLES)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True, seed=7)

    def write(name: str, value: object) -> None:
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(value))
        partial.rename(folder / name)

    @hvd.elastic.run
    def loop(state):
        worker = {"pid": os.getpid(), "host": os.environ["HOROVOD_HOSTNAME"], "rank": hvd.rank(), "size": hvd.size()}
        sessions = sorted(folder.glob("session.*"), key=lambda path: int(path.suffix[1:]))
        if hvd.rank() == 0:
            write(f"session.{len(sessions)}", hvd.allgather_object(worker))
        else:
            hvd.allgather_object(worker)
        while state.epoch < EPOCHS:
            loader = torch.utils.data.DataLoader(sampler.dataset, batch_size=BATCH, sampler=state.sampler)
            for number, indices in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs[indices]).squeeze(1), targets[indices])
                loss.backward()
                optimizer.step()
                seen = hvd.allgather(indices).tolist()
                state.seen = [*state.seen[:-1], [*state.seen[-1], *seen]]
                state.sampler.record_batch(number, len(indices))
                time.sleep(pace)
                state.commit()
            state.epoch += 1
            state.seen = [*state.seen, []]
            state.sampler.set_epoch(state.epoch)
            state.commit()
        # Training does not end before the last planned event has happened, however fast it was.
        while not hvd.broadcast_object((folder / "finish").exists()):
            time.sleep(0.05)
            state.check_host_updates()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets).item()
        weights = hvd.allgather_object([each.tolist() for each in model.parameters()])
        moments = hvd.allgather_object([each["momentum_buffer"].tolist() for each in optimizer.state.values()])
        if hvd.rank() == 0:
            equal = all(each == weights[0] for each in weights) and all(each == moments[0] for each in moments)
            write("result", {"seen": state.seen[:EPOCHS], "loss": loss, "equal": equal})

    loop(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, seen=[[]]))


class Job:
    """A running job and its discovery script. The launcher is started by the command prefix `on` with the extra
    environment `variables`.
    """

    def __init__(
        self,
        folder: Path,
        hosts: dict[str, int],
        pace: float,
        on: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.hosts = dict(hosts)
        self.announce()
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        script.chmod(0o755)
        (folder / "output").touch()
        command = [*on, sys.executable, "-m", "horovod.runner.launch", "-np", str(sum(hosts.values())), "--min-np", "1"]
        command += ["--max-np", "4", "--host-discovery-script", str(script), "--elastic-timeout", "200"]
        command += [sys.executable, __file__, "--worker", str(folder), "--pace", str(pace)]
        with (folder / "output").open("w") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def announce(self) -> None:
        """Lets the discovery script print `hosts`."""
        partial = self.folder / ".hosts"
        partial.write_text("".join(f"{host}:{slots}\n" for host, slots in self.hosts.items()))
        partial.rename(self.folder / "hosts")

    def sessions(self) -> list[list[dict]]:
        """Returns the members of each session so far."""
        count = len(list(self.folder.glob("session.*")))
        return [json.loads((self.folder / f"session.{number}").read_text()) for number in range(count)]

    def wait_for(self, done, what: str) -> None:
        """Waits until `done()` is true; raises if the job ends or the time runs out first."""
        deadline = time.monotonic() + LONGEST_RESET
        while not done():
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended while {what}")
            if time.monotonic() > deadline:
                raise AssertionError(f"timed out after {LONGEST_RESET} seconds while {what}")
            time.sleep(0.05)

    def runs_on(self, hosts: dict[str, int]) -> bool:
        """Whether the last session has the given number of workers on each of these hosts."""
        sessions = self.sessions()
        found: dict[str, int] = {}
        for worker in sessions[-1] if sessions else []:
            found[worker["host"]] = found.get(worker["host"], 0) + 1
        return found == {host: slots for host, slots in hosts.items() if slots}

    def kill(self, worker: dict) -> None:
        """Kills a worker and removes its host from `hosts`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker["pid"], signal.SIGKILL)
        self.hosts.pop(worker["host"])


def disturb(job: Job, rng: random.Random) -> list[str]:
    """Adds, kills and removes workers at random, two or three times; returns a text for each event."""
    events = []
    fresh = iter([host for host in HOSTS if host not in job.hosts])
    job.wait_for(lambda: job.runs_on(job.hosts), "the first session began")
    for _ in range(rng.randint(2, 3)):
        time.sleep(rng.random())
        members = job.sessions()[-1]
        room = 4 - sum(job.hosts.values())
        kinds = ["add"] * 2 * (room > 0) + ["kill"] * 3 * (len(job.hosts) > 1) + ["remove"] * (len(job.hosts) > 1)
        kind = rng.choice(kinds)
        if kind == "add":
            host, slots = next(fresh), rng.randint(1, min(2, room))
            job.hosts[host] = slots
            job.announce()
            events.append(f"add {host}:{slots}")
        else:
            # The worker may be rank 0.
            worker = rng.choice([worker for worker in members if worker["host"] in job.hosts])
            if kind == "kill":
                job.kill(worker)
                if rng.random() < 0.5 and room > 0:
                    # A new host appears while the survivors form the next session.
                    job.hosts[next(fresh)] = 1
                job.announce()
            else:
                job.hosts.pop(worker["host"])
                job.announce()
            events.append(f"{kind} rank {worker['rank']} on {worker['host']}")
        job.wait_for(lambda: job.runs_on(job.hosts), f"a session began after {events}")
    return events


def check(folder: Path, sizes: list[int], expected_loss: float) -> None:
    """Checks the result against that of an undisturbed run."""
    result = json.loads((folder / "result").read_text())
    # Whenever the rest of an epoch is distributed again, it is padded to a multiple of the ranks.
    padding = max(sizes) - 1
    for epoch, seen in enumerate(result["seen"]):
        assert set(seen) == set(range(SAMPLES)), f"epoch {epoch} lacks {set(range(SAMPLES)) - set(seen)}"
        assert len(seen) <= SAMPLES + padding, f"epoch {epoch}: {len(seen)} samples of {SAMPLES}, sessions of {sizes}"
    assert result["equal"], "weights or momenta differ between ranks"
    # The loss starts at 140 and ends near the noise of the targets, 0.01. With more ranks there are fewer steps.
    assert math.isclose(result["loss"], expected_loss, abs_tol=0.01), (result["loss"], expected_loss)


def run(seed: int, expected_loss: float | None) -> tuple[float, list[str], list[int]]:
    """Runs one job; returns its loss, its events and the sizes of its sessions. If `expected_loss` is None, nothing
    disturbs the job.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder, dict(zip(HOSTS, rng.choice([[1, 1], [2, 1], [1, 2], [1, 1, 1]]), strict=False)), pace=0.03)
        try:
            events = disturb(job, rng) if expected_loss is not None else []
            (folder / "finish").touch()
            assert job.process.wait(LONGEST_RUN) == 0, f"the job failed after {events}"
            sizes = [len(members) for members in job.sessions()]
            loss = json.loads((folder / "result").read_text())["loss"]
            check(folder, sizes, loss if expected_loss is None else expected_loss)
            return loss, events, sizes
        except BaseException:
            print((folder / "output").read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            job.process.kill()
            job.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--pace", type=float, default=0.03)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first", type=int, default=1)
    args = parser.parse_args()
    if args.worker:
        train(args.worker, args.pace)
        return 0
    expected, _, _ = run(0, None)
    failures = 0
    for seed in range(args.first, args.first + args.runs):
        start = time.monotonic()
        try:
            loss, events, sizes = run(seed, expected)
            outcome = f"loss {loss:.4f} beside {expected:.4f}; {', '.join(events)}; sessions of {sizes}"
        except Exception as error:
            failures += 1
            outcome = f"FAILED: {error!r}"
        print(f"run {seed}: {time.monotonic() - start:.1f} s; {outcome}", flush=True)
    print(f"{args.runs - failures} of {args.runs} runs passed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
