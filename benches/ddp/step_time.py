"""Communication time that data parallelism adds to a training step, compared with PyTorch's DDP over gloo.

    OMP_NUM_THREADS=1 smdrun -n 2 benches/ddp/step_time.py

Each round runs a few steps of every mode, one mode after the other, so that other load on the machine affects all
alike:

- `alone`: the model itself, in all processes at the same time, without communication.
- `opensmd`: DistributedDataParallel of this package.
- `gloo`: PyTorch's DDP with the gloo backend.
- `horovod`, if requested: `horovod.torch.DistributedOptimizer` of this package.

Exposed communication is the median step of a mode minus that of `alone`, each on the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed
from models import MODELS, batch
from torch import nn

import smdistributed.dataparallel.torch.distributed as smd
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

MODES = ("alone", "opensmd", "gloo")
OTHERS = ("horovod",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES + OTHERS, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps of each mode in a round")
    parser.add_argument("--bucket-cap-mb", type=float, default=None)
    parser.add_argument("--set-to-none", type=int, default=1, help="0: gradients are zeroed in place")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()

    smd.init_process_group()
    if "gloo" in arguments.modes:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {name: measure(name, arguments) for name in arguments.models}
    if smd.get_rank() == 0:
        print(f"{smd.get_world_size()} processes, {torch.get_num_threads()} thread(s) each, torch {torch.__version__}")
        for name, medians in results.items():
            print(table(name, medians))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(results, file)
    if "gloo" in arguments.modes:
        # A gloo thread that still works when the interpreter ends aborts the process.
        torch.distributed.destroy_process_group()


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the median step of each mode on the slowest rank, in milliseconds."""
    torch.manual_seed(0)
    base = MODELS[name]()
    data = batch(name, torch.Generator().manual_seed(smd.get_rank()))
    steps: dict[str, Callable[[], None]] = {}
    for mode in arguments.modes:
        model: nn.Module = copy.deepcopy(base)
        if mode == "opensmd":
            model = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_cap_mb)
        elif mode == "gloo":
            model = nn.parallel.DistributedDataParallel(
                model, bucket_cap_mb=arguments.bucket_cap_mb or 25, gradient_as_bucket_view=True
            )
        steps[mode] = step(model, data, bool(arguments.set_to_none), mode == "horovod")
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    gc.disable()
    for index in range(arguments.rounds + 1):
        for mode, run in steps.items():
            for at in range(arguments.steps + 1):
                smd.barrier()
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                # The first round and the first step after another mode are warm-up.
                if index > 0 and at > 0:
                    times[mode].append(elapsed * 1e3)
    gc.enable()
    medians = torch.tensor([statistics.median(times[mode]) for mode in steps], dtype=torch.float64)
    smd.all_reduce(medians, op=smd.ReduceOp.MAX)
    return dict(zip(steps, medians.tolist(), strict=True))


def step(
    model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], set_to_none: bool, horovod: bool
) -> Callable[[], None]:
    """Makes the optimizer of `model`; returns a function that runs one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if horovod:
        import horovod.torch as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    x, labels = data

    def run() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return run


def table(name: str, medians: dict[str, float]) -> str:
    """Formats the figures of a model."""
    lines = [f"{name}:"]
    for mode, milliseconds in medians.items():
        line = f"  {mode:8} {milliseconds:8.1f} ms a step"
        if mode != "alone" and "alone" in medians:
            line += f", {milliseconds - medians['alone']:+7.1f} ms exposed"
        lines.append(line)
    for mode in ("opensmd", "horovod"):
        if {"alone", "gloo", mode} <= set(medians):
            ours, others = (medians[each] - medians["alone"] for each in (mode, "gloo"))
            # Noise makes a step with communication the faster one now and then.
            ratio = f"{ours / others:.2f}" if min(ours, others) > 0 else "none, as a time is negative"
            lines.append(f"  exposed, {mode} / gloo: {ratio}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
