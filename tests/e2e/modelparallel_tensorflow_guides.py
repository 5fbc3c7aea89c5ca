"""Runs the guide's TensorFlow scripts with 2 and 4 processes, Keras 3 and tf_keras, under smdrun and mpirun.

    python tests/e2e/modelparallel_tensorflow_guides.py

The loss at the end of each epoch must equal that of one process. The test suite runs a part.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[1] / "multiproc" / "modelparallel_tensorflow"),
]

from test_guides import PARAMETERS, check  # noqa: E402


def main() -> None:
    """The command line."""
    start = time.monotonic()
    for (name, size), launcher, keras in itertools.product(PARAMETERS, ("smdrun", "mpirun"), ("keras", "tf_keras")):
        with tempfile.TemporaryDirectory() as folder:
            check(name, size, launcher, keras, folder)
        print(
            f"{name}, {size} processes, {launcher}, {keras}: as one process ({time.monotonic() - start:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
