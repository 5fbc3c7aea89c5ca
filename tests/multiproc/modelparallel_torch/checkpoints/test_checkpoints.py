"""Checkpoints saved in one layout load bitwise in any other, and in plain PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import Forked, run_ranks

# The first test also pays for the fixture that saves the checkpoints.
pytestmark = pytest.mark.timeout(300)


def _model(torch):
    """Returns a model with a shared parameter, buffers, extra state, and rows that do not divide evenly."""
    from torch import nn

    class Counted(nn.Linear):
        """A linear layer with extra state, whose weight was named `before` in older checkpoints."""

        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.seen, self.last = 0, torch.zeros(2)
            self.register_load_state_dict_pre_hook(self._rename)

        def get_extra_state(self):
            return {"seen": self.seen, "last": self.last}

        def set_extra_state(self, found):
            self.seen, self.last = found["seen"], found["last"]

        @staticmethod
        def _rename(module, found, prefix, *_):
            if f"{prefix}before" in found:
                found[f"{prefix}weight"] = found.pop(f"{prefix}before")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(1001, 300)
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(300, 301), nn.GELU(), Counted(301, 300)) for _ in range(4))
            )
            self.norm = nn.BatchNorm1d(300)
            self.head = nn.Linear(300, 1001, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.norm(self.blocks(self.embedding(tokens).mean(1))))

    torch.manual_seed(1)
    return Model()


def _prepared(smp, torch, partitions):
    import torch.nn.functional as F

    smp.init({"partitions": partitions, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(_model(torch))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.named_parameters(), lr=0.01))

    @smp.step
    def step(model, tokens):
        loss = F.cross_entropy(model(tokens), tokens[:, 0])
        model.backward(loss)
        return loss

    def train(seed):
        tokens = torch.randint(0, 1001, (8, 5), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = step(model, tokens).reduce_mean()
        optimizer.step()
        return loss

    return model, optimizer, train


def _finish(smp, torch):
    smp.barrier()
    torch.distributed.destroy_process_group()


def _whole(model, optimizer):
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def _save(folder, partitions):
    import torch

    import smdistributed.modelparallel.torch as smp

    model, optimizer, train = _prepared(smp, torch, partitions)
    for seed in range(3):
        train(seed)
    content = {"epoch": 3, "seen": [1, 2.5, None], (1, "a"): {"mean": torch.arange(3)}, "name": b"\x00x"}
    for path, module in model.local_named_modules():
        if hasattr(module, "seen"):
            module.seen, module.last = len(path) * [smp.pp_rank()], torch.full((2,), 1.5)
    whole = _whole(model, optimizer)
    assert whole["model"]["blocks.3.2._extra_state"]["seen"] == [1] * len("blocks.3.2")
    names = whole["optimizer"]["param_groups"][0]
    assert names["param_names"] == [f"module.{name}" for name in names["params"]]
    only_first = model.state_dict(gather_to_rank0=True)
    if smp.pp_rank() == 0:
        _same(torch, dict(only_first), whole["model"], "first")
    else:
        assert only_first == {}
    with smp.CheckpointManager(f"{folder}/sharded", keep=2) as manager:
        assert manager.latest() is None
        for step in (1, 2, 3):
            manager.save(step, content)
        with pytest.raises(smp.exceptions.SMPCheckpointError, match="is a builtins"):
            manager.save(4, object())
        _one_rank_fails(smp, model, manager, folder)
    _load_hook_on_one_rank(smp, torch, model, whole["model"])
    smp.save_checkpoint(f"{folder}/files", "t", model=model, optimizer=optimizer, user_content={"epoch": 3})
    smp.save_checkpoint(f"{folder}/full", "t", partial=False, model=model, user_content={"epoch": 3})
    smp.save_checkpoint(f"{folder}/other", "t", model=model, optimizer=optimizer, format="sharded")
    if smp.dp_rank() == 0:
        smp.save({"m": model.local_state_dict(), "o": optimizer.local_state_dict()}, f"{folder}/object.pt")
    # One more step; jobs that resume have to reproduce its loss.
    after = train(7)
    if smp.rank() == 0:
        torch.save(whole, f"{folder}/expected.pt")
    smp.barrier()
    _finish(smp, torch)
    return float(after)


def _one_rank_fails(smp, model, manager, folder):
    """A failure on one rank raises on all ranks, and no rank waits."""

    def fail():
        raise ValueError("not now")

    module = next(module for _, module in model.local_named_modules() if hasattr(module, "seen"))
    if (smp.pp_rank(), smp.dp_rank()) == (1, 0):
        module.get_extra_state = fail
    fails = pytest.raises(smp.exceptions.SMPCheckpointError, match=r"rank \d: .*not now")
    if smp.dp_rank() == 0:
        with fails:
            model.state_dict()
    with fails:
        manager.save(5)
    for partial in (True, False):
        with fails:
            smp.save_checkpoint(f"{folder}/files", "failed", partial, model)
    vars(module).pop("get_extra_state", None)
    with pytest.raises(smp.exceptions.SMPCheckpointError, match=r"rank 0: .*creating `/dev/null`"):
        smp.CheckpointManager("/dev/null/folder")


def _load_hook_on_one_rank(smp, torch, model, whole):
    """A load hook on one rank may accept an unexpected key for all ranks."""
    found = {**whole, "more": torch.zeros(1)}
    module = next(module for _, module in model.local_named_modules() if hasattr(module, "seen"))
    if smp.pp_rank() == 1:
        hook = module.register_load_state_dict_post_hook(lambda _, keys: keys.unexpected_keys.remove("more"))
    model.load_state_dict(found)
    if smp.pp_rank() == 1:
        hook.remove()
        found["blocks.3.2.bias"] = torch.zeros(1)
    with pytest.raises(smp.exceptions.SMPCheckpointError, match=r"has the shape \[1\].*not in the model `more`"):
        model.load_state_dict(found)


def _same(torch, found, expected, where):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _same(torch, found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            _same(torch, one, other, f"{where}[{at}]")
    else:
        assert found == expected, where


def _load(folder, partitions, kind, before):
    import torch

    import smdistributed.modelparallel.torch as smp

    model, optimizer, train = _prepared(smp, torch, partitions)
    if not before:
        train(100)
    if kind == "sharded":
        content = smp.CheckpointManager(f"{folder}/sharded").load()
        assert content["seen"] == [1, 2.5, None]
        assert content["name"] == b"\x00x"
        assert torch.equal(content[1, "a"]["mean"], torch.arange(3))
    elif kind == "full":
        # Without a tag, the newest partial checkpoint would be loaded, but the folder has none.
        with pytest.raises(smp.exceptions.SMPCheckpointError, match="pass the `tag`"):
            smp.resume_from_checkpoint(f"{folder}/full")

        def of_before(found):
            return {name.replace("2.2.weight", "2.2.before"): tensor for name, tensor in found.items()}

        assert smp.resume_from_checkpoint(f"{folder}/full", "t", translate_function=of_before)["epoch"] == 3
    elif kind == "other":
        assert smp.resume_from_checkpoint(f"{folder}/other") == {}
    else:
        assert smp.resume_from_checkpoint(f"{folder}/{kind}")["epoch"] == 3
    if before:
        # A step in evaluation mode partitions the model, which then loads the checkpoint.
        model.eval()
        with torch.no_grad():
            _divide(smp, torch, model)
        model.train()
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    found = _whole(model, optimizer)
    _same(torch, found["model"], expected["model"], "model")
    if kind != "full":
        _same(torch, found["optimizer"], expected["optimizer"], "optimizer")
        _named(optimizer)
        optimizer.load_state_dict({**optimizer.local_state_dict()})
        _named(optimizer)
        assert optimizer.state_dict()["param_groups"] == expected["optimizer"]["param_groups"]
    else:
        model.module._register_state_dict_hook(lambda *_: None)
        with pytest.raises(smp.exceptions.SMPCheckpointError, match="`Model` overrides how its state is made"):
            model.state_dict()
        model.module._state_dict_hooks.clear()
    loss = train(7)
    _finish(smp, torch)
    return float(loss)


def _named(optimizer):
    for group in optimizer.param_groups:
        assert len(group["param_names"]) == len(group["params"])


def _divide(smp, torch, model):
    @smp.step
    def look(model, tokens):
        return model(tokens)

    look(model, torch.zeros(8, 5, dtype=torch.long))


def _plain(folder):
    """Reads the files with torch alone, without this library."""
    import torch

    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    model = _model(torch)
    model.load_state_dict(torch.load(f"{folder}/full/t", weights_only=True))
    _same(torch, dict(model.state_dict()), expected["model"], "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(expected["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    for index in range(2):
        part = torch.load(f"{folder}/files/t_partial/model_{index}_0.pt", weights_only=True)
        assert part.pop("_smp_is_partial") is True
        for name, tensor in part.items():
            _same(torch, tensor, expected["model"][name], name)
        assert torch.load(f"{folder}/object.pt_{index}", weights_only=True)["o"]["_smp_is_partial"] is True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves all kinds of checkpoints; returns the folder, and the loss of the step after the saves."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(_save, 4, str(folder), 2, launcher=Forked("torch"), timeout=110)


# `before`: resume before the model is partitioned, otherwise after its first step.
@pytest.mark.parametrize(
    ("partitions", "kind", "before"),
    [(4, "sharded", True), (1, "sharded", False), (4, "files", False), (2, "other", True), (1, "full", True)],
)
def test_layouts_load_into_each_other(saved, partitions, kind, before):
    folder, after = saved
    losses = run_ranks(_load, 4, str(folder), partitions, kind, before, launcher=Forked("torch"), timeout=110)
    assert losses == pytest.approx(after, rel=1e-5)


def test_files_can_be_read_by_other_tools(saved):
    folder, _ = saved
    assert sorted(os.listdir(folder / "sharded")) == ["newest", "step-2", "step-3"]
    manifest = json.loads((folder / "sharded/step-3/manifest.json").read_text())["manifest"]
    assert (manifest["world"], manifest["layout"]["pp"], manifest["layout"]["rdp"]) == (4, 2, 2)
    _plain(folder)
    merged = folder / "merged.safetensors"
    _smdrun("verify", folder / "sharded")
    _smdrun("merge", folder / "sharded", merged)
    text = _smdrun("inspect", folder / "sharded/step-2")
    assert "step-2: step 2, " in text
    assert "model/embedding.weight  F32 [1001, 300]" in text
    _merged_is_the_model(merged, folder)


def _smdrun(*words):
    command = [sys.executable, "-m", "smdistributed", "checkpoint", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _merged_is_the_model(merged: Path, folder: Path):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    model = _model(torch)
    model.load_state_dict(safetensors.load_file(merged), strict=False)
    expected = torch.load(folder / "expected.pt", weights_only=True)["model"]
    for name, tensor in model.state_dict().items():
        if not name.endswith("_extra_state"):
            _same(torch, tensor, expected[name], name)
