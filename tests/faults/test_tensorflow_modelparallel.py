"""A few runs of end_tensorflow_steps.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "end_tensorflow_steps", Path(__file__).with_name("end_tensorflow_steps.py")
)
end_tensorflow_steps = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(end_tensorflow_steps)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    ("partitions", "replicas", "victim", "kind"),
    [(2, 1, 1, "dies"), (3, 1, 1, "differs"), (2, 2, 3, "dies"), (3, 1, 2, "raises"), (2, 1, 0, "raises first")],
)
def test_what_ends_a_step_is_told_to_all(partitions, replicas, victim, kind):
    # It takes milliseconds; a machine that does much else needs longer for anything.
    end_tensorflow_steps.run(partitions, victim, kind, 0.03, limit=30.0, replicas=replicas)
