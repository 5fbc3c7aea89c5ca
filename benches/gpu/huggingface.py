"""Tokens per second of `smp.step` on models of Hugging Face, compared with PyTorch's Schedule1F1B.

    smdrun -n 2 benches/gpu/huggingface.py --families llama mistral qwen2
    smdrun -n 4 benches/gpu/huggingface.py --families llama gpt2 --pipelines interleaved zero_bubble
    smdrun -n 2 benches/gpu/huggingface.py --families llama gpt2_dropout --autocast

Models have transformers' defaults, about a billion parameters, bfloat16 and AdamW. With ``--autocast``, parameters are
float32, and steps run under autocast with bfloat16. This library partitions them with
`auto_partition`. PyTorch's stages are cut by hand and have as many layers each (the first ones one more where the
number is no multiple): the first also has the embedding, the last also the norm and the head. A head that shares its
weight with the embedding (gemma, gpt2) gets a weight of its own there, so the losses differ.

All pipelines train in one process, in turns, so that other load on the machine affects all alike. ``memory`` is the
peak of each rank without the memory that the other pipelines keep, and with what CUDA graphs keep. ``host`` is the
time until the call of a step returns; where it is less than the step's time, the GPUs are the bottleneck. If there are
fewer GPUs than ranks, ranks share a GPU, and only ``host`` is meaningful.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as c10d
from rounds import close_states, several_states, start, wait
from torch import nn
from torch.distributed import pipelining
from transformers import AutoConfig, AutoModelForCausalLM

import smdistributed.modelparallel.torch as smp

_DECODER = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {**_DECODER, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 64},
    "gemma": {**_DECODER, "head_dim": 64},
    "gemma2": {**_DECODER, "head_dim": 64},
    "phi3": _DECODER,
    "stablelm": _DECODER,
    "olmo2": _DECODER,
    "gpt2": {"n_embd": 1280, "n_layer": 36, "n_head": 20, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    #: With the dropout of its defaults.
    "gpt2_dropout": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "mixtral": {**_EXPERTS, "intermediate_size": 3584, "num_local_experts": 8},
    "qwen2_moe": {
        **_EXPERTS,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 16,
    },
}


class Stage(nn.Module):
    """One of equal parts of the layers of a causal language model. The first part also has the embedding, the last the
    norm and the head.
    """

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        self.model, self.is_first = model, index == 0
        base = model.base_model
        name = "layers" if hasattr(base, "layers") else "h"
        layers = getattr(base, name)
        start, end = (-(-len(layers) * place // count) for place in (index, index + 1))
        setattr(base, name, layers[start:end])
        model.config.num_hidden_layers = len(getattr(base, name))
        if index < count - 1:
            for owner, part in ((base, "norm"), (base, "ln_f"), (model, "lm_head")):
                if hasattr(owner, part):
                    setattr(owner, part, nn.Identity())
        else:
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone())
        if index > 0:
            base.set_input_embeddings(nn.Embedding(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps token ids to hidden states, or hidden states to logits."""
        arguments = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        return self.model(**arguments, use_cache=False).logits


def loss_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def graph_pools() -> dict[tuple[int, int], int]:
    """The memory pools of CUDA graphs, with the bytes of each that no tensor has at present. The allocator does not
    count these as allocated, although nothing else can use them.
    """
    unused: dict[tuple[int, int], int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = segment["segment_pool_id"]
        if pool != (0, 0):
            unused[pool] = unused.get(pool, 0) + segment["total_size"] - segment["allocated_size"]
    return unused


class Bench:
    """Makes and runs the pipelines of one model family."""

    def __init__(self, family: str, arguments: argparse.Namespace) -> None:
        self.family, self.arguments = family, arguments
        self.rank, self.device = c10d.get_rank(), torch.device("cuda", torch.cuda.current_device())
        kind = family.removesuffix("_dropout")
        self.config = AutoConfig.for_model(kind, **FAMILIES[family])

    def model(self) -> nn.Module:
        """Makes the whole model. Initial values are drawn on the GPU, which takes seconds instead of a minute on the
        host.
        """
        torch.manual_seed(0)
        with self.device:
            # Each model needs its own configuration: the forward of most models reads the number of layers from it,
            # which a stage changes.
            return AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=self.dtype).train()

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters, and of what stages of PyTorch pass on: autocast keeps the sums of layers in float32."""
        return torch.float32 if self.arguments.autocast else torch.bfloat16

    def autocast(self) -> torch.autocast:
        """The region in which a step runs."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.arguments.autocast)

    def ours(self, pipeline: str) -> Callable[..., Any]:
        """Makes a pipeline of this library; returns its step."""
        schedule, *options = pipeline.split("+")
        schedule, _, active = schedule.partition("/")
        smp.init({
            "partitions": c10d.get_world_size(), "microbatches": self.arguments.microbatches,
            "pipeline": schedule, "active_microbatches": int(active) if active else None,
            "memory_weight": self.arguments.memory_weight, "cuda_graphs": "graphs" in options,
            # The option would change the partition, too.
            **({"optimize": "speed", "memory_weight": self.arguments.memory_weight or 0.0} if "speed" in options else {}),
        })  # fmt: skip
        model = smp.DistributedModel(self.model())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

        @smp.step
        def step(model: Any, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
            with self.autocast():
                loss = loss_of(model(input_ids=ids_BT).logits, targets_BT)
            model.backward(loss)
            return loss

        def train(ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = step(model, ids_BT, targets_BT).reduce_mean()
            optimizer.step()
            return loss

        return train

    def torch_pipeline(self) -> Callable[..., Any]:
        """Makes a pipeline of PyTorch; returns its step."""
        ranks = c10d.get_world_size()
        first, last = self.rank == 0, self.rank == ranks - 1
        module = Stage(self.model(), self.rank, ranks).to(self.device)
        rows, length = self.arguments.microbatch, self.arguments.sequence
        between = torch.empty(rows, length, self.config.hidden_size, dtype=self.dtype, device="meta")
        ids = torch.empty(rows, length, dtype=torch.long, device="meta")
        logits = torch.empty(rows, length, self.config.vocab_size, dtype=torch.bfloat16, device="meta")
        stage = pipelining.PipelineStage(
            module, self.rank, ranks, self.device, input_args=ids if first else between,
            output_args=logits if last else between,
        )  # fmt: skip
        schedule = pipelining.Schedule1F1B(stage, n_microbatches=self.arguments.microbatches, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

        def train(ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> Any:
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            with self.autocast():
                schedule.step(
                    *([ids_BT] if first else []), target=targets_BT if last else None, losses=losses if last else None,
                    return_outputs=False,
                )  # fmt: skip
            optimizer.step()
            return torch.stack(losses).detach().mean() if losses else None

        return train

    def run(self) -> list[str]:
        """Trains with all pipelines and returns lines of the table."""
        rows = self.arguments.microbatches * self.arguments.microbatch
        generator = torch.Generator().manual_seed(1)
        shape = (rows, self.arguments.sequence)
        ids, targets = (
            torch.randint(3, self.config.vocab_size, shape, generator=generator).to(self.device) for _ in range(2)
        )
        makers = {name: lambda name=name: several_states(lambda: self.ours(name)) for name in self.arguments.pipelines}
        steps: dict[str, Callable[..., Any]] = {}
        losses: dict[str, float] = {}
        kept, first, pools = {}, {}, {}
        for name, make in {**makers, "torch 1F1B": self.torch_pipeline}.items():
            before, others = torch.cuda.memory_allocated(), graph_pools().keys()
            begin = time.perf_counter()
            steps[name] = make()
            for _ in range(3):
                steps[name](ids, targets)
            wait()
            first[name] = time.perf_counter() - begin
            gc.collect()
            kept[name] = torch.cuda.memory_allocated() - before
            pools[name] = graph_pools().keys() - others
        gc.freeze()
        times: dict[str, list[float]] = {name: [] for name in steps}
        hosts: dict[str, list[float]] = {name: [] for name in steps}
        peaks = dict.fromkeys(steps, 0)
        names = list(steps)
        for turn in range(self.arguments.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                step = steps[name]
                torch.cuda.reset_peak_memory_stats()
                step(ids, targets)
                wait()
                begin = time.perf_counter()
                for _ in range(self.arguments.steps):
                    loss = step(ids, targets)
                hosts[name].append((time.perf_counter() - begin) / self.arguments.steps)
                wait()
                times[name].append((time.perf_counter() - begin) / self.arguments.steps)
                losses[name] = float("nan") if loss is None else float(loss)
                others = sum(bytes_ for other, bytes_ in kept.items() if other != name)
                graphs = sum(unused for pool, unused in graph_pools().items() if pool in pools[name])
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() + graphs - others)
        every: list[Any] = [None] * c10d.get_world_size()
        c10d.all_gather_object(every, (peaks, losses, {name: statistics.median(hosts[name]) for name in names}))
        middle = {name: statistics.median(found) for name, found in times.items()}
        tokens = rows * self.arguments.sequence
        lines = []
        for name in names:
            memory = " ".join(f"{each[0][name] / 2**30:.1f}" for each in every)
            host = "/".join(f"{each[2][name] * 1e3:.0f}" for each in every)
            lines.append(
                f"{self.family:10} {name:18} {tokens / middle[name]:9,.0f} {middle['torch 1F1B'] / middle[name]:6.3f} "
                f"{middle[name] * 1e3:7.0f} {min(times[name]) * 1e3:7.0f} {max(times[name]) * 1e3:7.0f}  {host:{4 * len(every)}} "
                f"{first[name]:5.0f} s  {every[-1][1][name]:.3f}  {memory}"
            )
        return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument(
        "--pipelines", nargs="+", default=["interleaved", "interleaved+graphs"],
        help="schedules: interleaved, simple or zero_bubble; with at most 3 active microbatches where /3 follows; with "
        "the option cuda_graphs where +graphs follows; with optimize: speed where +speed follows",
    )  # fmt: skip
    parser.add_argument("--memory-weight", type=float, help="memory weight of auto_partition; default: the library's")
    parser.add_argument("--autocast", action="store_true", help="float32 parameters, and autocast with bfloat16")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=4, help="sequences in each microbatch")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps of each pipeline in a round, after one step of warm-up"
    )
    arguments = parser.parse_args()
    start("cuda")
    rank, ranks = c10d.get_rank(), c10d.get_world_size()
    if rank == 0:
        print(
            f"{ranks} x {torch.cuda.get_device_name()}, {arguments.microbatches} microbatches of {arguments.microbatch} x "
            f"{arguments.sequence}, {arguments.rounds} rounds{', autocast' if arguments.autocast else ''}\n"
            f"{'family':10} {'pipeline':18} {'tokens/s':>9} {'ratio':>6} {'step ms':>7} {'min':>7} {'max':>7}  "
            f"{'host ms':{4 * ranks}} start, three steps; loss; GiB of each rank",
            flush=True,
        )
    for family in arguments.families:
        bench = Bench(family, arguments)
        lines = bench.run()
        if rank == 0:
            print("\n".join(lines), flush=True)
        del bench
        close_states()
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    wait()
    c10d.destroy_process_group()


if __name__ == "__main__":
    main()
