"""The table of Keras models on partitions: each learns as in one process, whatever the partitions, microbatches and schedule.

    python tests/e2e/modelparallel_tensorflow.py [--models mlp,words] [--partitions 1,2,3,4] [--microbatches 1,4,8] [--kinds float64,float32]
                                                 [--all] [--keras 2]

Rows: every model, number of partitions, number of microbatches and schedule in float64, with `get_gradients` and with a tape; with one
microbatch, `simple` is `interleaved`. In float32, every schedule with 4 microbatches and one with the others, the ways in turns; `--all`
has float32 in all of float64's rows. `--keras 2` takes tf_keras. It prints a line for each model and number of partitions, and one for each case that is off, and fails
if there is one. `tests/multiproc/modelparallel_tensorflow/test_training.py` runs a sample.
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
WAYS = ("get", "tape")
_ENV = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
_TIMEOUT = 600.0

#: Numbers, microbatches, schedule and way to gradients.
Case = tuple[str, int, str, str]


def cases(kind: str, microbatches: list[int], partitions: int, everything: bool) -> Iterator[Case]:
    """Those of one model and number of partitions."""
    ways = itertools.cycle(WAYS if partitions % 2 else WAYS[::-1])
    for count, schedule in itertools.product(microbatches, SCHEDULES):
        if count == 1 and schedule == "interleaved":
            continue
        if kind == "float64" or everything:
            yield from ((kind, count, schedule, way) for way in WAYS)
        elif count == 4 or schedule == "simple":
            yield kind, count, schedule, next(ways)


def _references(folder: str, rows: list[tuple[str, str, int]]) -> None:
    """What plain Keras learns, into files; ranks share the work."""
    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": 1})
    for row in rows[smp.rank() :: smp.size()]:
        (Path(folder) / "-".join(map(str, row))).write_bytes(pickle.dumps(alone(*row)))


def _differences(folder: str, name: str, partitions: int, rows: list[Case]) -> list[float]:
    """Of each case, the largest one on any rank."""
    import smdistributed.modelparallel.tensorflow as smp

    found = []
    for kind, microbatches, schedule, way in rows:
        plain = pickle.loads((Path(folder) / f"{name}-{kind}-{microbatches}").read_bytes())
        difference, _ = compare(name, kind, partitions, microbatches, schedule, way, plain)
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
    """Runs the table; the exit code says whether all of it is equal."""
    arguments = _arguments()
    start, off, total = time.monotonic(), 0, 0
    # Processes that share an imported TensorFlow have its Keras, too.
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
            said = f"{name:12} {partitions} partitions"
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
                print(f"{said}: FAILED\n{error}", flush=True)
                found = [float("inf")] * len(mine)
            bad = [(case, each) for case, each in zip(mine, found, strict=True) if not each < LIMITS[case[0]]]
            worst = {
                kind: max(each for case, each in zip(mine, found, strict=True) if case[0] == kind)
                for kind in arguments.kinds
            }
            verdict = "OFF" if bad else "equal"
            numbers = ", ".join(f"{kind} {each:.1e}" for kind, each in worst.items())
            print(f"{said}: {verdict}, {len(mine)} cases, {numbers} ({time.monotonic() - start:.0f} s)", flush=True)
            for case, each in bad:
                print(f"    OFF {each:.1e} {' '.join(map(str, case))}", flush=True)
            off, total = off + len(bad), total + len(mine)
    print(f"{total - off} of {total} cases are equal ({time.monotonic() - start:.0f} s)")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
