"""The table of Hugging Face models on several partitions, compared with one process; writes docs/reference/models.md.

    python tests/parity/huggingface_models.py [--partitions 2 3 4] [--models llama bert ..] [--no-page]
                                                [--row-seconds 600]

Several processes can share the rows. Each appends its rows to a file of JSON lines, and the page is made from all
files:

    python tests/parity/huggingface_models.py --shard 0/8 --out rows-0.jsonl    # and 1/8 to 7/8
    python tests/parity/huggingface_models.py --page-from rows-*.jsonl

Each row is an architecture as small as its configuration allows, otherwise with its defaults. It runs two steps of four
microbatches with each schedule, in float64 and, if it does not support float64, in float32. Losses, logits, gradients
and parameters may differ by at most 1e-10 (float64) or 1e-5 (float32) of the largest element of the tensor.
`tests/multiproc/modelparallel_torch/test_huggingface.py` runs a part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, RanksFailedError, run_ranks
from support.huggingface import ARCHITECTURES, FLOAT32_INSIDE, FLOAT32_ONLY, routes

SCHEDULES = ["simple", "interleaved", "zero_bubble"]
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"

_INTRODUCTION = """\
# Models of Hugging Face in pipelines

Each row is an architecture of transformers, made from its configuration with small sizes and
otherwise untouched defaults: grouped-query attention, tied weights, sliding windows, routing. It
runs two steps of four microbatches with the schedules {schedules}.
Losses, logits, gradients and parameters are compared with one process.

- A figure is the largest difference, relative to the largest value of its tensor.
- The last column names synchronous calls, with the reason. There is none. `SMD_STRICT_PIPELINE=1`
  makes such a call an error.
- Dropout and other random choices have the probability 0, so that values can be compared.
- Experts run as grouped products in float32, the default. They run one after the other in float64,
  because PyTorch's grouped product lacks float64.

`python tests/parity/huggingface_models.py` writes this page. A test compares models of timm and
adapters of PEFT: `tests/multiproc/modelparallel_torch/test_libraries.py`.

"""


def _body(name, dtype, partitions, schedules):
    import warnings

    warnings.simplefilter("ignore")
    from support.huggingface_steps import run_rows

    return run_rows(name, dtype, partitions, schedules)


def _cases(models: Iterable[str], partitions: Iterable[int]) -> list[tuple[str, str, int]]:
    """The rows of the table in order: model, dtype and number of partitions."""
    cases = []
    for name in models:
        types = ["float32"] if name in FLOAT32_ONLY else ["float64", "float32"] if routes(name) else ["float64"]
        cases += [(name, dtype, count) for dtype in types for count in partitions]
    return cases


def _row(name: str, dtype: str, partitions: int, seconds: float) -> dict[str, Any]:
    """Runs a row.

    Returns:
        The row. `good` is true if all values are equal and every partition has modules. `difference` is missing if a
        rank raised or ran out of time.
    """
    start = time.monotonic()
    row: dict[str, Any] = {"model": name, "type": dtype, "partitions": partitions}
    try:
        ranks = run_ranks(
            _body, partitions, name, dtype, partitions, SCHEDULES, launcher=Forked("torch"), timeout=seconds
        )
    except RanksFailedError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("rank ")]
        row |= {"left": (lines or ["?"])[0], "good": False}
    else:
        rows = [row for rank in ranks for row in rank]
        worst = max(rows, key=lambda row: row["difference"])
        left = sorted({f"`{what}`: {why}" for row in rows for what, why in row["synchronous"]})
        is_spread = all(row["partitions"] == list(range(partitions)) for row in rows)
        good = worst["difference"] <= TOLERANCES[dtype] and is_spread
        if dtype == "float64" and name in FLOAT32_INSIDE:
            left.append(FLOAT32_INSIDE[name])
        row |= {"difference": worst["difference"], "where": worst["where"], "left": "; ".join(left), "good": good}
    return row | {"seconds": round(time.monotonic() - start, 1)}


def _line(row: dict[str, Any]) -> str:
    """Formats a row for the output."""
    return f"{row['model']} {row['type']}, {row['partitions']} partitions: {_difference(row)} {row['left']}"


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"`{text}` is not I/N with 0 <= I < N")
    return int(index), int(count)


def _read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns the rows of the files in the order of the table. If a row occurs more than once, the last one counts."""
    found = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[row["model"], row["type"], row["partitions"]] = row
    places = {name: place for place, name in enumerate(ARCHITECTURES)}
    order = sorted(found, key=lambda case: (places.get(case[0], len(places)), case[1] != "float64", case[2]))
    return [found[case] for case in order]


def _write_page(rows: list[dict[str, Any]]) -> None:
    counts = sorted({row["partitions"] for row in rows})
    grouped: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["model"], row["type"]), {})[row["partitions"]] = row
    lines = [
        f"| model | type | {' | '.join(f'{count} partitions' for count in counts)} | synchronous calls, or remarks |",
        "| -- | -- |" + " -- |" * (len(counts) + 1),
    ]
    for (model, dtype), found in grouped.items():
        figures = [_difference(found[count]) if count in found else "" for count in counts]
        remarks = "; ".join(dict.fromkeys(row["left"].replace("|", "\\|") for row in found.values() if row["left"]))
        lines.append(f"| {model} | {dtype} | {' | '.join(figures)} | {remarks} |")
    introduction = _INTRODUCTION.format(schedules=", ".join(f"`{each}`" for each in SCHEDULES))
    PAGE.write_text(introduction + "\n".join(lines) + "\n")


def _difference(row: dict[str, Any]) -> str:
    return f"{row['difference']:.1e}" if "difference" in row else "raises"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--models", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES), metavar="MODEL"
    )
    parser.add_argument("--no-page", action="store_true", help="do not write docs/reference/models.md")
    parser.add_argument("--row-seconds", type=float, default=600, help="time limit of a row")
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="run each Nth row, starting with row I")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append each row to this file, as a line of JSON")
    parser.add_argument(
        "--page-from", type=Path, nargs="+", metavar="FILE", help="write the page from such files; run nothing"
    )
    arguments = parser.parse_args()
    if arguments.page_from:
        rows = _read(arguments.page_from)
        missing = [
            case for case in _cases(ARCHITECTURES, arguments.partitions) if case not in {_case(row) for row in rows}
        ]
        if missing:
            print(f"{len(missing)} rows are missing: {', '.join(' '.join(map(str, case)) for case in missing)}")
        _write_page(rows)
        bad = [row for row in rows if not row["good"]]
        print(*(f"{_line(row)} FAILED" for row in bad), f"{len(rows)} rows, {len(bad)} failed", sep="\n")
        return bool(bad or missing)
    index, count = arguments.shard or (0, 1)
    rows = []
    for case in _cases(arguments.models, arguments.partitions)[index::count]:
        row = _row(*case, arguments.row_seconds)
        rows.append(row)
        print(
            _line(row), f"{row['seconds']:.0f} s", "" if row["good"] else f"FAILED {row.get('where', '')}", flush=True
        )
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if not arguments.no_page and not arguments.shard:
        _write_page(rows)
    bad = [row for row in rows if not row["good"]]
    print(f"{len(rows)} rows, {len(bad)} failed")
    return bool(bad)


def _case(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["type"], row["partitions"]


if __name__ == "__main__":
    sys.exit(main())
