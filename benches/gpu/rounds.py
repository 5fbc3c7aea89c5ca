"""Runs training steps of several variants in turns, in one process; prints times, host times and peak memory of each
rank.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

import smdistributed.modelparallel.torch as smp

#: Runs one step of a variant; returns the loss of this rank. The table has the mean over the ranks.
Step = Callable[..., torch.Tensor]
_states: list[dict[str, Any]] = []


def start(device: str) -> torch.device:
    """Makes PyTorch's default process group, and selects and returns this rank's device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
            os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    smp.init({})
    rank, ranks = smp.rank(), smp.size()
    # `smdrun` sets no port for PyTorch's rendezvous, so the ranks agree on one.
    port = smp.allgather(_free_port(), smp.WORLD)[0]
    smp.shutdown()
    store = c10d.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    more = {"device_id": where} if device == "cuda" else {}
    c10d.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=ranks, **more)
    return where


def several_states(make: Callable[[], Step]) -> Step:
    """Calls `make`, which initializes `smp`, and returns its step, so that the step finds the state that `make` left in
    `smp.state`. A script has one such state; a bench has one for each of its variants.
    """
    smp.state.__dict__ = {}
    smp.state.__init__()
    own = smp.state.__dict__
    _states.append(own)
    step = make()

    def run(*arguments: Any) -> Any:
        smp.state.__dict__ = own
        return step(*arguments)

    return run


def close_states() -> None:
    """Ends what :func:`several_states` has initialized."""
    for each in _states:
        smp.state.__dict__ = each
        smp.shutdown()
    _states.clear()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait() -> None:
    """Waits for this rank's GPU and for the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    c10d.barrier()


def allocated() -> int:
    """Returns the bytes of this rank's GPU memory in use."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


class Rounds:
    """Runs variants in turns and prints a table, and for each pair of variants the ratio of their times in the same round
    (median, first and third quartile).

    Args:
        rounds: Number of turns of each variant.
        steps: Timed steps in a turn, after one step of warm-up.
        trace: Folder for a profile of one step of each variant on each rank.
    """

    def __init__(self, rounds: int, steps: int, trace: str | None = None) -> None:
        self.rounds, self.steps, self.trace = rounds, steps, trace

    def run(self, makers: Mapping[str, Callable[[], Step]], tokens: int, title: str) -> None:
        """Makes all variants, then times them.

        Args:
            makers: By name, the function that makes a variant.
            tokens: Tokens of a step, of all ranks together.
            title: The first line of the table.
        """
        steps: dict[str, Step] = {}
        kept: dict[str, int] = {}
        for name, make in makers.items():
            before = allocated()
            step = make()
            for _ in range(3):
                step()
            wait()
            gc.collect()
            steps[name], kept[name] = step, allocated() - before
        gc.freeze()
        times: dict[str, list[float]] = {name: [] for name in steps}
        hosts: dict[str, list[float]] = {name: [] for name in steps}
        peaks = dict.fromkeys(steps, 0)
        losses: dict[str, float] = {}
        names = list(steps)
        for turn in range(self.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                steps[name]()
                wait()
                start = time.perf_counter()
                for _ in range(self.steps):
                    loss = steps[name]()
                hosts[name].append((time.perf_counter() - start) / self.steps)
                wait()
                times[name].append((time.perf_counter() - start) / self.steps)
                losses[name] = float(loss)
                if torch.cuda.is_available():
                    others = sum(bytes_ for other, bytes_ in kept.items() if other != name)
                    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - others)
        if self.trace:
            self._profile(steps)
        every: list[Any] = [None] * c10d.get_world_size()
        c10d.all_gather_object(every, (times, hosts, peaks, losses))
        if c10d.get_rank() == 0:
            print(f"\n{title}, {self.rounds} rounds of {self.steps} steps")
            print(
                f"{'variant':34} {'tokens/s':>9} {'step ms':>8} {'min':>8} {'max':>8} {'host ms':>8}  peak GiB     loss"
            )
            for name in names:
                # The time of the slowest rank in each round.
                slowest = [max(each[0][name][at] for each in every) for at in range(self.rounds)]
                host = max(statistics.median(each[1][name]) for each in every)
                middle = statistics.median(slowest)
                loss = statistics.fmean(each[3][name] for each in every)
                memory = " ".join(f"{each[2][name] / 2**30:.2f}" for each in every)
                print(
                    f"{name:34} {tokens / middle:9,.0f} {middle * 1e3:8.2f} {min(slowest) * 1e3:8.2f} "
                    f"{max(slowest) * 1e3:8.2f} {host * 1e3:8.2f}  {memory:11}  {loss:.4f}",
                    flush=True,
                )
            # Rounds of a pair are neighbours in time, so their ratio varies less than either time.
            for name, other in itertools.combinations(names, 2):
                ratios = [
                    max(each[0][name][at] for each in every) / max(each[0][other][at] for each in every)
                    for at in range(self.rounds)
                ]
                low, middle, high = statistics.quantiles(ratios, n=4) if self.rounds > 1 else ratios * 3
                print(f"time of {name} / {other}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
        gc.unfreeze()

    def _profile(self, steps: Mapping[str, Step]) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        for name, step in steps.items():
            wait()
            with torch.profiler.profile(activities=activities) as profile:
                step()
                wait()
            os.makedirs(str(self.trace), exist_ok=True)
            profile.export_chrome_trace(f"{self.trace}/{name.replace(' ', '-')}-{c10d.get_rank()}.json")
