"""A few of the runs of kill_saves.py; `make bench-faults` does many."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("kill_saves", Path(__file__).with_name("kill_saves.py"))
kill_saves = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kill_saves)


def test_the_newest_checkpoint_is_whole_whenever_savers_are_killed(tmp_path):
    steps = [kill_saves.run(str(tmp_path), number, seed=1) for number in range(8)]
    assert steps == sorted(steps)
