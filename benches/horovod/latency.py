"""Time of a small all-reduce by name in the steady state: ``smdrun -n 2 benches/horovod/latency.py``."""

from __future__ import annotations

import argparse
import time

import torch

import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elems", type=int, default=16, help="float32 values")
    parser.add_argument("--calls", type=int, default=3000, help="measured calls")
    args = parser.parse_args()
    hvd.init()
    tensor = torch.ones(args.elems)
    for _ in range(200):
        hvd.allreduce_(tensor, name="warm")
    times = []
    for _ in range(args.calls):
        start = time.perf_counter()
        hvd.allreduce_(tensor, name="measured")
        times.append(time.perf_counter() - start)
    times.sort()
    if hvd.rank() == 0:
        median, late = times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6
        print(
            f"all-reduce of {args.elems} float32 by name on {hvd.size()} ranks: median {median:.0f} us, 99 % {late:.0f} us"
        )


if __name__ == "__main__":
    main()
