"""The table of Keras models on partitions: each learns as in one process, whatever the partitions, microbatches and schedule.

    python tests/e2e/modelparallel_tensorflow.py [--models mlp,words] [--partitions 1,2,3,4] [--microbatches 1,4,8]
                                                 [--schedules simple,interleaved,zero_bubble] [--kinds float64,float32]

It starts one job for each number of partitions, prints a line for each case, and fails if one is off. The whole takes
hours; `tests/multiproc/test_tensorflow_modelparallel.py` runs a sample of it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.keras_models import NAMES, compare

LIMITS = {"float64": 1e-10, "float32": 1e-5}
SCHEDULES = ("simple", "interleaved", "zero_bubble")


def _list(text: str) -> list[str]:
    return text.split(",")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_list, default=list(NAMES))
    parser.add_argument("--partitions", type=_list, default=["1", "2", "3", "4"])
    parser.add_argument("--microbatches", type=_list, default=["1", "4", "8"])
    parser.add_argument("--schedules", type=_list, default=list(SCHEDULES))
    parser.add_argument("--kinds", type=_list, default=list(LIMITS))
    parser.add_argument("--ways", type=_list, default=["get", "tape"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_rank(arguments: argparse.Namespace) -> int:
    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": arguments.rank})
    off = 0
    cases = itertools.product(
        arguments.models, arguments.kinds, map(int, arguments.microbatches), arguments.schedules, arguments.ways
    )
    for name, kind, microbatches, schedule, way in cases:
        difference, _ = compare(name, kind, arguments.rank, microbatches, schedule, way)
        worst = max(smp.allgather(difference))
        verdict = "equal" if worst < LIMITS[kind] else "OFF"
        off += verdict == "OFF"
        if smp.rank() == 0:
            said = f"{name} {kind} partitions={arguments.rank} microbatches={microbatches} {schedule} {way}"
            print(f"{verdict} {worst:.1e} {said}", flush=True)
    return off


def main() -> int:
    """Runs the table; the exit code says whether all of it is equal."""
    arguments = _arguments()
    if arguments.rank:
        return int(_run_rank(arguments) > 0)
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1"}
    codes = []
    for partitions in arguments.partitions:
        command = [
            sys.executable,
            "-m",
            "smdistributed",
            "-n",
            partitions,
            __file__,
            *sys.argv[1:],
            "--rank",
            partitions,
        ]
        codes.append(subprocess.run(command, env=env, check=False).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
