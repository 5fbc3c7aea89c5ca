"""`make example-tch`: examples/rust-tch trains with two processes as with one.

The example is built against the libtorch of this Python's PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "rust-tch"
TARGET = ROOT / "build" / "rust-tch"
MIN_ACCURACY = 0.97
#: Relative to the loss after the first step. Later losses differ more, because sums are rounded in another order.
MAX_LOSS_DIFFERENCE = 1e-5


def main() -> None:
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    environment = os.environ | {
        # Makes torch-sys use the PyTorch of this Python.
        "LIBTORCH_USE_PYTORCH": "1",
        "VIRTUAL_ENV": sys.prefix,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])),
        "OMP_NUM_THREADS": "1",
    }
    build = [
        "cargo",
        "build",
        "--release",
        "--manifest-path",
        EXAMPLE / "Cargo.toml",
        "--target-dir",
        TARGET,
    ]
    print(f"building examples/rust-tch against torch {importlib.metadata.version('torch')}", flush=True)
    subprocess.run(build, env=environment, check=True)

    first_losses = []
    for processes in (2, 1):
        command = [sys.executable, "-m", "smdistributed", "-n", str(processes), "--no-python"]
        print(f"\n== {processes} process{'es' if processes > 1 else ''} ==", flush=True)
        run = subprocess.run(
            [*command, TARGET / "release" / "rust-tch"], env=environment, stdout=subprocess.PIPE, text=True, timeout=120
        )
        print(run.stdout, end="", flush=True)
        accuracy = re.search(r"accuracy (\S+); parameters bitwise equal on (\d+) ranks", run.stdout)
        if run.returncode != 0 or not accuracy or int(accuracy[2]) != processes:
            sys.exit(f"the example failed with code {run.returncode}")
        if float(accuracy[1]) < MIN_ACCURACY:
            sys.exit(f"expected an accuracy of at least {MIN_ACCURACY}")
        first_losses.append(float(re.search(r"step 1 loss (\S+)", run.stdout)[1]))
    if abs(first_losses[0] - first_losses[1]) > MAX_LOSS_DIFFERENCE:
        sys.exit(f"the first loss is {first_losses[0]} with 2 processes and {first_losses[1]} with one")
    print("\nok: the same training with 2 processes and with 1")


if __name__ == "__main__":
    main()
