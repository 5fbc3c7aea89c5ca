"""The cost of the timeline: the same training steps with and without `SMD_TIMELINE`.

    OMP_NUM_THREADS=1 smdrun -n 2 benches/ddp/timeline.py

Rounds alternate: each leaves the job, switches the timeline on or off, and joins again. Small buckets make more events
than usual, so the figure is an upper bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from models import MODELS, batch
from torch import nn

import smdistributed.dataparallel.torch.distributed as smd
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="steps in a round")
    parser.add_argument("--bucket-cap-mb", type=float, default=1)
    arguments = parser.parse_args()

    path = Path(tempfile.gettempdir()) / f"smd-timeline-{os.getppid()}.json"
    times: dict[bool, list[float]] = {False: [], True: []}
    events = 0
    rank = 0
    for index in range(arguments.rounds + 1):
        for traced in (False, True):
            os.environ.pop("SMD_TIMELINE", None)
            if traced:
                os.environ["SMD_TIMELINE"] = str(path)
            smd.init_process_group()
            rank = smd.get_rank()
            elapsed = steps(arguments)
            smd.barrier()
            smd.destroy_process_group()
            if index > 0:
                times[traced] += elapsed
            if traced and rank == 0:
                events = path.read_text().count('"ph":"X"')
    if rank == 0:
        off, on = (statistics.median(times[traced]) for traced in (False, True))
        per_step = events / (2 * (arguments.steps + WARM_UP))
        print(f"{arguments.model}: {off:.2f} ms a step without the timeline, {on:.2f} ms with it ({on / off - 1:+.2%})")
        print(f"{per_step:.0f} events a step and rank")
        path.unlink()


def steps(arguments: argparse.Namespace) -> list[float]:
    """Returns the milliseconds of each training step of a new replica."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MODELS[arguments.model](), bucket_cap_mb=arguments.bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = batch(arguments.model, torch.Generator().manual_seed(smd.get_rank()))
    elapsed = []
    for _ in range(WARM_UP + arguments.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        elapsed.append((time.perf_counter() - start) * 1e3)
    return elapsed[WARM_UP:]


if __name__ == "__main__":
    main()
