"""Every operation of Horovod with every dtype, factor, process set and number of processes, compared with numpy in
float64.

    python tests/parity/horovod_operations.py [--processes 2 3 4] [--frameworks torch tensorflow graph] [--every 1]

A job runs all cases of one framework and one number of processes. The script prints a table: how many values were
equal, and how many calls raised the error that Horovod documents. It fails if any case differs.
`tests/multiproc/horovod/test_operations.py` runs a sample.

Let `u` be the unit roundoff of the dtype (2^-8 bfloat16, 2^-11 float16, 2^-24 float32, 2^-53 float64), `a` that of the
arithmetic (2^-24; 2^-53 for float64), `m` the number of members, and `S` the sum of the absolute scaled values. Values
are equal if they differ by at most:

- all-gather, broadcast, all-to-all: nothing;
- integers: nothing from the truncated float64 result; where that is within 1e-12 of a whole number, either neighbour;
- sums and averages: `S |post| (u + (m + 3) a) + 2 u |result|`: one rounding of each prescaled value and of the sum, and
  one more for a postscale factor. Without factors: `S (m + 1) a + u |result|`;
- minima and maxima: `2 u |result|` with factors, nothing without;
- products: `((m + 2) u + 2 m a) |result|`;
- Adasum: `16 u` of the largest value.

For half types, each rounding adds the smallest subnormal number.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, run_ranks

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
#: Unit roundoff and smallest subnormal number.
FLOATS = {
    "float16": (2.0**-11, 2.0**-24),
    "bfloat16": (2.0**-8, 2.0**-133),
    "float32": (2.0**-24, 2.0**-149),
    "float64": (2.0**-53, 0.0),
}
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product", "Adasum")
#: Prescale and postscale factors. All but the last are exact in every dtype. The last is for floats only, since
#: attributes of TensorFlow's nodes are float32.
FACTORS = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.375), (2.0, 0.25), (-1.5, 2.0), (0.1, 3.3))
#: Process sets in addition to the global one, by number of processes.
SETS = {2: ([1],), 3: ([0, 2], [1]), 4: ([1, 3], [0, 1, 2])}
FRAMEWORKS = ("torch", "tensorflow", "graph")
REDUCING = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")
MOVING = ("allgather", "grouped_allgather", "broadcast", "alltoall")
#: Suffixes of the names of collectives in cases in which an error is expected.
SCALAR, UNKNOWN, UNREGISTERED, BOTH = (
    " of a scalar",
    " in an unknown set",
    " in a set of no number",
    " with average and op",
)

Case = collections.namedtuple("Case", "collective dtype op factors members")


def factors_for(dtype):
    """Yields the factors that values of the dtype can be multiplied with."""
    for factors in FACTORS:
        is_exact = factors != FACTORS[-1]
        if (is_exact or dtype in FLOATS) and (min(factors) > 0 or dtype != "uint8"):
            yield factors


def cases(size):
    """Yields all cases for a number of processes."""
    all_ranks = list(range(size))
    types = (*INTEGERS, *FLOATS)
    for members in (all_ranks, *SETS[size]):
        for collective in REDUCING:
            for dtype, op in itertools.product(types, REDUCTIONS):
                for factors in factors_for(dtype):
                    yield Case(collective, dtype, op, factors, members)
            yield Case(collective, "bool", "Sum", FACTORS[0], members)
        for collective in MOVING:
            for dtype in (*types, "bool", "uint16"):
                yield Case(collective, dtype, None, None, members)
        for collective in ("allgather", "alltoall", "reducescatter"):
            yield Case(f"{collective}{SCALAR}", "float32", None, None, members)
        yield Case("barrier", None, None, None, members)
    for collective, what in itertools.product((*REDUCING, *MOVING, "barrier"), (UNKNOWN, UNREGISTERED)):
        yield Case(f"{collective}{what}", "float32", None, None, all_ranks)
    for collective in REDUCING[:2]:
        yield Case(f"{collective}{BOTH}", "float32", None, None, all_ranks)


class Torch:
    """Calls of PyTorch's module."""

    refuses_uint16 = True

    def __init__(self):
        import torch

        import horovod.torch as hvd

        self.torch, self.hvd = torch, hvd
        self.internal, self.argument = hvd.HorovodInternalError, ValueError
        self.unsupported = hvd.HorovodInternalError

    def make(self, array, dtype):
        return self.torch.tensor(array).to(getattr(self.torch, dtype))

    def exact(self, tensor):
        """Converts to float64 or int64, which is exact."""
        return tensor.to(self.torch.float64 if tensor.is_floating_point() else self.torch.int64).numpy()

    def dtype(self, tensor):
        return str(tensor.dtype).removeprefix("torch.")

    def run(self, call, *tensors):
        return call(*tensors)


class TensorFlow:
    """Like `Torch`, for TensorFlow's module, eagerly or in a `tf.function`."""

    refuses_uint16 = False

    def __init__(self, in_graph):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        self.tf, self.hvd, self.in_graph = tf, hvd, in_graph
        self.internal, self.argument = tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError
        self.unsupported = tf.errors.AbortedError

    def make(self, array, dtype):
        return self.tf.cast(self.tf.constant(array), dtype)

    def exact(self, tensor):
        return self.tf.cast(tensor, "float64" if tensor.dtype.is_floating else "int64").numpy()

    def dtype(self, tensor):
        return tensor.dtype.name

    def run(self, call, *tensors):
        # Names of operations derive from names of arguments, which are the same on all ranks. Tensors that a function
        # captures have no such name, so all are passed.
        return (self.tf.function(call, autograph=False) if self.in_graph else call)(*tensors)


class Table:
    """Runs cases on a rank and counts their outcomes."""

    def __init__(self, framework):
        import numpy as np

        self.np, self.framework, self.hvd = np, framework, framework.hvd
        hvd = self.hvd
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        hvd.shutdown()
        sets = [hvd.ProcessSet(members) for members in SETS[self.size]]
        hvd.init(process_sets=sets)
        self.sets = {tuple(each.ranks): each for each in (hvd.global_process_set, *sets)}
        #: By row: equal values, documented errors, and the largest share of the tolerance that a difference used.
        self.counts = collections.defaultdict(lambda: [0, 0, 0.0])
        self.failures = []

    def run(self, every):
        for number, case in enumerate(cases(self.size)):
            if number % every == 0:
                row = self.counts[case.collective if case.op is None else f"{case.collective} {case.op}"]
                try:
                    self.check(number, case, row)
                except Exception as error:
                    self.failures.append(f"rank {self.rank} of {self.size}, {tuple(case)}: {error!r}")
        return dict(self.counts), self.failures

    def documented_error(self, case):
        """Returns the class and a part of the text of the error that Horovod documents, or None if a result is
        expected.
        """
        framework, collective = self.framework, case.collective
        is_reduction = case.op is not None
        if collective.endswith(BOTH):
            return ValueError, "supersedes average"
        if collective.endswith((UNKNOWN, UNREGISTERED)):
            return ValueError, "does not exist, or has not been registered"
        if collective.endswith(SCALAR):
            return (framework.internal, framework.argument, ValueError), ""
        if case.dtype == "uint16" and framework.refuses_uint16:
            return ValueError, "is not supported"
        if is_reduction and case.dtype == "bool":
            return ValueError, "not supported"
        if case.op == "Adasum" and "allreduce" in collective:
            if len(case.members) != self.size:
                return NotImplementedError, "does not support non-global process sets"
            if self.size & (self.size - 1):
                return NotImplementedError, "non-power of 2"
        if "reducescatter" in collective and case.op not in ("Average", "Sum", None):
            if self.rank in case.members:
                return framework.unsupported, "only supports AVERAGE and SUM"
            # The call has two errors; which one is raised is not documented.
            return (framework.unsupported, framework.argument), ""
        if self.rank not in case.members:
            return (framework.argument, ValueError), "process set"
        if case.op == "Adasum" and case.dtype in INTEGERS:
            return (framework.internal, framework.argument, framework.unsupported), "int"
        return None

    def check(self, number, case, row):
        expected = self.documented_error(case)
        if expected is None:
            row[2] = max(row[2], self.compare(number, case))
            row[0] += 1
            return
        kinds, text = expected
        try:
            self.call(number, case)
        except kinds as error:
            if text.lower() not in str(error).lower():
                raise
            row[1] += 1
        else:
            raise AssertionError(f"expected an error: {text}")

    # Inputs and calls.

    def shapes(self, case):
        shapes = [(3, 5), (1,), (4, 2)] if case.collective.startswith("grouped") else [(3, 5)]
        if "reducescatter" in case.collective:
            shapes = [(2 * len(case.members) + 1, *shape[1:]) for shape in shapes]
        return shapes

    def inputs(self, number, case, rank):
        """Returns a rank's tensors, rounded to the dtype."""
        np = self.np
        generator = np.random.default_rng([number, rank])
        shapes = self.shapes(case)
        if "allgather" in case.collective:
            shapes = [(rank + 1, *shape[1:]) for shape in shapes]
        if case.collective == "alltoall":
            shapes = [(sum(self.splits(case, rank)), 2)]
        if case.collective.endswith(SCALAR):
            shapes = [()]
        if case.dtype in FLOATS:
            arrays = [generator.uniform(-4, 4, shape) for shape in shapes]
        else:
            # Small enough that products over all ranks, with factors, do not overflow the dtype.
            most = {"Product": 1 if case.dtype.endswith("int8") else 3}.get(case.op, 12)
            low, high = (0, 2) if case.dtype == "bool" else (0 if case.dtype[0] == "u" else -most, most + 1)
            arrays = [generator.integers(low, high, shape) for shape in shapes]
        return [self.framework.make(array, case.dtype) for array in arrays]

    def splits(self, case, rank):
        return [(rank + 2 * other) % 3 for other in case.members]

    def call(self, number, case):
        hvd, framework = self.hvd, self.framework
        collective, members = case.collective, self.sets[tuple(case.members)]
        if collective.endswith((UNKNOWN, UNREGISTERED)):
            members = hvd.ProcessSet(case.members)
            members.process_set_id = 77 if collective.endswith(UNKNOWN) else None
        for what in (SCALAR, UNKNOWN, UNREGISTERED, BOTH):
            collective = collective.removesuffix(what)
        if collective == "barrier":
            return framework.run(lambda: (hvd.barrier(process_set=members), None)[1])
        function = getattr(hvd, collective)
        tensors = self.inputs(number, case, self.rank)
        options = {"process_set": members}
        if case.op is not None:
            options["op"] = getattr(hvd, case.op)
            options["prescale_factor"], options["postscale_factor"] = case.factors
        if case.collective.endswith(BOTH):
            options |= {"average": True, "op": hvd.Sum}
        if collective == "broadcast":
            options["root_rank"] = case.members[-1]
        if collective == "alltoall":
            options["splits"] = self.splits(case, self.rank)
        is_group = collective.startswith("grouped")
        result = framework.run(lambda *inputs: function(list(inputs) if is_group else inputs[0], **options), *tensors)
        if case.collective.startswith("grouped"):
            return list(result)
        return [result[0] if isinstance(result, (tuple, list)) else result]

    # Results.

    def compare(self, number, case):
        """Checks all results; returns the largest share of the tolerance that a difference used."""
        results = self.call(number, case)
        if case.collective == "barrier":
            return 0.0
        np, framework = self.np, self.framework
        inputs_of_ranks = [[framework.exact(each) for each in self.inputs(number, case, rank)] for rank in case.members]
        assert len(results) == len(inputs_of_ranks[0])
        place, worst = case.members.index(self.rank), 0.0
        for index, result in enumerate(results):
            assert framework.dtype(result) == case.dtype, result.dtype
            got = framework.exact(result).astype(np.float64)
            answer, tolerance = self.answer(case, [tensors[index] for tensors in inputs_of_ranks], place)
            assert got.shape == answer.shape, (got.shape, answer.shape)
            if case.op is not None and case.dtype in INTEGERS:
                near = np.trunc(answer * (1 - 1e-12)), np.trunc(answer * (1 + 1e-12))
                assert ((got == near[0]) | (got == near[1])).all(), (got, answer)
                continue
            error = abs(got - answer)
            assert (error <= tolerance).all(), (got, answer, tolerance)
            if (tolerance > 0).any():
                worst = max(worst, float((error[tolerance > 0] / tolerance[tolerance > 0]).max()))
        return worst

    def answer(self, case, arrays, place):
        """Returns numpy's result and the tolerance of each value."""
        np = self.np
        arrays = [array.astype(np.float64) for array in arrays]
        exact = np.zeros(1)
        if case.collective == "broadcast":
            return arrays[-1], exact
        if "allgather" in case.collective:
            return np.concatenate(arrays), exact
        if case.collective == "alltoall":
            parts = []
            for rank, array in zip(case.members, arrays, strict=True):
                splits = self.splits(case, rank)
                start = sum(splits[:place])
                parts.append(array[start : start + splits[place]])
            return np.concatenate(parts), exact
        answer, tolerance = self.reduced(case, arrays)
        if "reducescatter" in case.collective:
            count = len(case.members)
            answer, tolerance = (np.array_split(each, count)[place] for each in (answer, tolerance))
        return answer, tolerance

    def reduced(self, case, arrays):
        np, (before, after), count = self.np, case.factors, len(arrays)
        if case.dtype in INTEGERS:
            # Integers are truncated on every rank after prescaling, before the sum.
            scaled = np.stack([np.trunc(array * before) for array in arrays])
        else:
            scaled = np.stack([array * before for array in arrays])
        fold = {"Min": np.min, "Max": np.max, "Product": np.prod}.get(case.op, np.sum)
        answer = adasum(np, list(scaled)) if case.op == "Adasum" else fold(scaled, axis=0)
        if case.op == "Average" and case.dtype in INTEGERS and after == 1.0:
            answer = answer / count
        else:
            answer = answer * (after / count if case.op == "Average" else after)
        if case.dtype in INTEGERS:
            return answer, np.zeros_like(answer)
        unit, smallest = FLOATS[case.dtype]
        arithmetic = min(unit, 2.0**-24) if case.dtype != "float64" else unit
        is_plain = (before, after) == (1.0, 1.0)
        size = abs(answer)
        if case.op in ("Min", "Max"):
            tolerance = size * (0.0 if is_plain else 2.01 * unit)
        elif case.op == "Product":
            tolerance = size * ((count + 2) * unit + 2 * count * arithmetic)
        elif case.op == "Adasum":
            tolerance = np.full_like(size, 16 * unit * abs(scaled).max() * abs(after))
        else:
            total = abs(scaled).sum(axis=0) * abs(after / count if case.op == "Average" else after)
            if is_plain:
                tolerance = total * (count + 1) * arithmetic + unit * size
            else:
                tolerance = total * (unit + (count + 3) * arithmetic) + 2.01 * unit * size
        # The relative error of subnormal numbers exceeds the unit roundoff.
        return answer, tolerance + (0 if is_plain and case.op in ("Min", "Max") else 3 * count * smallest)


def adasum(np, values):
    """Adasum of a power of 2 vectors, by recursive halving."""
    if len(values) == 1:
        return values[0]
    a, b = adasum(np, values[0::2]), adasum(np, values[1::2])
    # Neighbours are combined first: ranks 0 and 1, then the pairs.
    if len(values) > 2:
        half = len(values) // 2
        a, b = adasum(np, values[:half]), adasum(np, values[half:])
    dot, squares = np.sum(a * b), (np.sum(a * a), np.sum(b * b))
    least = np.sqrt(np.finfo(np.float64).tiny)
    mine, theirs = (1.0 if square < least else 1.0 - dot / (2.0 * square) for square in squares)
    return mine * a + theirs * b


def body(framework, every):
    """The function of every rank."""
    import warnings

    warnings.simplefilter("ignore", DeprecationWarning)
    calls = Torch() if framework == "torch" else TensorFlow(framework == "graph")
    return Table(calls).run(every)


def run(framework, size, every, timeout):
    """Runs a job; returns the sums of the counts of all ranks, and all failures."""
    launcher = Forked("torch" if framework == "torch" else "tensorflow")
    ranks = run_ranks(body, size, framework, every, launcher=launcher, env=ENV, timeout=timeout)
    counts = collections.defaultdict(lambda: [0, 0, 0.0])
    for found, _ in ranks:
        for row, (equal, errors, worst) in found.items():
            counts[row] = [counts[row][0] + equal, counts[row][1] + errors, max(counts[row][2], worst)]
    return counts, [failure for _, failures in ranks for failure in failures]


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4], choices=[2, 3, 4])
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--every", type=int, default=1, help="run only every Nth case")
    arguments = parser.parse_args()
    failed = 0
    for framework, size in itertools.product(arguments.frameworks, arguments.processes):
        start = time.monotonic()
        counts, failures = run(framework, size, arguments.every, 1800)
        print(f"\n{framework}, {size} processes, {time.monotonic() - start:.0f} s")
        print(f"{'operation':34}{'equal':>8}{'documented error':>18}{'of the tolerance':>18}")
        for row, (equal, errors, worst) in counts.items():
            print(f"{row:34}{equal:8}{errors:18}{worst:18.2f}")
        equal, errors = (sum(count[at] for count in counts.values()) for at in (0, 1))
        print(f"{'all':34}{equal:8}{errors:18}   failures: {len(failures)}", flush=True)
        for failure in failures[:20]:
            print(f"  {failure}")
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
