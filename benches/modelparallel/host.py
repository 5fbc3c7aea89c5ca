"""Host time of a pipelined step besides the modules' own work, for each microbatch.

    OMP_NUM_THREADS=1 smdrun -n 4 benches/modelparallel/host.py
    OMP_NUM_THREADS=1 smdrun -n 2 benches/modelparallel/host.py --family llama --blocks 22

The model is a GPT of 32 tiny blocks that are called module by module, so that a microbatch records 36 tasks on every
rank. With `--family`, it is a decoder of transformers with its defaults, as small.

Times are medians over steps: of the body (*record*), of the comparison between ranks and the schedule (*agree*), and of
this rank's tasks without the modules' forwards, autograd's backward and waits for other ranks (*execute*). Each rank
needs a core; with ``--processor-time``, the time without one does not count. ``--profile`` also prints where the body's
time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from blocks import Shape, build, chunk_of, loss_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.runtime import pipeline, program_run, transfers


class Clock:
    """Adds up the time of calls of chosen functions."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: dict[str, float] = {}

    def time_calls(self, owner: Any, name: str, key: str) -> None:
        """Adds the time of future calls of ``owner.name`` to ``key``."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[key] = self.seconds.get(key, 0.0) + self.now() - start

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Returns the times so far and resets them."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--family", help="use a causal language model of transformers, such as llama or gpt2")
    parser.add_argument("--use-cache", action="store_true", help="with --family: request a cache of keys and values")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processor-time", action="store_true", help="leave out the time without a core")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    partitions = int(os.environ["WORLD_SIZE"])
    config = {"partitions": partitions, "microbatches": arguments.microbatches}
    shape = Shape(width=8, blocks=arguments.blocks, heads=2, vocabulary=16, context=8)
    if arguments.family:
        smp.init(config)
        model = decoder(arguments)
    else:
        smp.init(config | {"auto_partition": False, "default_partition": 0})
        model = build(shape)
        for place, module in enumerate(model):
            smp.set_partition(module, chunk_of(place, shape, smp.pp_size()))
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    spent = Clock(time.thread_time if arguments.processor_time else time.perf_counter)
    options = {"use_cache": True} if arguments.use_cache else {}

    @smp.step
    def step(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(tokens) if not arguments.family else model(input_ids=tokens, **options).logits
        loss = loss_of(logits, targets)
        model.backward(loss)
        return loss

    body = step._function

    def timed_body(*args: Any) -> Any:
        start = spent.now()
        try:
            return body(*args)
        finally:
            spent.seconds["record"] = spent.seconds.get("record", 0.0) + spent.now() - start

    profile = cProfile.Profile()
    tokens = torch.zeros(2 * arguments.microbatches, shape.context, dtype=torch.long)
    figures: list[dict[str, float]] = []
    for number in range(arguments.steps + 3):
        if number == 3:
            # The first steps partition the model and find the outputs of its modules.
            step._function = timed_body
            spent.time_calls(pipeline.Pipeline, "agree", "agree")
            spent.time_calls(program_run.ProgramRun, "advance", "run")
            spent.time_calls(program_run.ProgramRun, "complete", "run")
            spent.time_calls(torch.autograd, "backward", "backward")
            spent.time_calls(transfers.PendingReceive, "wait", "wait")
            spent.time_calls(transfers.Comparison, "wait", "wait")
            spent.time_calls(pipeline.Pipeline, "refresh", "refresh")
            _count_modules(model, spent)
        if number >= 3 and arguments.profile:
            profile.enable()
        optimizer.zero_grad()
        step(model, tokens, tokens)
        profile.disable()
        if number >= 3:
            figures.append(spent.take())
    report(figures, arguments, profile)


def decoder(arguments: argparse.Namespace) -> torch.nn.Module:
    """Makes a tiny causal language model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": arguments.blocks, "num_attention_heads": 2, "vocab_size": 16}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = AutoConfig.for_model(arguments.family, **sizes, **tokens)
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = 16
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def _count_modules(model: Any, spent: Clock) -> None:
    """Adds up the forward time of modules that are tasks of this rank."""
    whole, mine = model.pipeline.placement.whole, smp.pp_rank()
    inside = {id(child) for each in model.module.modules() if id(each) in whole for child in each.children()}
    for module in model.module.modules():
        if whole.get(id(module)) == mine and id(module) not in inside:
            original: Callable[..., Any] = module.forward

            def timed(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                start = spent.now()
                try:
                    return original(*args, **kwargs)
                finally:
                    spent.seconds["forward"] = spent.seconds.get("forward", 0.0) + spent.now() - start

            module.forward = timed


def report(figures: list[dict[str, float]], arguments: argparse.Namespace, profile: cProfile.Profile) -> None:
    """Gathers the figures and prints the table on rank 0."""
    medians = {}
    for key in ("record", "refresh", "agree", "run", "wait", "forward", "backward"):
        medians[key] = 1e3 * statistics.median(each.get(key, 0.0) for each in figures) / arguments.microbatches
    medians["execute"] = medians["run"] - medians["forward"] - medians["backward"] - medians["wait"]
    rows = smp.allgather(medians, smp.WORLD)
    if smp.rank() == 0:
        print(f"milliseconds for each of {arguments.microbatches} microbatches, {arguments.blocks} blocks")
        print("rank  record  refresh   agree  execute  (modules' forward, backward; waits)")
        for rank, row in enumerate(rows):
            print(
                f"{rank:4}  {row['record']:6.3f}  {row['refresh']:7.3f}  {row['agree']:6.3f}  {row['execute']:7.3f}  "
                f"({row['forward']:.3f}, {row['backward']:.3f}; {row['wait']:.3f})"
            )
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
