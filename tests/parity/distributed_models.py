"""Models under tensor parallelism and with sharded parameters, compared with one process, in every layout and mode.

    python tests/parity/distributed_models.py [--models gpt2 t5-gated ..] [--layouts 2x1x1 ..] [--shard 0/4]
    python tests/parity/distributed_models.py --draws 50 --seed 3

A cell is a model, a layout (degrees of tensor, pipeline and reduced-data parallelism, and of sharding), and whether
batches are prescaled, activations between products divided, and blocks recomputed in the backward. Each cell trains
five AdamW steps. In float64, losses, outputs, first gradients and their norm may differ by at most 1e-10 from one
process, parameters by 1e-8; in float32 (`--type float32`) by 1e-5 and 1e-3. Without `--draws`, all cells run.

`tests/multiproc/modelparallel_torch/test_tensor_parallelism*.py` run a part.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, RanksFailedError, run_ranks

#: Models of `support.smp.models`, and those of `support.smp.huggingface`.
OWN = [
    "ends", "flash", "gpt", "llama", "mqa", "gptj", "bert", "alibi", "output", "attention", "layer", "cross", "experts",
    "stack",
]  # fmt: skip
HUGGINGFACE = [
    "gpt2", "llama", "llama3", "mistral", "mixtral", "qwen2", "gptj", "gptneo", "gptneox", "gptneox-serial", "bert",
    "roberta", "vit", "bart", "olmoe", "t5-relu", "t5-gated", "t5-labels", "t5-bare", "t5-encoder", "t5-sequences",
    "t5-tokens",
]  # fmt: skip
MODELS = [*(f"smp.nn:{name}" for name in OWN), *(f"hf:{name}" for name in HUGGINGFACE)]
#: Degrees of tensor, pipeline and reduced-data parallelism, and of sharding.
LAYOUTS = {
    "2x1x1": (2, 1, 1, 0),
    "4x1x1": (4, 1, 1, 0),
    "2x2x1": (2, 2, 1, 0),
    "2x1x2": (2, 1, 2, 0),
    "1x1x4 sharded 2": (1, 1, 4, 2),
    "1x1x4 sharded 4": (1, 1, 4, 4),
    "2x2x1 sharded 2": (2, 2, 1, 2),
}


TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


class Cell(NamedTuple):
    """A training to compare."""

    model: str
    layout: str
    prescaled: bool
    optimize: str
    recompute: bool

    def __str__(self) -> str:
        words = [
            self.model,
            self.layout,
            self.optimize,
            *["prescaled"] * self.prescaled,
            *["recompute"] * self.recompute,
        ]
        return ", ".join(words)


def cells(models: list[str], layouts: list[str]) -> list[Cell]:
    """Returns the cells; without tensor parallelism, its modes do not differ."""
    found = []
    for model, layout in itertools.product(models, layouts):
        if layout.startswith("1x"):
            modes = [(False, "speed")]
        else:
            modes = list(itertools.product((False, True), ("speed", "memory")))
        found += [Cell(model, layout, *mode, recompute) for mode in modes for recompute in (False, True)]
    return found


def _body(
    whole_name: str,
    prescaled: bool,
    optimize: str,
    recompute: bool,
    degrees: tuple[int, int, int, int],
    type_name: str,
) -> None:
    import warnings

    import torch

    from support.tensor_parallel import compare

    warnings.simplefilter("ignore")
    dtype = getattr(torch, type_name)
    torch.set_default_dtype(dtype)
    family, name = whole_name.split(":")
    if family == "hf":
        from support.smp.huggingface import models
    else:
        from support.smp.models import models
    *layout, sharded = degrees
    more: dict[str, Any] = {"sharded_data_parallel_degree": sharded} if sharded else {}
    model = models()[name]
    compare(
        lambda: model.make().to(dtype), model.run, model.batch, *layout, prescaled, optimize, steps=5, more=more,
        dtype=dtype, tolerance=TOLERANCES[type_name], names=model.names, together=model.together, recompute=recompute,
    )  # fmt: skip


def _error(text: str) -> str:
    """Returns the line of an error that says what differs."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line]
    return lines[-1] if lines else text[-200:]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="MODEL")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--draws", type=int, help="run as many randomly drawn cells")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--type", default="float64", choices=list(TOLERANCES))
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="run each Nth cell, starting with cell I")
    parser.add_argument("--verbose", action="store_true", help="print the whole output of ranks that fail")
    arguments = parser.parse_args()
    chosen = cells(arguments.models, arguments.layouts)
    if arguments.draws is not None:
        chosen = random.Random(arguments.seed).sample(chosen, min(arguments.draws, len(chosen)))
    index, count = map(int, arguments.shard.split("/"))
    failures, chosen = 0, chosen[index::count]
    for cell in chosen:
        degrees, start = LAYOUTS[cell.layout], time.monotonic()
        launcher = Forked("transformers" if cell.model.startswith("hf:") else "torch")
        try:
            values = cell.model, cell.prescaled, cell.optimize, cell.recompute, degrees, arguments.type
            run_ranks(_body, math.prod(degrees[:3]), *values, launcher=launcher, timeout=300)
        except RanksFailedError as error:
            failures += 1
            if arguments.verbose:
                print(error, file=sys.stderr)
            print(f"{cell}: DIFFERS, {_error(str(error))}", flush=True)
        else:
            print(f"{cell}: equal, {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(chosen)} cells, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
