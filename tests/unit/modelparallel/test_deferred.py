"""Deferred tensors: operations on them run only when elements are needed."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUnsupportedError  # noqa: E402
from smdistributed.modelparallel.torch.checkpoint import deferred, hugging_face  # noqa: E402


def _deferred(whole, reads):
    return deferred.defer(whole, lambda: reads.append(1) or whole)


def test_operations_are_recorded():
    whole, reads = torch.arange(24.0).view(4, 6), []
    each = _deferred(whole, reads)
    query, key = each.t().contiguous().chunk(2)
    joined = torch.cat([key, query]).narrow(0, 1, 2)
    assert (tuple(joined.shape), joined.dtype, query.dim()) == ((2, 4), torch.float32, 2)
    assert not reads
    assert torch.equal(deferred.resolve(joined), torch.cat([whole.t()[3:], whole.t()[:3]])[1:3])
    assert len(reads) == 2
    # A slice is a view: its elements are not copied.
    assert deferred.resolve(query).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert deferred.resolve("text") == "text"


def test_functions_that_need_elements_get_them():
    each = _deferred(torch.tensor([2.0, 3.0]), [])
    assert each[1].item() == 3.0
    assert each.tolist() == [2.0, 3.0]
    assert torch.equal(each, torch.tensor([2.0, 3.0]))
    with pytest.raises(RuntimeError):
        each.view(3)


def test_changes_in_place_are_refused():
    each = _deferred(torch.ones(2), [])
    with pytest.raises(SMPUnsupportedError, match=r"`mul_` changes .* `clone\(\)`"):
        each.mul_(2)
    with pytest.raises(SMPUnsupportedError, match="`__setitem__`"):
        each[0] = 2
    assert torch.equal(deferred.resolve(each.clone() * 2), torch.full((2,), 2.0))


def test_a_model_in_several_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    values = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    for number, name in enumerate(values):
        safetensors.save_file({name: values[name]}, tmp_path / f"part-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    assert hugging_face.safetensors_instead(tmp_path / "pytorch_model.bin") is None
    index.write_text(json.dumps({"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}))
    assert hugging_face.safetensors_instead(tmp_path / "pytorch_model.bin") == index
    assert hugging_face.safetensors_instead(index) == index
    for is_deferred in (True, False):
        found = hugging_face.read_safetensors(index, is_deferred)
        assert found.keys() == values.keys()
        assert all(torch.equal(deferred.resolve(found[name]), each) for name, each in values.items())
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(SMPCheckpointError, match=r"part-1.safetensors"):
        hugging_face.read_safetensors(index)
    index.write_text("{}")
    with pytest.raises(SMPCheckpointError, match="is not an index"):
        hugging_face.read_safetensors(index)
