"""The scripts of examples/horovod under horovodrun, mpirun and torchrun.

``python tests/multiproc/horovod/test_examples.py`` runs each script under each launcher; arguments select scripts by
name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = {"torch_digits.py": "torch", "tensorflow_digits.py": "tensorflow", "keras_digits.py": "keras"}
ELASTIC = {"elastic_torch.py": "torch", "elastic_keras.py": "keras"}
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "-np", "2"]
LAUNCHERS = {
    "horovodrun": [*HOROVODRUN, sys.executable],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
#: horovodrun and torchrun restart failed workers; mpirun does not.
ELASTIC_LAUNCHERS = {
    "horovodrun": [*HOROVODRUN, "--min-np", "1", "--host-discovery-script", "{hosts}", sys.executable],
    "mpirun": LAUNCHERS["mpirun"],
    "torchrun": [*LAUNCHERS["torchrun"], "--max-restarts", "1"],
}


def run(command, script, timeout):
    """Runs a script under a launcher and returns the accuracy that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts"
        hosts.write_text("#!/bin/sh\necho localhost:2\n")
        hosts.chmod(0o755)
        words = [word.format(hosts=hosts) for word in command]
        done = subprocess.run(
            [*words, str(ROOT / "examples" / "horovod" / script)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"accuracy (0\.\d+|1\.0+) on 2 ranks", done.stdout)
    percent = re.search(r"(\d+\.\d)% of the digits are right", done.stdout)
    assert accuracy or percent, done.stdout + done.stderr
    return float(accuracy[1]) if accuracy else float(percent[1]) / 100


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("script", "launcher"), [("torch_digits.py", "mpirun")])
def test_an_example_learns(script, launcher):
    if importlib.util.find_spec(SCRIPTS[script]) is None:
        pytest.skip(f"{SCRIPTS[script]} is not installed")
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    assert run(LAUNCHERS[launcher], script, 400) > 0.8


if __name__ == "__main__":
    for names, launchers in ((SCRIPTS, LAUNCHERS), (ELASTIC, ELASTIC_LAUNCHERS)):
        for name in names:
            for launcher, command in launchers.items():
                if len(sys.argv) < 2 or name in sys.argv[1:]:
                    print(f"{name} under {launcher}: {run(command, name, 400):.1%} are right", flush=True)
