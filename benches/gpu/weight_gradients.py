"""Time of the backwards of a step's microbatches, with gradients of weights in autograd's graph and outside of it, on one
GPU: `python benches/gpu/weight_gradients.py --rounds 7`. Weights are float32, products bfloat16 by autocast.

A pipeline computes them outside (`torch_ext/weight_gradients/weights.h`): during the backward, or after it for
zero-bubble schedules.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp

MICROBATCHES, TOKENS, WIDTH, EXPERTS = 8, 4096, 2048, 8


class Experts(nn.Module):
    """Experts as parameters with three dimensions; `how` multiplies sorted rows by them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        # Unequal groups, as routers make them.
        sizes = torch.tensor([(index + 1) * TOKENS // 36 // 16 * 16 for index in range(EXPERTS)])
        sizes[-1] += TOKENS - sizes.sum()
        self.sizes = sizes.tolist()
        self.register_buffer("ends", sizes.cumsum(0).int(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "grouped":
            narrow = (x.bfloat16(), self.up.bfloat16(), self.down.bfloat16())
            rows, up, down = narrow
            inner = functional.silu(functional.grouped_mm(rows, up.transpose(1, 2), offs=self.ends))
            return functional.grouped_mm(inner, down.transpose(1, 2), offs=self.ends)
        if self.how == "batched":
            rows = x.view(EXPERTS, -1, WIDTH)
            return torch.bmm(functional.silu(torch.bmm(rows, self.up.mT)), self.down.mT).flatten(0, 1)
        parts = x.split(self.sizes)
        outputs = [
            functional.linear(functional.silu(functional.linear(rows, self.up[index])), self.down[index])
            for index, rows in enumerate(parts)
        ]
        return torch.cat(outputs)


class Fused(nn.Module):
    """Projections of queries and of keys and values from two inputs, as parts of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.weight.chunk(3)
        return functional.linear(x, query) + functional.linear(x, key) * functional.linear(x, value)


class Conv1D(nn.Module):
    """The layer of Hugging Face's GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5),
            nn.Parameter(torch.zeros(4 * WIDTH)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def layers() -> dict[str, nn.Module]:
    """Returns the models, each of them two layers deep, so that inputs of layers need gradients."""
    before = {name: nn.Linear(WIDTH, WIDTH) for name in ("linear", "Conv1D", "fused", "loop", "grouped", "batched")}
    return {
        "linear": nn.Sequential(before["linear"], nn.Linear(WIDTH, 4 * WIDTH)),
        "Conv1D of GPT-2": nn.Sequential(before["Conv1D"], Conv1D()),
        "three parts of one weight": nn.Sequential(before["fused"], Fused()),
        "experts in a loop": nn.Sequential(before["loop"], Experts("loop")),
        "experts, grouped product": nn.Sequential(before["grouped"], Experts("grouped")),
        "experts, batched product": nn.Sequential(before["batched"], Experts("batched")),
        "embedding of 50,257": nn.Sequential(nn.Embedding(50257, WIDTH), nn.Linear(WIDTH, WIDTH)),
    }


def run(model: nn.Module, x: torch.Tensor, kind: str) -> float:
    """Returns the milliseconds of the backwards of one step."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        outputs = [model(x) for _ in range(MICROBATCHES)]
        gradients = [torch.ones_like(output) for output in outputs]
    torch.cuda.synchronize()
    if kind != "autograd":
        torch.ops.smd.accumulate_casts(outputs[:1])
    start = time.perf_counter()
    waiting = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if kind == "autograd":
            output.backward(gradient)
            continue
        weights = torch.classes.smd.WeightGradients([output], [x] if x.requires_grad else [])
        torch.autograd.backward(output, gradient, inputs=weights.begin(kind == "after"))
        if kind == "after":
            weights.end()
            waiting.append(weights)
    for weights in waiting:
        weights.run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    smp.init({})
    torch.manual_seed(0)
    kinds = ("autograd", "during", "after")
    times: dict[tuple[str, str], list[float]] = {}
    models: dict[str, Callable[[], nn.Module]] = {name: model.cuda() for name, model in layers().items()}
    for _ in range(rounds + 2):
        for name, model in models.items():
            is_table = isinstance(model[0], nn.Embedding)
            x = (
                torch.randint(50257, (TOKENS,), device="cuda")
                if is_table
                else torch.randn(TOKENS, WIDTH, device="cuda")
            )
            for kind in kinds:
                times.setdefault((name, kind), []).append(run(model, x, kind))
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: ms of {MICROBATCHES} backwards of {TOKENS} tokens"
    )
    print(f"{'':28}{'autograd':>22}{'outside, during':>22}{'outside, after':>22}{'during / autograd':>20}")
    for name in models:
        row, medians = f"{name:28}", []
        for kind in kinds:
            found = sorted(times[name, kind][2:])
            medians.append(statistics.median(found))
            low, high = found[len(found) // 10], found[-1 - len(found) // 10]
            row += f"{f'{medians[-1]:.2f} ({low:.2f}..{high:.2f})':>22}"
        print(f"{row}{medians[1] / medians[0]:20.2f}")
    smp.shutdown()


if __name__ == "__main__":
    main()
