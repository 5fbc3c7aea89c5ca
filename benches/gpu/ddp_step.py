"""Time that data parallelism adds to a training step on GPUs, compared with PyTorch's DistributedDataParallel.

    smdrun -n 4 benches/gpu/ddp_step.py --cases 124M:8 350M:1 1.5B:2 124M:32 --rounds 5
    smdrun -n 4 benches/gpu/ddp_step.py --cases 1.5B:2 --copies
    smdrun -n 2 benches/gpu/ddp_step.py --cases hf-124M:8 hf-350M:4 hf-774M:2:compile --horovod

Every round runs every variant once, in a different order each time: warm-up steps, then timed steps between two
synchronizations of all ranks. A step is forward, backward and fused SGD, under bf16 autocast. The exposed time of a
variant is its step minus that without communication in the same round. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as c10d
from copies import Copies
from models import CONTEXT, LLAMA_VOCABULARY, make

import smdistributed.dataparallel.torch.distributed as dist
from horovod.torch import planned_reducer
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as OurDDP

TorchDDP = torch.nn.parallel.DistributedDataParallel

TORCH_VARIANTS = {
    "torch 25": {"bucket_cap_mb": 25},
    "torch view 25": {"bucket_cap_mb": 25, "gradient_as_bucket_view": True},
    "torch view static 25": {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": True},
    "torch view 100": {"bucket_cap_mb": 100, "gradient_as_bucket_view": True},
    "torch view static 100": {"bucket_cap_mb": 100, "gradient_as_bucket_view": True, "static_graph": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["124M:8", "350M:1", "1.5B:2"],
        help="[hf-]size:batch[:compile] or hf-llama:batch[:compile]; hf: the model of transformers",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ours", nargs="+", type=float, default=[0], help="bucket sizes in MiB; 0 is the default")
    parser.add_argument("--local", action="store_true", help="also this library's DDP in a group of one rank")
    parser.add_argument(
        "--copies", action="store_true", help="also a lower bound for an all-reduce by copy engines (copies.py)"
    )
    parser.add_argument("--horovod", action="store_true", help="also horovod.torch.DistributedOptimizer")
    parser.add_argument("--torch", nargs="+", default=list(TORCH_VARIANTS), choices=list(TORCH_VARIANTS))
    parser.add_argument("--trace", help="write a profile of one step of each variant into this folder")
    arguments = parser.parse_args()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    c10d.init_process_group(
        "nccl", rank=rank, world_size=size, device_id=torch.device("cuda", torch.cuda.current_device())
    )
    if rank == 0:
        print(
            f"{size} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}"
        )
    torch._dynamo.config.optimize_ddp = False
    if arguments.trace:
        os.makedirs(arguments.trace, exist_ok=True)
    for case in arguments.cases:
        measure(case, arguments, rank)
    c10d.destroy_process_group()


def measure(case: str, arguments: argparse.Namespace, rank: int) -> None:
    """Runs one model in all variants and prints a table."""
    name, batch, *how = case.split(":")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make(name)
    if "compile" in how:
        for block in model.blocks:
            block.compile()
    tokens = torch.randint(0, LLAMA_VOCABULARY, (int(batch), CONTEXT + 1), device="cuda")
    variants = {"alone": lambda: model}
    for mib in arguments.ours:
        variants[f"ours {mib:g}" if mib else "ours"] = lambda mib=mib: OurDDP(
            model, device_ids=[torch.cuda.current_device()], bucket_cap_mb=mib or None
        )
    if arguments.local:
        # Every rank must take part in creating every group.
        own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
        variants["ours, local"] = lambda: OurDDP(model, device_ids=[torch.cuda.current_device()], process_group=own)
    if arguments.copies:
        variants["copies"] = lambda: Copies(model, staged=False)
        variants["copies, staged"] = lambda: Copies(model, staged=True)
    if arguments.horovod:
        variants["horovod.torch"] = lambda: Horovod(model)
    for variant in arguments.torch:
        variants[variant] = lambda variant=variant: TorchDDP(
            model, device_ids=[torch.cuda.current_device()], **TORCH_VARIANTS[variant]
        )
    names = list(variants)
    times: dict[str, list[float]] = {variant: [] for variant in names}
    peaks: dict[str, float] = {}
    for turn in range(arguments.rounds):
        for variant in names[turn % len(names) :] + names[: turn % len(names)]:
            torch.cuda.reset_peak_memory_stats()
            wrapped = variants[variant]()
            trace = arguments.trace if turn == arguments.rounds - 1 and rank == 0 else None
            times[variant].append(
                timed(wrapped, model, tokens, arguments, trace and f"{trace}/{name}-{batch}-{variant}.json")
            )
            peaks[variant] = max(peaks.get(variant, 0), torch.cuda.max_memory_allocated() / 2**30)
            if isinstance(wrapped, Copies):
                wrapped.close()
            del wrapped
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
    report(case, times, peaks, rank)


class Horovod:
    """A model that Horovod's optimizer trains."""

    def __init__(self, model: torch.nn.Module) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.model, self.hvd = model, hvd

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs)

    def optimizer(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap the optimizer."""
        return self.hvd.DistributedOptimizer(inner, self.model.named_parameters())

    @staticmethod
    def await_plan(optimizer: torch.optim.Optimizer, step: Callable[[], None], limit: int = 200) -> None:
        """Steps until a thread of the core has made the reducer, which is part of no steady step."""
        for _ in range(limit):
            step()
            # The same on all ranks.
            if optimizer._planned_reducer.vote_result == planned_reducer.PLANNED:
                break
        else:
            raise RuntimeError(f"no step of {limit} was reduced by plan")
        for _ in range(3):
            step()


def timed(wrapped, model, tokens: torch.Tensor, arguments: argparse.Namespace, trace: str | None) -> float:
    """Returns the milliseconds of a step on the slowest rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
    if isinstance(wrapped, Horovod):
        optimizer = wrapped.optimizer(optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = wrapped(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()

    for _ in range(arguments.warmup):
        step()
    if isinstance(wrapped, Horovod):
        wrapped.await_plan(optimizer, step)
    c10d.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    torch.cuda.synchronize()
    spent = torch.tensor([(time.perf_counter() - start) / arguments.steps * 1e3], device="cuda")
    c10d.all_reduce(spent, c10d.ReduceOp.MAX)
    if trace:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step()
            torch.cuda.synchronize()
        profile.export_chrome_trace(trace)
    elif arguments.trace:
        step()
    if isinstance(wrapped, Horovod):
        # Otherwise the hooks would stay on the parameters, which the next variant trains.
        for hook in optimizer._hooks:
            hook.remove()
    return spent.item()


def report(case: str, times: dict[str, list[float]], peaks: dict[str, float], rank: int) -> None:
    if rank != 0:
        return
    alone = times["alone"]
    exposed = {
        variant: [value - base for value, base in zip(values, alone, strict=True)] for variant, values in times.items()
    }
    best = min(statistics.median(values) for name, values in exposed.items() if name.startswith("torch"))
    print(f"\n{case}: alone {statistics.median(alone):.1f} ms ({min(alone):.1f} to {max(alone):.1f})")
    print(f"{'variant':24}{'step ms':>9}{'exposed':>9}{'min':>8}{'max':>8}{'of best':>9}{'peak GiB':>10}")
    for variant, values in exposed.items():
        middle = statistics.median(values)
        print(
            f"{variant:24}{statistics.median(times[variant]):9.2f}{middle:9.2f}{min(values):8.2f}{max(values):8.2f}"
            f"{middle / best:9.2f}{peaks[variant]:10.3f}"
        )
    print(
        "JSON " + json.dumps({"case": case, "times": {k: [round(v, 2) for v in vs] for k, vs in times.items()}}),
        flush=True,
    )


if __name__ == "__main__":
    main()
