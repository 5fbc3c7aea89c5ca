"""The scripts of examples/horovod, under launchers that people use.

The long form: ``python tests/multiproc/test_horovod_examples.py`` runs each under each.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {"torch_digits.py": "torch", "tensorflow_digits.py": "tensorflow", "keras_digits.py": "keras"}
LAUNCHERS = {
    "horovodrun": [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run(script, launcher, timeout):
    """The accuracy that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(ROOT / "examples" / "horovod" / script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"accuracy (0\.\d+|1\.0+) on 2 ranks", done.stdout)
    assert accuracy, done.stdout + done.stderr
    return float(accuracy[1])


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("script", "launcher"), [("torch_digits.py", "mpirun")])
def test_an_example_learns(script, launcher):
    if importlib.util.find_spec(SCRIPTS[script]) is None:
        pytest.skip(f"{SCRIPTS[script]} is not installed")
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    assert run(script, launcher, 400) > 0.8


if __name__ == "__main__":
    for name in SCRIPTS:
        for command in LAUNCHERS:
            print(f"{name} under {command}: accuracy {run(name, command, 400):.3f}", flush=True)
