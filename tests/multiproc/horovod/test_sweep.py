"""Horovod's collectives with every dtype, number of dimensions, reduction and form of call, compared with numpy.

The test suite runs a sample on 2 ranks. ``python tests/multiproc/horovod/test_sweep.py`` runs every case on 2, 3 and 4
ranks (or on the numbers of ranks in its arguments): for PyTorch, and for TensorFlow eagerly and in a ``tf.function``.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, run_ranks

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
NUMBERS = INTEGERS + FLOATS
OPERATIONS = ["Sum", "Average", "Min", "Max", "Product"]
FORMS = ["plain", "async", "in place", "group"]
#: Pairs of (prescale, postscale): none, and powers of two, by which floats are multiplied exactly.
FACTORS = [(1.0, 1.0), (0.5, 4.0)]


def cases():
    """Yields (collective, dtype, dimensions, form, reduction, factors)."""
    dims = [0, 1, 2, 3]
    for case in itertools.product(NUMBERS, dims, FORMS, OPERATIONS, FACTORS):
        yield "allreduce", *case
    for dtype, dim, form, op, factors in itertools.product(NUMBERS, dims[1:], FORMS, OPERATIONS[:2], FACTORS):
        if form != "in place":
            yield "reducescatter", dtype, dim, form, op, factors
    for dtype, dim, form in itertools.product([*NUMBERS, "bool"], dims, FORMS):
        if dim > 0 and form != "in place":
            yield "allgather", dtype, dim, form, None, None
        if form != "group":
            yield "broadcast", dtype, dim, form, None, None
        if dim > 0 and form in ("plain", "async"):
            yield "alltoall", dtype, dim, form, None, None


class Torch:
    """Calls the collectives of `horovod.torch`."""

    def __init__(self):
        import torch

        import horovod.torch as hvd

        self.torch, self.hvd = torch, hvd

    def has(self, collective, form):
        return True

    def make(self, array, dtype):
        return self.torch.tensor(array).to(getattr(self.torch, dtype))

    def array(self, tensor):
        wide = self.torch.float64 if tensor.is_floating_point() else self.torch.int64
        return tensor.to(wide).numpy()

    def call(self, collective, form, tensors, **options):
        name = {"plain": "{}", "async": "{}_async", "in place": "{}_", "group": "grouped_{}"}[form].format(collective)
        function = getattr(self.hvd, name)
        if form == "group":
            return list(function(tensors, **options))
        result = function(tensors[0], **options)
        if form == "async":
            result = self.hvd.synchronize(result)
        if form == "in place":
            assert result is tensors[0]
        return [result[0] if isinstance(result, tuple) else result]


class TensorFlow:
    """Calls the collectives of `horovod.tensorflow`, eagerly or in graphs."""

    def __init__(self, in_graphs):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        self.tf, self.hvd, self.in_graphs = tf, hvd, in_graphs

    def has(self, collective, form):
        return form != "async" and (form != "in place" or collective == "broadcast")

    def make(self, array, dtype):
        return self.tf.cast(self.tf.constant(array), dtype)

    def array(self, tensor):
        return self.tf.cast(tensor, "float64" if tensor.dtype.is_floating else "int64").numpy()

    def call(self, collective, form, tensors, **options):
        if form == "in place":
            variables = [self.tf.Variable(tensors[0])]
            self._run(lambda: self.hvd.broadcast_(variables, **options))
            return variables
        if form == "group":
            function = getattr(self.hvd, f"grouped_{collective}")
            return self._run(lambda: function(tensors, **options))
        result = self._run(lambda: getattr(self.hvd, collective)(tensors[0], **options))
        return [result[0] if isinstance(result, (tuple, list)) else result]

    def _run(self, call):
        return self.tf.function(call, autograph=False)() if self.in_graphs else call()


class Sweep:
    """Runs cases and compares with numpy."""

    def __init__(self, framework):
        import numpy as np

        self.np = np
        self.framework = framework
        framework.hvd.init()
        self.rank, self.size = framework.hvd.rank(), framework.hvd.size()

    def drawn(self, seed, rank, shape, dtype):
        """Returns a rank's input: small integers, so that inputs, sums and products are exact in every dtype."""
        low = {"uint8": 0, "bool": 0}.get(dtype, -3)
        return self.np.random.default_rng([seed, rank]).integers(low, 2 if dtype == "bool" else 3, shape)

    def reduced(self, inputs, dtype, op, factors):
        np = self.np
        whole = dtype in INTEGERS
        scaled = [np.trunc(one * factors[0]) if whole else one * factors[0] for one in inputs]
        fold = {"Min": np.minimum.reduce, "Max": np.maximum.reduce, "Product": np.multiply.reduce}.get(
            op, np.add.reduce
        )
        result = fold(scaled) * (factors[1] / self.size if op == "Average" else factors[1])
        if not whole:
            return result
        # The double may be slightly smaller than the exact quotient, so it is nudged before it is truncated.
        result = np.trunc(result + np.copysign(1e-9, result)).astype(np.int64)
        return result.astype(dtype).astype(np.int64)

    def check(self, number, case):
        np, framework = self.np, self.framework
        collective, dtype, dim, form, op, factors = case
        options = {}
        shapes = [(2, 3, 2)[:dim], (4, 1, 3)[:dim], (3, 2, 2)[:dim]] if form == "group" else [(3, 2, 4)[:dim]]
        if collective == "reducescatter":
            shapes = [(2 * self.size + 1, *shape[1:]) for shape in shapes]
        has_uneven_rows = collective in ("allgather", "alltoall")

        def inputs_of(rank):
            rows = [(rank + 1, *shape[1:]) if collective == "allgather" else shape for shape in shapes]
            if collective == "alltoall":
                rows = [(sum(sent(rank)), *shape[1:]) for shape in shapes]
            return [self.drawn(number * 8 + at, rank, shape, dtype) for at, shape in enumerate(rows)]

        def sent(rank):
            return [(rank + 2 * to) % 3 for to in range(self.size)]

        inputs = [inputs_of(rank) for rank in range(self.size)]
        if op is not None:
            options["op"] = getattr(framework.hvd, op)
            options["prescale_factor"], options["postscale_factor"] = factors
        if collective == "broadcast":
            options["root_rank"] = number % self.size
        if collective == "alltoall":
            options["splits"] = sent(self.rank)
        tensors = [framework.make(array, dtype) for array in inputs[self.rank]]
        kind = tensors[0].dtype
        results = framework.call(collective, form, tensors, **options)
        assert len(results) == len(tensors)
        for at, result in enumerate(results):
            arrays = [one[at] for one in inputs]
            if collective == "broadcast":
                expected = arrays[options["root_rank"]]
            elif collective == "allgather":
                expected = np.concatenate(arrays)
            elif collective == "alltoall":
                starts = [sum(sent(rank)[: self.rank]) for rank in range(self.size)]
                expected = np.concatenate(
                    [
                        array[start : start + sent(rank)[self.rank]]
                        for rank, (array, start) in enumerate(zip(arrays, starts, strict=True))
                    ]
                )
            else:
                expected = self.reduced(arrays, dtype, op, factors)
            if collective == "reducescatter":
                expected = np.array_split(expected, self.size)[self.rank]
            got = framework.array(result)
            assert result.dtype == kind, (result.dtype, kind)
            assert got.shape == expected.shape, (got.shape, expected.shape)
            # Averages over three ranks are inexact; everything else is exact.
            slack = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}.get(dtype, 0)
            slack *= op == "Average" and self.size == 3
            assert (abs(got - expected) <= slack * abs(expected)).all(), (got, expected)
        if not has_uneven_rows and form != "in place":
            kept = framework.array(tensors[0])
            assert (kept == inputs[self.rank][0]).all(), "the collective has changed its input"

    def run(self, every):
        """Checks every `every`-th case; returns how many were checked."""
        count = 0
        for number, case in enumerate(cases()):
            if number % every == 0 and self.framework.has(case[0], case[3]):
                try:
                    self.check(number, case)
                except BaseException as error:
                    raise AssertionError(f"{case} on rank {self.rank} of {self.size}: {error!r}") from error
                count += 1
        return count


def sweep_torch(every):
    return Sweep(Torch()).run(every)


def sweep_tensorflow(every, in_graphs):
    return Sweep(TensorFlow(in_graphs)).run(every)


JOBS = {
    "torch": (sweep_torch, ()),
    "tensorflow": (sweep_tensorflow, (False,)),
    "tensorflow in graphs": (sweep_tensorflow, (True,)),
}


def run(job, size, every, timeout):
    body, more = JOBS[job]
    launcher = Forked(job.partition(" ")[0])
    return run_ranks(body, size, every, *more, launcher=launcher, env=ENV, timeout=timeout)[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("job", JOBS)
def test_a_sample_of_the_sweep(job):
    if importlib.util.find_spec(job.partition(" ")[0]) is None:
        pytest.skip(f"{job} is not installed")
    # Every 29th case: the step is prime, so that the sample contains every choice.
    run(job, 2, 29, 100)


if __name__ == "__main__":
    for job, size in itertools.product(JOBS, map(int, sys.argv[1:] or (2, 3, 4))):
        start = time.monotonic()
        count = run(job, size, 1, 600)
        print(f"{job}, {size} ranks: {count} cases pass, {time.monotonic() - start:.0f} s", flush=True)
