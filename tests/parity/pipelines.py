"""The whole table of pipelines compared with one process: models x partitions x microbatches x schedules x dtypes.

    python tests/parity/pipelines.py [--partitions 1 2 3 4] [--types float64 float32] [--models mlp gpt2 ..]

A job runs all rows of one dtype and one number of partitions. Loss, outputs, every gradient and, after five steps,
every parameter and buffer may differ by at most 1e-12 (float64) or 1e-5 (float32) of the largest element of the tensor.
`tests/multiproc/modelparallel_torch/test_models.py` runs a part.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import run_ranks

MICROBATCHES = (1, 4, 8)
#: Schedule, and whether a partition has two separate runs of the model's layers, so that each microbatch visits it
#: twice.
SCHEDULES = (
    ("simple", False),
    ("interleaved", False),
    ("zero_bubble", False),
    ("zero_bubble_2", False),
    ("interleaved", True),
    ("zero_bubble", True),
)


def _body(dtype, partitions, rows, names):
    import torch

    from support.pipelines import run_table

    return run_table(getattr(torch, dtype), partitions, rows, names, steps=5)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--types", nargs="+", default=["float64", "float32"])
    parser.add_argument("--models", nargs="+", default=None)
    arguments = parser.parse_args()
    rows = [(count, *schedule) for count, schedule in itertools.product(MICROBATCHES, SCHEDULES)]
    for dtype, partitions in itertools.product(arguments.types, arguments.partitions):
        start = time.monotonic()
        # With one partition, the two runs are adjacent: the case equals that with one run.
        wanted = [row for row in rows if partitions > 1 or not row[2]]
        ranks = run_ranks(_body, partitions, dtype, partitions, wanted, arguments.models, timeout=3000)
        worst = {name: max(found[name] for found in ranks) for name in ranks[0]}
        name = max(worst, key=worst.__getitem__)
        print(
            f"{dtype}, {partitions} partitions: {len(worst)} models x {len(wanted)} rows, largest difference "
            f"{worst[name]:.1e} ({name}), {time.monotonic() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
