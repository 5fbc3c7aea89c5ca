"""`make demo-hosts`: training with four processes on two hosts has the loss curve of one host and of one process.

The demo runs over MPI and over TCP. The hosts are network namespaces of this machine. Ends with an error if a result is
not as expected.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support import start_ranks  # noqa: E402
from support.hosts import Hosts, missing  # noqa: E402
from support.launchers import Launcher  # noqa: E402

SCRIPT = ROOT / "examples" / "torch_digits.py"
MIN_ACCURACY = 0.97
#: One process sums the batch in another order. The comparison is in float64, because training amplifies rounding.
MAX_LOSS_DIFFERENCE = 1e-9
_TIMEOUT_SECONDS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo-hosts", help="folder for the results")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"two hosts cannot be made on this machine: {reason}")

    def train(name: str, processes: int, launcher: Launcher) -> dict:
        out = arguments.out / name.replace(" ", "-").replace(",", "")
        options = ("--double", "--epochs", arguments.epochs, "--out", out)
        with start_ranks(SCRIPT, processes, *options, launcher=launcher, timeout=_TIMEOUT_SECONDS) as job:
            outcome = job.wait()
        if outcome.exit_code != 0 or outcome.timed_out:
            sys.exit(outcome.describe())
        results = json.loads((out / "results.json").read_text())
        print(f"{name:38} accuracy {results['accuracy']:.2%}  {outcome.seconds:5.1f} s", flush=True)
        return results

    with Hosts(2) as two:
        on_two = train("4 processes, two hosts, over MPI", 4, two)
        over_tcp = train("4 processes, two hosts, over TCP", 4, two.by_hand())
    on_one = train("4 processes, one host", 4, "smdrun")
    alone = train("1 process", 1, "smdrun")

    steps = len(on_two["losses"])
    difference = max(abs(a - b) for a, b in zip(on_two["losses"], alone["losses"], strict=True))
    checks = [
        (f"test accuracy {on_two['accuracy']:.2%} (at least {MIN_ACCURACY:.0%})", on_two["accuracy"] >= MIN_ACCURACY),
        (f"loss curve over {steps} steps equal to that of one host, bit by bit", on_two["losses"] == on_one["losses"]),
        ("the same over TCP", over_tcp["losses"] == on_one["losses"]),
        (
            f"largest difference from one process's loss {difference:.1e} (at most {MAX_LOSS_DIFFERENCE:.0e})",
            difference <= MAX_LOSS_DIFFERENCE,
        ),
        ("parameters bitwise equal on all ranks", on_two["replicas_are_equal"]),
    ]
    for text, passed in checks:
        print(f"{'ok' if passed else 'FAILED':6} {text}")
    if not all(passed for _, passed in checks):
        sys.exit("a result of the demo is not as expected")


if __name__ == "__main__":
    main()
