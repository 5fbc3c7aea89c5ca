"""The table of Keras models on partitions: each must learn as in one process.

    python tests/e2e/modelparallel_tensorflow.py [--models mlp,words] [--partitions 1,2,3,4] [--microbatches 1,4,8]
                                                 [--kinds float64,float32] [--all] [--keras 2]

Rows in float64: every model, number of partitions, number of microbatches and schedule, with `get_gradients` and with a
tape. With one microbatch, `interleaved` is left out, because it equals `simple`. In float32: every schedule with 4
microbatches and `simple` with the other numbers, alternating between `get_gradients` and a tape; `--all` runs the rows
of float64. `--keras 2` uses tf_keras.

Prints a line for each model and number of partitions and for each case that differs, and fails if there is one.
`tests/multiproc/modelparallel_tensorflow/test_training.py` runs a sample.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import Forked, run_ranks
from support.keras_models import NAMES, alone, compare

LIMITS = {"float64": 1e-10, "float32": 1e-5}
SCHEDULES = ("simple", "interleaved", "zero_bubble")
GRADIENT_METHODS = ("get", "tape")
_ENV = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
_TIMEOUT = 600.0

#: Dtype, microbatches, schedule, and how gradients are computed.
Case = tuple[str, int, str, str]


def cases(kind: str, microbatches: list[int], partitions: int, everything: bool) -> Iterator[Case]:
    """Yields the cases of one model and number of partitions."""
    methods = itertools.cycle(GRADIENT_METHODS if partitions % 2 else GRADIENT_METHODS[::-1])
    for count, schedule in itertools.product(microbatches, SCHEDULES):
        if count == 1 and schedule == "interleaved":
            continue
        if kind == "float64" or everything:
            yield from ((kind, count, schedule, method) for method in GRADIENT_METHODS)
        elif count == 4 or schedule == "simple":
            yield kind, count, schedule, next(methods)


def _references(folder: str, rows: list[tuple[str, str, int]]) -> None:
    """The function of a rank: writes the results of plain Keras to files. Ranks share the work."""
    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 1})
    for row in rows[smp.rank() :: smp.size()]:
        (Path(folder) / "-".join(map(str, row))).write_bytes(pickle.dumps(alone(*row)))


def _differences(folder: str, name: str, partitions: int, rows: list[Case]) -> list[float]:
    """The function of a rank: returns the largest difference of each case on any rank."""
    import smdistributed.modelparallel.tensorflow as smp

    found = []
    for kind, microbatches, schedule, method in rows:
        plain = pickle.loads((Path(folder) / f"{name}-{kind}-{microbatches}").read_bytes())
        difference, _ = compare(name, kind, partitions, microbatches, schedule, method, plain)
        found.append(max(smp.allgather(difference)))
    return found


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=list(NAMES))
    parser.add_argument("--partitions", type=numbers, default=[1, 2, 3, 4])
    parser.add_argument("--microbatches", type=numbers, default=[1, 4, 8])
    parser.add_argument("--kinds", type=names, default=list(LIMITS))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--keras", type=int, choices=[2, 3], default=3)
    return parser.parse_args()


def main() -> int:
    """Runs the table; returns 0 if all cases are equal."""
    arguments = _arguments()
    start, num_failed, total = time.monotonic(), 0, 0
    # Forked ranks have TensorFlow imported with Keras 3, so tf_keras needs new processes.
    launcher, env = Forked("tensorflow"), _ENV
    if arguments.keras == 2:
        launcher, env = "smdrun", {**_ENV, "TF_USE_LEGACY_KERAS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        rows = list(itertools.product(arguments.models, arguments.kinds, arguments.microbatches))
        run_ranks(_references, 2, folder, rows, launcher=launcher, env=env, timeout=_TIMEOUT)
        for name, partitions in itertools.product(arguments.models, arguments.partitions):
            mine = [
                case
                for kind in arguments.kinds
                for case in cases(kind, arguments.microbatches, partitions, arguments.all)
            ]
            label = f"{name:12} {partitions} partitions"
            try:
                found = run_ranks(
                    _differences,
                    partitions,
                    folder,
                    name,
                    partitions,
                    mine,
                    launcher=launcher,
                    env=env,
                    timeout=_TIMEOUT,
                )[0]
            except Exception as error:
                print(f"{label}: FAILED\n{error}", flush=True)
                found = [float("inf")] * len(mine)
            bad = [(case, each) for case, each in zip(mine, found, strict=True) if not each < LIMITS[case[0]]]
            worst = {
                kind: max(each for case, each in zip(mine, found, strict=True) if case[0] == kind)
                for kind in arguments.kinds
            }
            status = "DIFFERS" if bad else "equal"
            numbers = ", ".join(f"{kind} {each:.1e}" for kind, each in worst.items())
            print(f"{label}: {status}, {len(mine)} cases, {numbers} ({time.monotonic() - start:.0f} s)", flush=True)
            for case, each in bad:
                print(f"    DIFFERS {each:.1e} {' '.join(map(str, case))}", flush=True)
            num_failed, total = num_failed + len(bad), total + len(mine)
    print(f"{total - num_failed} of {total} cases are equal ({time.monotonic() - start:.0f} s)")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
