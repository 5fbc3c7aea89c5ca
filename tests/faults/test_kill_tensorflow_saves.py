"""A few of the runs of kill_tensorflow_saves.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support import more

_spec = importlib.util.spec_from_file_location(
    "kill_tensorflow_saves", Path(__file__).with_name("kill_tensorflow_saves.py")
)
kill_tensorflow_saves = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kill_tensorflow_saves)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(("form", "sizes"), [more("tensorflow", (1, 3)), ("sharded", (3,))])
def test_the_latest_checkpoint_restores_whenever_savers_are_killed(form, sizes, tmp_path):
    kill_tensorflow_saves.run(str(tmp_path), form, 0, seed=1)
    assert kill_tensorflow_saves.check(str(tmp_path), form, sizes) >= 2
