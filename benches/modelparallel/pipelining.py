"""Tokens per second of pipelines, compared with torch.distributed.pipelining on the same model.

    smdrun -n 4 benches/modelparallel/pipelining.py --microbatch 2

One process holds all pipelines. Each round trains a few steps of every pipeline in turn, so that other load on the
machine affects all alike. All have the same model (the modules of `blocks.py`), AdamW, and bf16 autocast around the
whole step, so that both libraries can cast a weight once per step.

The blocks are distributed evenly over the ranks, or (``cut``) as ``--cut`` says, or (``auto``) by `auto_partition`,
whose result is printed. With ``--halves`` the units are halves of blocks. ``ZB2`` is zero bubble with twice as many
active microbatches as ranks.

``memory`` is the peak of a rank without the parameters and optimizer states of the other pipelines.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from blocks import Shape, build, chunk_of, loss_of
from torch import nn
from torch.distributed import pipelining

import smdistributed.modelparallel.torch as smp


@dataclass(frozen=True)
class ScheduleOptions:
    """A schedule and how the model is partitioned for it: into ``pieces`` for each rank, evenly or as ``--cut`` says,
    or by `auto_partition`.
    """

    schedule: Any
    pieces: int = 1
    cut: bool = False
    auto: bool = False
    #: Number of active microbatches, as a multiple of the ranks.
    active: int | None = None


OURS = {
    "ours 1F1B": ScheduleOptions("interleaved"),
    "ours GPipe": ScheduleOptions("simple"),
    "ours ZB": ScheduleOptions("zero_bubble"),
    "ours ZB2": ScheduleOptions("zero_bubble", active=2),
    "ours 1F1B x2": ScheduleOptions("interleaved", pieces=2),
    "ours ZBV": ScheduleOptions("zero_bubble", pieces=2),
    "ours 1F1B cut": ScheduleOptions("interleaved", cut=True),
    "ours ZB cut": ScheduleOptions("zero_bubble", cut=True),
    "ours ZB2 cut": ScheduleOptions("zero_bubble", cut=True, active=2),
    "ours ZBV cut": ScheduleOptions("zero_bubble", pieces=2, cut=True),
    "ours 1F1B auto": ScheduleOptions("interleaved", auto=True),
    "ours ZB auto": ScheduleOptions("zero_bubble", auto=True),
    "ours ZB2 auto": ScheduleOptions("zero_bubble", auto=True, active=2),
}
THEIRS = {
    "torch 1F1B": ScheduleOptions(pipelining.Schedule1F1B),
    "torch GPipe": ScheduleOptions(pipelining.ScheduleGPipe),
    "torch 1F1B x2": ScheduleOptions(pipelining.ScheduleInterleaved1F1B, pieces=2),
    "torch ZB x2": ScheduleOptions(pipelining.ScheduleInterleavedZeroBubble, pieces=2),
    "torch ZBV": ScheduleOptions(pipelining.ScheduleZBVZeroBubble, pieces=2),
    "torch 1F1B cut": ScheduleOptions(pipelining.Schedule1F1B, cut=True),
    "torch ZBV cut": ScheduleOptions(pipelining.ScheduleZBVZeroBubble, pieces=2, cut=True),
}


@dataclass
class TrainedPipeline:
    """A pipeline: the function that runs a step, and the tensors that it keeps between steps."""

    step: Callable[[torch.Tensor, torch.Tensor], Any]
    optimizer: torch.optim.Optimizer
    parameters: list[torch.Tensor]

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        tensors = [item for state in states for item in state.values() if isinstance(item, torch.Tensor)]
        return sum(tensor.nbytes for tensor in [*self.parameters, *tensors])


class Bench:
    """Makes the pipelines of this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(
            arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None
        )
        self.shape = Shape(
            arguments.width,
            arguments.blocks,
            arguments.heads,
            arguments.vocabulary,
            arguments.sequence,
            arguments.halves,
        )
        self.ranks = int(os.environ["WORLD_SIZE"])
        self.contexts: dict[str, dict[str, Any]] = {}

    def chunks(self, options: ScheduleOptions) -> list[int]:
        """Returns the piece of each module. The embedding is in the piece of the first block, the head in that of the
        last.
        """
        if not options.cut:
            return [chunk_of(place, self.shape, options.pieces * self.ranks) for place in range(self.shape.middle + 2)]
        blocks = self.arguments.cut if options.pieces == 1 else self.arguments.cut_there_and_back
        cuts = [piece for piece, count in enumerate(blocks) for _ in range(count)]
        if len(cuts) != self.shape.middle or len(blocks) != options.pieces * self.ranks:
            raise SystemExit(
                f"expected {options.pieces * self.ranks} pieces with {self.shape.middle} modules in all, got {blocks}"
            )
        return [*cuts[:1], *cuts, *cuts[-1:]]

    def ours(self, name: str) -> TrainedPipeline:
        """Makes a pipeline of this library. A script has one configuration and one model; the state of `smp` is saved
        and restored for each pipeline.
        """
        options = OURS[name]
        smp.state.__dict__ = {}
        smp.state.__init__()
        config = {"partitions": self.ranks, "microbatches": self.arguments.microbatches, "pipeline": options.schedule}
        if options.active:
            config["active_microbatches"] = options.active * self.ranks
        if options.auto:
            smp.init({**config, "memory_weight": self.arguments.memory_weight})
        else:
            smp.init({**config, "auto_partition": False, "default_partition": 0})
        self.seed()
        with smp.delay_param_initialization():
            model = build_meta(self.shape)
        v_form = options.schedule == "zero_bubble" and options.pieces == 2
        for chunk, module in () if options.auto else zip(self.chunks(options), model, strict=True):
            rank_in_v = min(chunk, 2 * self.ranks - 1 - chunk)
            smp.set_partition(module, rank_in_v if v_form else chunk % self.ranks)
        model = smp.DistributedModel(model)
        if options.auto:
            model.register_post_partition_hook(self.print_partition)
        trained = TrainedPipeline(lambda *_: None, None, [])  # type: ignore[arg-type]

        @smp.step
        def step(model: Any, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = loss_of(model(tokens_BT), targets_BT)
            model.backward(loss)
            return loss

        def train(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> Any:
            smp.state.__dict__ = self.contexts[name]
            loss = step(model, tokens_BT, targets_BT)
            if trained.optimizer is None:
                self.fill(model.module)
                trained.parameters = list(model.local_parameters())
                trained.optimizer = self.adam(trained.parameters)
            else:
                trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss.reduce_mean()

        trained.step = train
        self.contexts[name] = smp.state.__dict__
        return trained

    def print_partition(self, model: Any, _: Any) -> None:
        """Prints the modules of each rank. A module whose parts are on several ranks counts for each."""
        found: list[list[str]] = [[] for _ in range(self.ranks)]
        for place, module in enumerate(model.module):
            for rank in sorted({model.placement.of(part) for part in module.modules()}):
                found[rank].append(str(place))
        if smp.rank() == 0:
            each = [f"{names[0]} to {names[-1]} ({len(names)})" for names in found]
            print(f"of {self.shape.middle + 2} modules each rank has {', '.join(each)}", flush=True)

    def torch_pipeline(self, name: str) -> TrainedPipeline:
        """Makes a pipeline of torch.distributed.pipelining."""
        options, rank = THEIRS[name], c10d.get_rank()
        schedule, chunks, chunk = options.schedule, options.pieces * self.ranks, self.chunks(options)
        v_form = schedule is pipelining.ScheduleZBVZeroBubble
        mine = [rank, 2 * self.ranks - 1 - rank] if v_form else list(range(rank, chunks, self.ranks))
        whole = build_meta(self.shape)
        modules = []
        for index in mine:
            module = nn.Sequential(*(each for each, at in zip(whole, chunk, strict=True) if at == index))
            modules.append(module.to_empty(device=self.device))
            self.fill(modules[-1])
        rows, length = self.arguments.microbatch, self.shape.context
        tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
        between = torch.empty(rows, length, self.shape.width, device="meta")
        logits = torch.empty(rows, length, self.shape.vocabulary, dtype=torch.bfloat16, device="meta")
        stages = [
            pipelining.PipelineStage(
                module,
                index,
                chunks,
                self.device,
                input_args=tokens if index == 0 else between,
                output_args=logits if index == chunks - 1 else between,
            )
            for index, module in zip(mine, modules, strict=True)
        ]
        arguments = {"n_microbatches": self.arguments.microbatches, "loss_fn": loss_of}
        plan = schedule(stages[0] if options.pieces == 1 else stages, **arguments)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = self.adam(parameters)
        first, last = 0 in mine, chunks - 1 in mine

        def train(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> Any:
            losses: list[torch.Tensor] = []
            with torch.autocast(self.device.type, torch.bfloat16):
                plan.step(
                    *([tokens_BT] if first else []),
                    target=targets_BT if last else None,
                    losses=losses if last else None,
                    return_outputs=False,
                )
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).detach().mean() if last else None

        return TrainedPipeline(train, optimizer, parameters)

    def adam(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.device.type == "cuda")

    def seed(self) -> None:
        torch.manual_seed(0)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Fills parameters with values that depend on their names only, so that they are equal in all pipelines."""
        for name, parameter in module.named_parameters():
            if type(parameter) is not nn.Parameter:
                continue
            if parameter.dim() > 1:
                kind = name.partition(".")[2]
                generator = torch.Generator(self.device).manual_seed(sum(map(ord, kind)))
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)

    def barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        c10d.barrier()


def build_meta(shape: Shape) -> nn.Sequential:
    """Makes the model on the meta device."""
    return build(shape, "meta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=[*OURS, *THEIRS], default=["ours 1F1B", "torch 1F1B"])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=2, help="sequences in each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps of each pipeline in a round, after one step of warm-up"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, value in (("width", 2048), ("blocks", 32), ("heads", 16), ("vocabulary", 50_304), ("sequence", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--halves", action="store_true", help="also allow cuts between attention and feed-forward network"
    )
    parser.add_argument("--cut", type=int, nargs="+", default=[9, 9, 8, 6], help="blocks of each rank, for `cut`")
    parser.add_argument(
        "--cut-there-and-back",
        type=int,
        nargs="+",
        default=[3, 5, 5, 4, 4, 4, 4, 3],
        help="blocks of each piece, for `ZBV cut`: the last rank has the two pieces in the middle",
    )
    parser.add_argument(
        "--memory-weight", type=float, default=0.0, help="for `auto`: 0.2 is `optimize: speed`, 0.8 memory"
    )
    parser.add_argument("--profile", metavar="MODE", help="print a profile of the host in steps of this mode")
    parser.add_argument(
        "--trace", metavar="FOLDER", help="write a profile of one step of each mode and rank into this folder"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    smp.init({"partitions": int(os.environ["WORLD_SIZE"])})
    rank, ranks = smp.rank(), smp.size()
    # `smdrun` sets no address for PyTorch's rendezvous, so the ranks agree on a port.
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    port = smp.allgather(_free_port(), smp.WORLD)[0]
    store = c10d.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    c10d.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device)
    bench = Bench(arguments)
    rows = arguments.microbatches * arguments.microbatch
    generator = torch.Generator().manual_seed(1)
    tokens_BT, targets_BT = (
        torch.randint(arguments.vocabulary, (rows, arguments.sequence), generator=generator).to(bench.device)
        for _ in range(2)
    )
    trained: dict[str, TrainedPipeline] = {}
    losses: dict[str, float] = {}
    for name in arguments.modes:
        start = time.perf_counter()
        trained[name] = (bench.ours if name in OURS else bench.torch_pipeline)(name)
        # In this library's first step, parameters get their memory.
        for _ in range(3 + (name in OURS)):
            loss = trained[name].step(tokens_BT, targets_BT)
        losses[name] = float(loss) if loss is not None else float("nan")
        bench.barrier()
        if rank == ranks - 1:
            print(f"{name}: ready after {time.perf_counter() - start:.1f} s, loss {losses[name]:.5f}", flush=True)
    # Garbage collections within the rounds must not scan the objects of the pipelines.
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in trained}
    peaks: dict[str, int] = dict.fromkeys(trained, 0)
    for _ in range(arguments.rounds):
        for name, each in trained.items():
            others = sum(other.state_bytes() for other in trained.values() if other is not each)
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            each.step(tokens_BT, targets_BT)
            bench.barrier()
            start = time.perf_counter()
            for _ in range(arguments.steps):
                each.step(tokens_BT, targets_BT)
            bench.barrier()
            times[name].append((time.perf_counter() - start) / arguments.steps)
            if bench.device.type == "cuda":
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - others)
    every = [None] * ranks
    c10d.all_gather_object(every, peaks)
    if rank == 0:
        tokens = rows * arguments.sequence
        print(
            f"{ranks} ranks, {arguments.microbatches} microbatches of {arguments.microbatch} x {arguments.sequence}, {arguments.rounds} rounds"
        )
        print("pipeline             tokens/s  (worst .. best round)     ms    memory of each rank, GiB")
        for name, found in times.items():
            rates = sorted(tokens / seconds for seconds in found)
            memory = " ".join(f"{each[name] / 2**30:.3f}" for each in every)
            middle = statistics.median(found)
            print(
                f"{name:18} {tokens / middle:10,.0f}  ({rates[0]:,.0f} .. {rates[-1]:,.0f})  {1e3 * middle:7.1f}  {memory}"
            )
        print("JSON", json.dumps(times))
    if arguments.trace:
        for name, each in trained.items():
            bench.barrier()
            with torch.profiler.profile() as profile:
                each.step(tokens_BT, targets_BT)
                bench.barrier()
            profile.export_chrome_trace(f"{arguments.trace}/{name.replace(' ', '-')}-{rank}.json")
    if arguments.profile:
        _profile(trained[arguments.profile], tokens_BT, targets_BT, rank)
    bench.barrier()
    c10d.destroy_process_group()


def _profile(trained: TrainedPipeline, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, rank: int) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(5):
        trained.step(tokens_BT, targets_BT)
    profile.disable()
    if rank == 0:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
