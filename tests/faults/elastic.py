"""Elastic training through scripted kills, joins and removals: ``python tests/faults/elastic.py --runs 30``.

Each run is a job of ``horovodrun --host-discovery-script`` on this host, whose "hosts" are names of the loopback interface. A seed
decides what happens to it and when. Afterwards every sample of every epoch must have been seen as often as it should, and the
loss must be that of an undisturbed run. Called with ``--worker``, this file is the training script.
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
#: Longest time for a whole run, and for a session to come about after an event.
LONGEST_RUN = 240.0
LONGEST_RESET = 150.0


def train(folder: Path, pace: float) -> None:
    """What each worker runs."""
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
        place = {"pid": os.getpid(), "host": os.environ["HOROVOD_HOSTNAME"], "rank": hvd.rank(), "size": hvd.size()}
        sessions = sorted(folder.glob("session.*"), key=lambda path: int(path.suffix[1:]))
        if hvd.rank() == 0:
            write(f"session.{len(sessions)}", hvd.allgather_object(place))
        else:
            hvd.allgather_object(place)
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
        # What is to happen to this job happens, however fast it was.
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
    """A run, seen from outside. `on` starts a command on the launcher's host, `variables` are its own."""

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
        """The discovery finds what `hosts` says."""
        partial = self.folder / ".hosts"
        partial.write_text("".join(f"{host}:{slots}\n" for host, slots in self.hosts.items()))
        partial.rename(self.folder / "hosts")

    def sessions(self) -> list[list[dict]]:
        """Members of each session so far."""
        count = len(list(self.folder.glob("session.*")))
        return [json.loads((self.folder / f"session.{number}").read_text()) for number in range(count)]

    def wait_for(self, done, what: str) -> None:
        """Raises if `done` takes too long."""
        deadline = time.monotonic() + LONGEST_RESET
        while not done():
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended while {what}")
            if time.monotonic() > deadline:
                raise AssertionError(f"it took too long: {what}")
            time.sleep(0.05)

    def stands(self, hosts: dict[str, int]) -> bool:
        """Whether the last session is on these hosts."""
        sessions = self.sessions()
        found: dict[str, int] = {}
        for place in sessions[-1] if sessions else []:
            found[place["host"]] = found.get(place["host"], 0) + 1
        return found == {host: slots for host, slots in hosts.items() if slots}

    def kill(self, place: dict) -> None:
        """Kills a worker, and with it takes its host out of the job."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(place["pid"], signal.SIGKILL)
        self.hosts.pop(place["host"])


def disturb(job: Job, draw: random.Random) -> list[str]:
    """Lets a few things happen to a job; returns them in words."""
    happened = []
    fresh = iter([host for host in HOSTS if host not in job.hosts])
    job.wait_for(lambda: job.stands(job.hosts), "the first session began")
    for _ in range(draw.randint(2, 3)):
        time.sleep(draw.random())
        members = job.sessions()[-1]
        room = 4 - sum(job.hosts.values())
        kinds = ["add"] * 2 * (room > 0) + ["kill"] * 3 * (len(job.hosts) > 1) + ["remove"] * (len(job.hosts) > 1)
        kind = draw.choice(kinds)
        if kind == "add":
            host, slots = next(fresh), draw.randint(1, min(2, room))
            job.hosts[host] = slots
            job.announce()
            happened.append(f"add {host}:{slots}")
        else:
            # Rank 0's host is as good as any.
            place = draw.choice([place for place in members if place["host"] in job.hosts])
            if kind == "kill":
                job.kill(place)
                if draw.random() < 0.5 and room > 0:
                    # Another one comes while the survivors find each other.
                    job.hosts[next(fresh)] = 1
                job.announce()
            else:
                job.hosts.pop(place["host"])
                job.announce()
            happened.append(f"{kind} rank {place['rank']} on {place['host']}")
        job.wait_for(lambda: job.stands(job.hosts), f"a session began after {happened}")
    return happened


def check(folder: Path, sizes: list[int], expected_loss: float) -> None:
    """The result is that of an undisturbed run."""
    result = json.loads((folder / "result").read_text())
    # Each time that an epoch is divided, its end is padded to a multiple of the ranks.
    padding = max(sizes) - 1
    for epoch, seen in enumerate(result["seen"]):
        assert set(seen) == set(range(SAMPLES)), f"epoch {epoch} lacks {set(range(SAMPLES)) - set(seen)}"
        assert len(seen) <= SAMPLES + padding, f"epoch {epoch}: {len(seen)} samples of {SAMPLES}, sessions of {sizes}"
    assert result["equal"], "weights or momenta differ between ranks"
    # It begins at 140, and ends near the noise of the targets, 0.01; with more ranks there are fewer steps.
    assert math.isclose(result["loss"], expected_loss, abs_tol=0.01), (result["loss"], expected_loss)


def run(seed: int, expected_loss: float | None) -> tuple[float, list[str], list[int]]:
    """One run; returns its loss, what happened, and the sizes of its sessions. `expected_loss` is none for the undisturbed one."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder, dict(zip(HOSTS, draw.choice([[1, 1], [2, 1], [1, 2], [1, 1, 1]]), strict=False)), pace=0.03)
        try:
            happened = disturb(job, draw) if expected_loss is not None else []
            (folder / "finish").touch()
            assert job.process.wait(LONGEST_RUN) == 0, f"the job failed after {happened}"
            sizes = [len(members) for members in job.sessions()]
            loss = json.loads((folder / "result").read_text())["loss"]
            check(folder, sizes, loss if expected_loss is None else expected_loss)
            return loss, happened, sizes
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
            loss, happened, sizes = run(seed, expected)
            outcome = f"loss {loss:.4f} beside {expected:.4f}; {', '.join(happened)}; sessions of {sizes}"
        except Exception as error:
            failures += 1
            outcome = f"FAILED: {error!r}"
        print(f"run {seed}: {time.monotonic() - start:.1f} s; {outcome}", flush=True)
    print(f"{args.runs - failures} of {args.runs} runs as they should be")
    return failures


if __name__ == "__main__":
    sys.exit(main())
