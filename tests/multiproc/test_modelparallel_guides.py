"""Scripts of the published guides, under every launcher."""

from __future__ import annotations

import json

import pytest

from support import missing, start_ranks
from support.modelparallel_scripts import AUTOMATIC, GUIDE, MANUAL, NOTEBOOK

HAND = {"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0}
RESNET = {
    "microbatches": 8,
    "placement_strategy": "cluster",
    "pipeline": "interleaved",
    "optimize": "speed",
    "partitions": 2,
    "auto_partition": True,
    "ddp": True,
}

CASES = {
    "guide, automatic": (GUIDE.replace("{layers}", AUTOMATIC), 2, {"partitions": 2, "microbatches": 4}, "torchrun", 84),
    "guide, manual": (GUIDE.replace("{layers}", MANUAL), 4, {**HAND, "ddp": True}, "smdrun", 42),
    "notebook": (NOTEBOOK, 4, RESNET, "mpirun", 9),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(CASES))
def test_scripts_run_as_they_are(name, tmp_path):
    pytest.importorskip("sklearn")
    text, ranks, parameters, launcher, steps = CASES[name]
    if reason := missing(launcher):
        pytest.skip(reason)
    script = tmp_path / "script.py"
    script.write_text(text)
    env = {"SM_HP_MP_PARAMETERS": json.dumps(parameters)}
    with start_ranks(script, ranks, launcher=launcher, env=env, timeout=290) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    # Files, as launchers may tear lines of several ranks apart.
    found = [path.read_text() for path in tmp_path.glob("trained.*")]
    assert found == [str(steps)] * ranks, outcome.describe()
