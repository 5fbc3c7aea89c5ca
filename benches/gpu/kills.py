"""Time from a `kill -9` of one rank, in the middle of training on GPUs, until each other rank has an error that names it.

    python benches/gpu/kills.py --ranks 4
    python benches/gpu/kills.py --ranks 8 --jobs pipeline sharded --rounds 3

Each round starts a job, waits until all ranks have trained a few steps, and kills a random rank. A rank that has no
such error within the limit, or whose error does not name the killed rank, ends the bench with an error.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: Seconds until the first steps of a job, and from a kill until the errors of the other ranks.
START_LIMIT, LIMIT = 180, 10
WIDTH = 1024


def main() -> None:
    """The command line. A job's rank is this script with ``--rank-of``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rank-of", choices=list(JOBS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        train(arguments.rank_of, arguments.device)
        return
    print(f"{'job':28} {'errors after, median':>20} {'latest':>8} {'processes ended':>15}", flush=True)
    for job in arguments.jobs:
        noticed, ended = [], []
        for _ in range(arguments.rounds):
            each = run_round(job, arguments.ranks, arguments.device)
            noticed += each[0]
            ended += each[1]
        print(f"{job:28} {statistics.median(noticed):18.2f} s {max(noticed):6.2f} s {max(ended):13.2f} s", flush=True)


def run_round(job: str, size: int, device: str) -> tuple[list[float], list[float]]:
    """Runs a job and kills a rank; returns, for each other rank, the seconds until its error and until its end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank-of", job, "--device", device]
    ranks = [
        subprocess.Popen(
            command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            if _line(rank, START_LIMIT) != "training":
                raise RuntimeError(f"{job}: a rank ended before it trained")
        time.sleep(random.uniform(0.0, 0.2))
        victim = random.randrange(size)
        killed = time.monotonic()
        ranks[victim].send_signal(signal.SIGKILL)
        noticed, ended = [], []
        for index, rank in enumerate(ranks):
            if index == victim:
                continue
            when, _, error = _line(rank, LIMIT + 20).partition(" ")
            if not error or f"rank {victim} " not in f"{error} " or float(when) - killed > LIMIT:
                raise RuntimeError(f"{job}: rank {index} does not name rank {victim}, which was killed: {error}")
            noticed.append(float(when) - killed)
        for index, rank in enumerate(ranks):
            if index != victim:
                rank.wait(60)
                ended.append(time.monotonic() - killed)
        return noticed, ended
    finally:
        for rank in ranks:
            rank.kill()


def _line(rank: subprocess.Popen, limit: float) -> str:
    """Returns the next line of a rank, or an empty text if it ends or the limit is over."""
    clock = threading.Timer(limit, rank.kill)
    clock.start()
    try:
        return rank.stdout.readline().strip()
    finally:
        clock.cancel()


def train(job: str, device: str) -> None:
    """Trains until there is an error, and prints its time and text in one line."""
    import torch

    if device == "cuda":
        local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if devices < int(os.environ["LOCAL_WORLD_SIZE"]):
            os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
        torch.cuda.set_device(local_rank % devices)
    step = JOBS[job](torch.device(device))
    try:
        number = 0
        while True:
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            number += 1
            if number == 10:
                print("training", flush=True)
    except Exception as error:  # Whichever it is: the parent checks that its text names the killed rank.
        text = " ".join(str(error).split())
        print(time.monotonic(), text, flush=True)
        raise SystemExit(1) from None


def _layers() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(16)))


def _ddp(device: Any) -> Callable[[], None]:
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    model = DistributedDataParallel(_layers().to(device))
    x = torch.ones(64, WIDTH, device=device)
    return lambda: model(x).square().mean().backward()


def _horovod(device: Any) -> Callable[[], None]:
    import torch

    import horovod.torch as hvd

    hvd.init()
    model = _layers().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), named_parameters=model.named_parameters()
    )
    x = torch.ones(64, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _smp(settings: dict[str, Any], device: Any) -> Callable[[], None]:
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "microbatches": 4, "sdp_param_persistence_threshold": 10_000, **settings})
    with smp.tensor_parallelism(settings.get("tensor_parallel_degree", 1) > 1):
        module = _layers().to(device)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    x = torch.ones(64, WIDTH, device=device)

    @smp.step
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def step() -> None:
        optimizer.zero_grad()
        run(model, x)
        optimizer.step()

    return step


def _ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


JOBS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "ddp": _ddp,
    "horovod": _horovod,
    "pipeline": lambda device: _smp({"partitions": _ranks()}, device),
    "pipeline 2, data": lambda device: _smp({"partitions": 2}, device),
    "tensor 2, data": lambda device: _smp({"tensor_parallel_degree": 2}, device),
    "tensor 2, pipeline 2, data": lambda device: _smp({"tensor_parallel_degree": 2, "partitions": 2}, device),
    "sharded": lambda device: _smp({"sharded_data_parallel_degree": _ranks()}, device),
    "sharded, replicas": lambda device: _smp({"sharded_data_parallel_degree": _ranks() // 2}, device),
}


if __name__ == "__main__":
    main()
