"""Lookups of the package and its version by scripts and libraries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

#: Versions that published scripts require: transformers needs 1.10, and the API is that of 1.15.
NEEDED = ((1, 10), (1, 15))


def test_the_package_is_found_without_an_import_of_frameworks():
    program = """
import importlib.util, sys
for name in ("smdistributed", "smdistributed.modelparallel", "smdistributed.dataparallel"):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
assert importlib.util.find_spec("smdistributed.modelparallel.torch") is not None
from smdistributed.modelparallel import __version__
assert not {"torch", "tensorflow"} & sys.modules.keys()
print(__version__)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    found = tuple(int(part) for part in run.stdout.strip().split("."))
    assert all(found >= needed for needed in NEEDED)


def test_the_version_can_be_compared():
    version = pytest.importorskip("packaging.version")
    pytest.importorskip("torch")
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel import __version__

    assert smp.__version__ == __version__
    assert version.parse(smp.__version__) >= version.parse("1.15.0")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_finds_the_job(monkeypatch):
    from transformers.utils import import_utils

    def found():
        # Some versions of transformers cache the result.
        getattr(import_utils.is_sagemaker_mp_enabled, "cache_clear", lambda: None)()
        return import_utils.is_sagemaker_mp_enabled()

    with monkeypatch.context() as job:
        job.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2}')
        job.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_mpi_enabled": true}')
        assert found()
    assert not found()
