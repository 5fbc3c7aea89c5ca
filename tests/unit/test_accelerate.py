"""Hugging Face's accelerate with the backend ``smddp``: a replacement package chooses backends like accelerate does."""

from __future__ import annotations

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")

from smdistributed._common import import_hooks  # noqa: E402
from smdistributed.dataparallel.torch import _accelerate  # noqa: E402

_STATE = """
import enum, os

class DistributedType(str, enum.Enum):
    NO, MULTI_CPU, MULTI_GPU = "NO", "MULTI_CPU", "MULTI_GPU"

class PartialState:
    def __init__(self, cpu=False, backend=None, sagemaker=None):
        found, self.distributed_type = self._prepare_backend(cpu, sagemaker, backend)
        if backend is not None and found != backend:
            raise ValueError(f"Your assigned backend {backend} is not available, please use {found}")
        self.backend = found

    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if sagemaker_dp:
            return "smddp", DistributedType.MULTI_GPU
        if cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            return "gloo", DistributedType.MULTI_CPU
        return backend, DistributedType.NO
"""


@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
def test_accelerate_accepts_smddp_for_processes_on_cpus(first, tmp_path, monkeypatch):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(_STATE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("accelerate", "accelerate.state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(import_hooks, "_actions", {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    if first:
        state = importlib.import_module("accelerate.state")
        with pytest.raises(ValueError, match="smddp is not available"):
            state.PartialState(cpu=True, backend="smddp")
        _accelerate.install()
    else:
        _accelerate.install()
        state = importlib.import_module("accelerate.state")
    # A second installation has no effect.
    _accelerate.install()
    ours = state.PartialState(cpu=True, backend="smddp")
    assert (ours.backend, ours.distributed_type) == ("smddp", state.DistributedType.MULTI_CPU)
    # Other choices of backends are unchanged.
    assert state.PartialState(cpu=True).backend == "gloo"
    assert state.PartialState(sagemaker=True).distributed_type is state.DistributedType.MULTI_GPU
    assert state.PartialState(backend="smddp").distributed_type is state.DistributedType.NO
    with pytest.raises(ValueError, match="nccl is not available"):
        state.PartialState(cpu=True, backend="nccl")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert state.PartialState(cpu=True, backend="smddp").distributed_type is state.DistributedType.NO
    for name in ("accelerate", "accelerate.state"):
        sys.modules.pop(name, None)


def test_actions_run_after_each_import(tmp_path, monkeypatch):
    (tmp_path / "smd_imported_late.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(import_hooks, "_actions", {})
    seen = []

    def action():
        seen.append(sys.modules["smd_imported_late"].value)

    import_hooks.after_import("smd_imported_late", action)
    import_hooks.after_import("smd_imported_late", action)
    assert seen == []
    for _ in range(2):
        importlib.import_module("smd_imported_late")
    assert seen == [1]
    del sys.modules["smd_imported_late"]
    importlib.import_module("smd_imported_late")
    assert seen == [1, 1]
    del sys.modules["smd_imported_late"]
