"""Sharded parameters and optimizer states in randomly drawn layouts, compared with one process.

    python tests/parity/sharded_combinations.py [--draws 20] [--seed 0] [--ranks 4]

Each draw has a family of models, parallel degrees, a kind of sharding, a schedule and further settings. After two AdamW
steps, losses and norms may differ by at most 1e-10 from one process, parameters and states by 1e-8.
`tests/multiproc/modelparallel_torch/test_sharded_combinations.py` runs some fixed layouts.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, RanksFailedError, run_ranks

FAMILIES = ("gpt", "llama", "gptj", "mqa")


def draw(rng: random.Random, ranks: int) -> tuple[tuple[int, int, int], str, dict[str, Any]]:
    """Draws a layout, a family and settings."""
    layouts = [
        (tp, pp, ranks // tp // pp)
        for tp in (1, 2, 4)
        for pp in (1, 2)
        if tp * pp <= ranks and ranks % (tp * pp) == 0 and ranks // pp > 1
    ]
    tp, pp, rdp = rng.choice(layouts)
    more: dict[str, Any] = {
        "optimize": rng.choice(["speed", "memory"]),
        "prescaled": tp > 1 and rng.random() < 0.5,
        "recompute": rng.random() < 0.5,
        "passes": rng.choice([1, 1, 2]),
    }
    degrees = [degree for degree in (2, 4) if (tp * rdp) % degree == 0]
    if rng.random() < 0.35:
        more["shard_optimizer_state"] = True
    else:
        more["sharded_data_parallel_degree"] = rng.choice(degrees)
    if pp > 1:
        more["pipeline"] = rng.choice(["simple", "interleaved", "zero_bubble"])
    return (tp, pp, rdp), rng.choice(FAMILIES), more


def _body(layout: tuple[int, int, int], family: str, more: dict[str, Any]) -> None:
    import functools

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import compare_sharded, gpt_between_layers

    options = smp.nn.BlockOptions
    llama = options(
        num_key_value_heads=4, qkv_bias=False, dense_bias=False, mlp_bias=False, normalization="rmsnorm",
        rotary=smp.nn.Rotary.with_base(4), gated=True,
    )  # fmt: skip
    gptj = options(rotary=smp.nn.Rotary.with_base(2, interleaved=True), parallel_residual=True, shared_norm=True)
    odd = {"num_positions": 0, "activation": "silu", "tie_word_embedding": False}
    sizes: dict[str, Any] = {
        "gpt": {"use_normal_initialization": True},
        "llama": {**odd, "options": llama},
        "gptj": {**odd, "options": gptj, "lm_head_bias": True},
        "mqa": {**odd, "options": options(num_key_value_heads=1)},
    }[family]
    compare_sharded(*layout, steps=2, make=functools.partial(gpt_between_layers, **sizes), **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    rng, failures = random.Random(arguments.seed), 0
    for number in range(arguments.draws):
        drawn = draw(rng, arguments.ranks)
        try:
            run_ranks(_body, arguments.ranks, *drawn, launcher=Forked("torch"), timeout=300)
        except RanksFailedError as error:
            failures += 1
            print(error, file=sys.stderr)
            print(f"{number} differs: {drawn}", flush=True)
        else:
            print(f"{number} equal: {drawn}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
