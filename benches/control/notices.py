"""Time to join a job, and time until every survivor learns of a `kill -9`: medians and worst cases.

    python benches/control/notices.py --ranks 2 4 8 --rounds 20

Each round starts a job of plain processes without a framework, waits until all have joined, and kills a random rank.
The other ranks print when their barrier failed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import time

RANK = """
import time
from smdistributed import _core
start = time.perf_counter()
_core.init()
print(time.perf_counter() - start, flush=True)
try:
    while True:
        _core.barrier()
except RuntimeError as error:
    print(time.monotonic(), error, flush=True)
"""


def run_round(size: int) -> tuple[list[float], list[float]]:
    """Runs one job; returns each rank's time to join and each survivor's time to learn of the death, in seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    joined = [float(rank.stdout.readline()) for rank in ranks]
    time.sleep(random.uniform(0.0, 0.05))
    victim = random.randrange(size)
    killed = time.monotonic()
    ranks[victim].kill()
    noticed = []
    for index, rank in enumerate(ranks):
        text = rank.communicate(timeout=60)[0]
        if index != victim:
            when, error = text.split(" ", 1)
            if f"rank {victim} died" not in error:
                raise RuntimeError(f"rank {index} does not name rank {victim}, which was killed: {error}")
            noticed.append(float(when) - killed)
    return joined, noticed


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"{'ranks':>5}  {'init, median':>12}  {'worst':>8}  {'notice, median':>14}  {'worst':>8}")
    for size in options.ranks:
        joined, noticed = [], []
        for _ in range(options.rounds):
            init, notice = run_round(size)
            # A rank also waits for ranks that started after it. The shortest time, that of the last rank, is the
            # library's own.
            joined.append(min(init))
            noticed += notice
        print(
            f"{size:5}  {statistics.median(joined) * 1e3:9.1f} ms  {max(joined) * 1e3:5.1f} ms"
            f"  {statistics.median(noticed) * 1e3:11.1f} ms  {max(noticed) * 1e3:5.1f} ms"
        )


if __name__ == "__main__":
    main()
