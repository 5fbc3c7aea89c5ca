"""Time of an optimizer step that reduces gradients by name, with and without the check that all ranks have the same
gradients.

    smdrun -n 2 benches/horovod/step.py

There is no model: gradients are constants, so the time is that of the optimizer. Steps with and without the check
alternate.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1, 60, 600])
    parser.add_argument("--elems", type=int, default=64, help="float32 values of each parameter")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of ten steps with and ten without the check")
    args = parser.parse_args()
    hvd.init()
    for number in args.parameters:
        compared, plain = measure(number, args.elems, args.rounds)
        if hvd.rank() == 0:
            print(
                f"{number} parameters of {args.elems} float32 by name on {hvd.size()} ranks: {compared:.0f} us a step, "
                f"{plain:.0f} us without the comparison, {compared - plain:+.1f} us"
            )


def measure(number: int, elems: int, rounds: int) -> tuple[float, float]:
    """Returns the median steps with and without the check, in microseconds."""
    parameters = [torch.nn.Parameter(torch.zeros(elems)) for _ in range(number)]
    named = [(f"{number}.{index}", parameter) for index, parameter in enumerate(parameters)]
    # With a predivide factor, the optimizer reduces by name, not by a plan.
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), named, gradient_predivide_factor=2.0)
    kinds = {True: optimizer._compare, False: lambda: None}
    ones, times = torch.ones(elems), {kind: [] for kind in kinds}
    gc.disable()
    for index in range(rounds + 1):
        for kind, compare in kinds.items():
            optimizer._compare = compare
            for at in range(11):
                start = time.perf_counter()
                for parameter in parameters:
                    parameter.backward(ones)
                optimizer.step()
                # The first round warms up. The first step of a kind evaluates the check of the step before.
                if index and at:
                    times[kind].append(time.perf_counter() - start)
    gc.enable()
    return statistics.median(times[True]) * 1e6, statistics.median(times[False]) * 1e6


if __name__ == "__main__":
    main()
