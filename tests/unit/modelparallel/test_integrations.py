"""Stand-ins for Apex, and helpers of scripts' tests."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")

import smdistributed.modelparallel.torch as smp  # noqa: E402
from smdistributed._common import lifecycle  # noqa: E402
from smdistributed.modelparallel.exceptions import SMPCheckpointError  # noqa: E402
from smdistributed.modelparallel.test.torch.utils import dump_model, verify  # noqa: E402
from smdistributed.modelparallel.torch.integrations import apex  # noqa: E402


@pytest.fixture
def job(monkeypatch):
    """A job of one process, without the others' variables."""
    for name in ("SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS", "SMP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    smp.init({})
    yield smp
    smp.shutdown()
    lifecycle.shutdown()


@pytest.mark.skipif(
    importlib.util.find_spec("apex") is None or not isinstance(importlib.util.find_spec("apex").loader, apex._Finder),
    reason="Apex is installed",
)
def test_scripts_import_apex_where_it_is_not_installed():
    apex._warn.cache_clear()
    with pytest.raises(ImportError):
        from apex import amp  # noqa: F401
    with pytest.raises(ImportError):
        from apex.normalization import FusedRMSNorm  # noqa: F401
    import amp_C

    with pytest.warns(UserWarning, match="Apex is not installed"):
        norm = amp_C.multi_tensor_l2norm
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad

    assert FusedLayerNorm is smp.nn.FusedLayerNorm
    assert (FusedAdam, FusedLAMB) == (smp.optimizers.FusedAdam, smp.optimizers.FusedLAMB)
    assert FusedNovoGrad is smp.optimizers.FusedNovoGrad
    scale = amp_C.multi_tensor_scale
    flag = torch.zeros(1, dtype=torch.int)
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    total, each = multi_tensor_applier(norm, flag, [gradients], True)
    assert (total.tolist(), each.tolist()) == ([5.0], [3.0, 4.0])
    assert multi_tensor_applier(norm, flag, [gradients], False)[1].numel() == 0
    half = [torch.empty(2, dtype=torch.float16), torch.empty(1, 1)]
    multi_tensor_applier(scale, flag, [gradients, half], 0.5)
    assert ([part.tolist() for part in half], flag.item()) == ([[1.5, 0.0], [[2.0]]], 0)
    multi_tensor_applier(scale, flag, [[torch.tensor([1e9])], [torch.empty(1, dtype=torch.float16)]], 1.0)
    assert flag.item() == 1


def test_a_dump_is_verified(job, tmp_path):
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    dump_model(model, tmp_path / "dump.pt")
    verify(model, tmp_path / "dump.pt")
    with torch.no_grad():
        model.module.bias[1] += 1.0
    with pytest.raises(SMPCheckpointError, match="`bias` differs"):
        verify(model, tmp_path / "dump.pt")
    verify(model, tmp_path / "dump.pt", atol=1.1)
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "other.pt")
    with pytest.raises(SMPCheckpointError, match=r"only one of both has \['bias'\]"):
        verify(model, tmp_path / "other.pt")
