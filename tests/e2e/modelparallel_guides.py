"""Runs the guides' PyTorch scripts with 2 and 4 processes under smdrun, torchrun and mpirun; the test suite runs a
part.

    python tests/e2e/modelparallel_guides.py
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "multiproc" / "modelparallel_torch")]

from test_guides import SCRIPTS, check  # noqa: E402


def main() -> None:
    """The command line."""
    for name, size, launcher in itertools.product(SCRIPTS, (2, 4), ("smdrun", "torchrun", "mpirun")):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            check(name, size, launcher, Path(folder))
        print(f"{name}, {size} processes, {launcher}: trained ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
