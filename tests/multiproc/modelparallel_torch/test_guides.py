"""Scripts of the published guides, under every launcher."""

from __future__ import annotations

import json

import pytest

from support import missing, more, start_ranks
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

#: Script, parameters, and the number of steps that a rank trains with one replica and with two.
SCRIPTS = {
    "guide, automatic": (GUIDE.replace("{layers}", AUTOMATIC), {"partitions": 2, "microbatches": 4}, (84, 42)),
    "guide, manual": (GUIDE.replace("{layers}", MANUAL), HAND, (84, 42)),
    "notebook": (NOTEBOOK, RESNET, (18, 9)),
}
#: `tests/e2e/modelparallel_guides.py` runs the others.
CASES = [
    ("guide, automatic", 2, "torchrun"),
    more("guide, manual", 4, "smdrun"),
    more("notebook", 4, "mpirun"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "ranks", "launcher"), CASES)
def test_scripts_run_as_they_are(name, ranks, launcher, tmp_path):
    pytest.importorskip("sklearn")
    if reason := missing(launcher):
        pytest.skip(reason)
    check(name, ranks, launcher, tmp_path)


def check(name, ranks, launcher, folder):
    """Runs a script in ``folder``; asserts the number of steps on each rank. The script itself asserts that its loss
    falls."""
    text, parameters, steps = SCRIPTS[name]
    replicas = ranks // parameters["partitions"]
    script = folder / "script.py"
    script.write_text(text)
    env = {"SM_HP_MP_PARAMETERS": json.dumps(parameters | {"ddp": replicas > 1})}
    with start_ranks(script, ranks, launcher=launcher, env=env, timeout=290) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    # Results are in files, because a launcher may mix the output of several ranks.
    found = [path.read_text() for path in folder.glob("trained.*")]
    assert found == [str(steps[replicas - 1])] * ranks, outcome.describe()
