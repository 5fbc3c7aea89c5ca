"""What `make demo` shows: training with two processes, the same with one, and what a step costs beside gloo.

Ends with an error if a result is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MIN_ACCURACY = 0.97
# In float64. In float32, training amplifies the rounding differences of some processors a thousandfold.
MAX_LOSS_DIFFERENCE = 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with gloo")
    arguments = parser.parse_args()

    results = {}
    for processes in (2, 1):
        title(f"training with {processes} process{'es' if processes > 1 else ''}")
        out = arguments.out / f"{processes}-process"
        smdrun(processes, ROOT / "examples" / "torch_digits.py", "--double", "--out", out)
        results[processes] = json.loads((out / "results.json").read_text())

    title("2 processes and 1 process compared")
    pairs = list(zip(results[2]["losses"], results[1]["losses"], strict=True))
    difference = max(abs(a - b) for a, b in pairs)
    checks = [
        (
            f"test accuracy {results[2]['accuracy']:.2%} (at least {MIN_ACCURACY:.0%})",
            results[2]["accuracy"] >= MIN_ACCURACY,
        ),
        (
            f"largest difference of the loss curves over {len(pairs)} steps {difference:.1e} (at most {MAX_LOSS_DIFFERENCE:.0e})",
            difference <= MAX_LOSS_DIFFERENCE,
        ),
        ("parameters bitwise equal on both ranks", results[2]["replicas_are_equal"]),
    ]
    for text, passed in checks:
        print(f"{'ok' if passed else 'FAILED':6} {text}")
    print(f"loss curve: {arguments.out / '2-process' / 'loss.png'}")

    title("a training step beside torch's DistributedDataParallel with gloo")
    smdrun(2, ROOT / "benches" / "ddp" / "step_time.py", "--rounds", arguments.rounds, "--steps", 2)
    if not all(passed for _, passed in checks):
        sys.exit("the demo did not show what it should")


def title(text: str) -> None:
    print(f"\n== {text} ==", flush=True)


def smdrun(processes: int, *command: object) -> None:
    """Runs a script under `smdrun`; ends this process if it fails."""
    # Ranks write to pipes. If this is a terminal, these variables make Rich draw a progress bar anyway.
    options = ["--env", "TTY_COMPATIBLE=1", "--env", "TTY_INTERACTIVE=1"] if sys.stdout.isatty() else []
    line = [sys.executable, "-m", "smdistributed", "-n", str(processes), *options, *map(str, command)]
    code = subprocess.run(line, check=False).returncode
    if code != 0:
        sys.exit(code)


if __name__ == "__main__":
    main()
