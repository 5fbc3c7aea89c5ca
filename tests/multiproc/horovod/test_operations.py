"""A sample of Horovod's operations, compared with numpy; ``tests/parity/horovod_operations.py`` runs all of them."""

from __future__ import annotations

import importlib.util

import pytest

from parity import horovod_operations as table
from support import more


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("framework", "size"), [("torch", 3), more("torch", 4), ("tensorflow", 2), more("graph", 3)])
def test_a_sample_of_operations(framework, size):
    module = "torch" if framework == "torch" else "tensorflow"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    # Every 17th or 41st case: the step is prime, so that the sample contains every choice.
    counts, failures = table.run(framework, size, 17 if framework == "torch" else 41, 130)
    assert failures == []
    equal, errors = (sum(count[at] for count in counts.values()) for at in (0, 1))
    assert equal > 15 * size
    assert errors > 15 * size


def test_reference_adasum():
    numpy = pytest.importorskip("numpy")
    one, two = numpy.array([1.0, 0.0]), numpy.array([0.0, 2.0])
    assert table.adasum(numpy, [one, two]).tolist() == [1.0, 2.0], "orthogonal vectors are added"
    assert table.adasum(numpy, [one, one, one, one]).tolist() == [1.0, 0.0], "equal vectors are averaged"
    assert table.adasum(numpy, [one, 0 * one]).tolist() == [1.0, 0.0]
