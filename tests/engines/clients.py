"""Scripts that train with client libraries, as two ranks and as one process.

two, one = both(tmp_path, "write(weights=weights(make_model()))")
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.launchers import clean_environment

ROOT = Path(__file__).resolve().parents[2]
#: Where `make test-clients` puts the libraries.
CLIENTS = ROOT / "build" / "clients"


def needs_libraries(*names):
    """Skips a test where `make test-clients` has not installed these packages."""
    missing = [name for name in names if not (CLIENTS / name).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"`make test-clients` installs {missing}")


COMMON = """
import json, os, sys
# Libraries import it where it is installed, for tens of seconds.
sys.modules["tensorflow"] = None
# Lightning initializes MPI where mpi4py is installed. Alone, Open MPI then starts a daemon, which needs ssh.
sys.modules["mpi4py"] = None
import torch
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
def write(**results):
    with open(os.path.join(os.environ["WORK"], f"rank{rank}.{size}.json"), "w") as file:
        json.dump(results, file)
def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
def weights(model):
    return [float(number) for parameter in model.parameters() for number in parameter.detach().flatten()]
inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
targets = inputs.sum(1, keepdim=True)
"""


def run(tmp_path, script, *, ranks=2, launcher=None, first="", **variables):
    """Runs the script on all ranks and returns the results that each rank wrote. `launcher` replaces the command `smdrun`."""
    path = tmp_path / "client.py"
    path.write_text(first + COMMON + textwrap.dedent(script))
    environment = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(CLIENTS)]),
        "WORK": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "USE_TF": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    words = [sys.executable, "-m", "smdistributed", "-n", str(ranks)] if ranks > 1 else [sys.executable]
    words = words if launcher is None else launcher
    done = subprocess.run(
        [*words, str(path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((tmp_path / f"rank{rank}.{ranks}.json").read_text()) for rank in range(ranks)]


def both(tmp_path, script):
    """The results of two ranks, which must be equal, and of one process."""
    two = run(tmp_path, script)
    assert two[0]["weights"] == two[1]["weights"]
    (one,) = run(tmp_path, script, ranks=1)
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=2e-6)
    return two, one
