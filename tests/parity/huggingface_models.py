"""The table of Hugging Face's models on several partitions beside one process, and docs/models.md, which it writes.

    python tests/parity/huggingface_models.py [--partitions 2 3 4] [--models llama bert ..] [--no-page]

Each row is an architecture as small as its configuration allows, with its defaults: two steps of four microbatches with each schedule,
in float64 and, where a model has no float64, in float32. Losses, logits, gradients and parameters differ by at most 1e-10
(float64) or 1e-5 (float32) of the largest number of their tensor. `tests/multiproc/test_modelparallel_huggingface.py` runs a part.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, RanksFailedError, run_ranks
from support.huggingface import ARCHITECTURES, FLOAT32_ONLY, REFUSED, routes

SCHEDULES = ["simple", "interleaved", "zero_bubble"]
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_INTRODUCTION = """\
# Models of Hugging Face in pipelines

Each row is an architecture of transformers, made from its configuration with small sizes and otherwise untouched defaults: caches,
grouped-query attention, tied weights, routing. A row runs two steps of four microbatches with each of the schedules {schedules}, on
{partitions} partitions. Losses, logits, gradients and parameters are compared with one process.

- *Difference* is the largest one, as a part of the largest number of its tensor.
- *Left the pipeline* names calls for which all ranks waited, with the reason. `SMD_STRICT_PIPELINE=1` makes each an error.
- Probabilities of dropout and of other random choices are 0 in this table: it compares what is computed.
- Experts run as grouped products in float32 (the default), and one after the other in float64, which PyTorch's grouped product lacks.

`python tests/parity/huggingface_models.py` makes this page.

| model | type | partitions | difference | left the pipeline |
| --- | --- | --- | --- | --- |
"""


def _body(name, dtype, partitions, schedules):
    import warnings

    warnings.simplefilter("ignore")
    from support.huggingface_steps import run_rows

    return run_rows(name, dtype, partitions, schedules)


def _row(name: str, dtype: str, partitions: int) -> tuple[str, bool]:
    """A line of the table, and whether all is as it should be."""
    try:
        ranks = run_ranks(_body, partitions, name, dtype, partitions, SCHEDULES, launcher=Forked("torch"), timeout=600)
    except RanksFailedError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("rank ")]
        reason = REFUSED.get(name)
        return f"| {name} | {dtype} | {partitions} | raises | {reason or (lines or ['?'])[0]} |", reason is not None
    rows = [row for rank in ranks for row in rank]
    worst = max(row["difference"] for row in rows)
    left = sorted({f"`{what}`: {why}" for row in rows for what, why in row["synchronous"]})
    good = worst <= TOLERANCES[dtype] and all(row["partitions"] == list(range(partitions)) for row in rows)
    return f"| {name} | {dtype} | {partitions} | {worst:.1e} | {'; '.join(left)} |", good


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--models", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--no-page", action="store_true")
    arguments = parser.parse_args()
    lines, bad = [], []
    for name in arguments.models:
        types = ["float32"] if name in FLOAT32_ONLY else ["float64", "float32"] if routes(name) else ["float64"]
        for dtype in types:
            for partitions in arguments.partitions:
                start = time.monotonic()
                line, good = _row(name, dtype, partitions)
                print(line, f"{time.monotonic() - start:.0f} s", "" if good else "FAILED", flush=True)
                lines.append(line)
                if not good:
                    bad.append(line)
    if not arguments.no_page:
        counts = ", ".join(map(str, arguments.partitions))
        schedules = ", ".join(f"`{each}`" for each in SCHEDULES)
        PAGE.write_text(_INTRODUCTION.format(schedules=schedules, partitions=counts) + "\n".join(lines) + "\n")
    print(f"{len(lines)} rows, {len(bad)} failed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
