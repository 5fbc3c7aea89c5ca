"""Time that data parallelism adds to a training step on GPUs, compared with PyTorch's DistributedDataParallel.

    smdrun -n 4 benches/gpu/ddp_step.py --cases 124M:8 350M:1 1.5B:2 124M:32 --rounds 5
    smdrun -n 4 benches/gpu/ddp_step.py --cases 1.5B:2 --copies
    smdrun -n 2 benches/gpu/ddp_step.py --cases hf-124M:8 hf-350M:4 hf-774M:2:compile --horovod
    smdrun -n 2 benches/gpu/ddp_step.py --cases hf-124M:8 --together --rounds 60 --steps 3

Every round runs every variant once, in a different order each time: warm-up steps, then timed steps between two
synchronizations of all ranks. A step is forward, backward and fused SGD, under bf16 autocast. The exposed time of a
variant is its step minus that without communication in the same round. Figures are medians over rounds.

With --together, each variant trains a copy of the model that stays in memory, and is warmed up once. A round then
takes a second or less, so changes of the host's speed affect all variants of a round; memory is not compared.
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
    parser.add_argument("--together", action="store_true", help="keep all variants in memory, for many short rounds")
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

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = make(name)
        if "compile" in how:
            for block in model.blocks:
                block.compile()
        return model

    tokens = torch.randint(0, LLAMA_VOCABULARY, (int(batch), CONTEXT + 1), device="cuda")
    variants: dict[str, Callable[[torch.nn.Module], Callable]] = {"alone": lambda model: model}
    for mib in arguments.ours:
        variants[f"ours {mib:g}" if mib else "ours"] = lambda model, mib=mib: OurDDP(
            model, device_ids=[torch.cuda.current_device()], bucket_cap_mb=mib or None
        )
    if arguments.local:
        # Every rank must take part in creating every group.
        own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
        variants["ours, local"] = lambda model: OurDDP(
            model, device_ids=[torch.cuda.current_device()], process_group=own
        )
    if arguments.copies:
        variants["copies"] = lambda model: Copies(model, staged=False)
        variants["copies, staged"] = lambda model: Copies(model, staged=True)
    if arguments.horovod:
        variants["horovod.torch"] = lambda model: Horovod(model)
    for variant in arguments.torch:
        variants[variant] = lambda model, variant=variant: TorchDDP(
            model, device_ids=[torch.cuda.current_device()], **TORCH_VARIANTS[variant]
        )
    names = list(variants)
    times: dict[str, list[float]] = {variant: [] for variant in names}
    peaks: dict[str, float] = {}
    kept: dict[str, Training] = {}
    # With --together, each variant has a model of its own.
    model = None if arguments.together else build()
    if model is None:
        for variant in names:
            own = build()
            kept[variant] = Training(variants[variant](own), own, tokens, arguments.warmup)
    for turn in range(arguments.rounds):
        for variant in names[turn % len(names) :] + names[: turn % len(names)]:
            trace = arguments.trace if turn == arguments.rounds - 1 else None
            trace = trace and f"{trace}/{name}-{batch}-{variant}.json"
            if model is None:
                times[variant].append(kept[variant].timed(arguments.steps, trace, rank))
                continue
            torch.cuda.reset_peak_memory_stats()
            training = Training(variants[variant](model), model, tokens, arguments.warmup)
            times[variant].append(training.timed(arguments.steps, trace, rank))
            peaks[variant] = max(peaks.get(variant, 0), torch.cuda.max_memory_allocated() / 2**30)
            training.close()
            del training
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
    for training in kept.values():
        training.close()
    kept.clear()
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


class Training:
    """A model in one variant, with its optimizer."""

    def __init__(self, wrapped: Callable, model: torch.nn.Module, tokens: torch.Tensor, warmup: int) -> None:
        self.wrapped, self.tokens = wrapped, tokens
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
        if isinstance(wrapped, Horovod):
            self.optimizer = wrapped.optimizer(self.optimizer)
        for _ in range(warmup):
            self.step()
        if isinstance(wrapped, Horovod):
            wrapped.await_plan(self.optimizer, self.step)

    def step(self) -> None:
        """Forward, backward and update."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.wrapped(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()

    def timed(self, steps: int, trace: str | None, rank: int) -> float:
        """Milliseconds of a step on the slowest rank; then a profile of one step of the first rank, into *trace*."""
        c10d.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        spent = torch.tensor([(time.perf_counter() - start) / steps * 1e3], device="cuda")
        c10d.all_reduce(spent, c10d.ReduceOp.MAX)
        if trace and rank == 0:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                self.step()
                torch.cuda.synchronize()
            profile.export_chrome_trace(trace)
        elif trace:
            self.step()
        return spent.item()

    def close(self) -> None:
        """Free what the variant holds besides the model."""
        if isinstance(self.wrapped, Copies):
            self.wrapped.close()
        if isinstance(self.wrapped, Horovod):
            # Otherwise the hooks would stay on the parameters, which the next variant trains.
            for hook in self.optimizer._hooks:
                hook.remove()


def report(case: str, times: dict[str, list[float]], peaks: dict[str, float], rank: int) -> None:
    if rank != 0:
        return
    alone = times["alone"]
    exposed = {
        variant: [value - base for value, base in zip(values, alone, strict=True)] for variant, values in times.items()
    }
    best = min(statistics.median(values) for name, values in exposed.items() if name.startswith("torch"))
    print(f"\n{case}: alone {statistics.median(alone):.1f} ms ({min(alone):.1f} to {max(alone):.1f})")
    print(
        f"{'variant':24}{'step ms':>9}{'exposed':>9}{'q25':>8}{'q75':>8}{'min':>8}{'max':>8}{'of best':>9}{'peak GiB':>10}"
    )
    for variant, values in exposed.items():
        middle = statistics.median(values)
        low, high = quartiles(values)
        print(
            f"{variant:24}{statistics.median(times[variant]):9.2f}{middle:9.2f}{low:8.2f}{high:8.2f}"
            f"{min(values):8.2f}{max(values):8.2f}{middle / best:9.2f}"
            + (f"{peaks[variant]:10.3f}" if variant in peaks else f"{'-':>10}")
        )
    print(
        "JSON " + json.dumps({"case": case, "times": {k: [round(v, 2) for v in vs] for k, vs in times.items()}}),
        flush=True,
    )


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


if __name__ == "__main__":
    main()
