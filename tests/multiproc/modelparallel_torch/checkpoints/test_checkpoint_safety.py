"""Failing saves and loads: the same error on all ranks within seconds, and existing checkpoints stay unchanged.

A save replaces only files that a save has written, and checkpoint names cannot lead outside the folder.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.timeout(300)
#: Within this time all ranks must raise the error of a failing rank.
_SOON_SECONDS = 10.0
_KINDS = ("partial", "full", "sharded", "manager", "asynchronous")


class Settings:
    """A user's class in the user content of a checkpoint."""

    def __init__(self, width):
        self.width = width


def _job(units=192):
    import torch
    import torch.nn.functional as F

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 1, "ddp": True})
    torch.manual_seed(3)
    layers = [torch.nn.Linear(units, units) for _ in range(4)]
    model = smp.DistributedModel(torch.nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def step(model, x):
        loss = F.mse_loss(model(x), x)
        model.backward(loss)
        return loss

    step(model, torch.ones(2, units))
    optimizer.step()
    return smp, model, optimizer


def _save(smp, model, optimizer, folder, kind, tag, content=None):
    """Saves a checkpoint of a kind; returns when it is complete."""
    both = {"model": model, "optimizer": optimizer}
    if kind == "partial":
        smp.save_checkpoint(folder, tag, user_content=content, **both)
    elif kind == "full":
        smp.save_checkpoint(folder, tag, partial=False, model=model, user_content=content)
    elif kind == "sharded":
        smp.save_checkpoint(folder, tag, user_content=content, format="sharded", **both)
    else:
        manager = smp.CheckpointManager(folder, asynchronous=kind == "asynchronous")
        manager.save(1, content, tag=tag)
        manager.wait()


def _load(smp, folder, kind, tag, **options):
    if kind in ("manager", "asynchronous"):
        return smp.CheckpointManager(folder).load(tag)
    return smp.resume_from_checkpoint(folder, tag, partial=kind != "full", **options)


def _error(smp, call):
    """Returns the text of the error that `call` raises; asserts that it is prompt and equal on all ranks."""
    start = time.monotonic()
    with pytest.raises(smp.exceptions.SMPCheckpointError) as caught:
        call()
    took = time.monotonic() - start
    texts = smp.allgather(str(caught.value), smp.CommGroup.WORLD)
    assert len(set(texts)) == 1, texts
    assert took < _SOON_SECONDS, f"{took:.1f} s: {texts[0]}"
    return texts[0]


def _snapshot(folder):
    """Returns everything below a folder: files with their bytes, links with their targets, and folders."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        entry = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = entry
    return found


def _name(kind, tag):
    return f"{tag}_partial" if kind == "partial" else tag


def _check_rejected_saves(folder):
    smp, model, optimizer = _job(8)
    is_first = smp.rank() == 0
    root = Path(folder, "root")
    if is_first:
        root.mkdir()
    smp.barrier()
    for kind in _KINDS:
        save = functools.partial(_save, smp, model, optimizer, root, kind)
        # Invalid checkpoint names.
        for tag in ("../evil", f"{folder}/evil", "", ".hidden", "newest"):
            text = _error(smp, lambda save=save, tag=tag: save(tag))
            assert "is not a valid name for a checkpoint" in text, text
            assert "is not a valid name for a checkpoint" in _error(
                smp, lambda kind=kind, tag=tag: _load(smp, root, kind, tag)
            )
        assert "ranks disagree" in _error(smp, lambda save=save: save(f"of-{smp.rank()}"))
        assert _snapshot(folder) == {"root": None}, kind
        smp.barrier()
    # A user's folder, file and link with the names of checkpoints.
    if is_first:
        for kind in _KINDS:
            path = root / _name(kind, f"folder-{kind}")
            path.mkdir()
            (path / "photo").write_text("mine")
            (root / _name(kind, f"file-{kind}")).write_text("mine")
            (root / _name(kind, f"link-{kind}")).symlink_to("..")
        (root / "user_content_of").write_text("mine")
    smp.barrier()
    before = _snapshot(folder)
    for kind in _KINDS:
        save = functools.partial(_save, smp, model, optimizer, root, kind)
        for entry in ("folder", "file", "link"):
            text = _error(smp, lambda save=save, tag=f"{entry}-{kind}": save(tag))
            assert "a save replaces only what it wrote" in text, text
    assert "user_content_of` is a file" in _error(smp, lambda: _save(smp, model, optimizer, root, "full", "of"))
    assert _snapshot(folder) == before
    smp.barrier()
    # Checkpoints of another kind, and a checkpoint folder with a user's file in it.
    for kind in ("full", "sharded"):
        _save(smp, model, optimizer, root, kind, f"older-{kind}")
    smp.barrier()
    before = _snapshot(folder)
    assert "is a file" in _error(smp, lambda: _save(smp, model, optimizer, root, "sharded", "older-full"))
    assert "is a folder" in _error(smp, lambda: _save(smp, model, optimizer, root, "full", "older-sharded"))
    assert _snapshot(folder) == before
    smp.barrier()
    if is_first:
        (root / "older-sharded/notes.txt").write_text("mine")
    smp.barrier()
    assert "holds `notes.txt`" in _error(smp, lambda: _save(smp, model, optimizer, root, "manager", "older-sharded"))


def test_a_save_replaces_only_checkpoints_in_its_folder(tmp_path):
    run_ranks(_check_rejected_saves, 2, str(tmp_path), launcher=Forked("torch"), timeout=150)


def _full_disk(folder, full):
    """Saves with a file size limit of 16 KiB on one rank after the other, or (with `full`) on a full disk."""
    import resource

    smp, model, optimizer = _job()
    root = Path(folder, "root")
    for kind in _KINDS:
        _save(smp, model, optimizer, root, kind, f"t-{kind}", {"step": 1})
    smp.barrier()
    before = _snapshot(root)
    # Rank 0 fills the disk only when all ranks have seen it without that file.
    smp.barrier()
    texts = []
    for kind in _KINDS:
        for victim in range(1 if full else smp.size()):
            save = functools.partial(_save, smp, model, optimizer, root, kind, f"t-{kind}", {"step": 2})
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if full and smp.rank() == 0:
                _fill(root)
            elif smp.rank() == victim:
                resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
            smp.barrier()
            if kind == "full" and victim > 0:
                # Only rank 0 writes a full checkpoint, so a limit on another rank has no effect.
                save()
            else:
                texts.append((kind, victim, _error(smp, save)))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            smp.barrier()
            if smp.rank() == 0:
                (root / "filler").unlink(missing_ok=True)
            smp.barrier()
            if kind == "full" and victim > 0:
                before = _snapshot(root)
            assert _snapshot(root) == before, f"{kind}: the failed save has changed or left files"
            smp.barrier()
    # Without the limit, saves to the same names succeed.
    for kind in _KINDS:
        _save(smp, model, optimizer, root, kind, f"t-{kind}", {"step": 3})
        assert _load(smp, root, kind, f"t-{kind}")["step"] == 3
    return texts


def _fill(root):
    with open(root / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


def test_a_failing_write_raises_on_all_ranks_and_leaves_no_files(tmp_path):
    texts = run_ranks(_full_disk, 2, str(tmp_path), False, launcher=Forked("torch"), timeout=150)[0]
    for kind, victim, text in texts:
        assert f"rank {victim}: " in text, (kind, text)
        assert "could not be written" in text, (kind, text)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root can mount a small disk")
def test_a_full_disk_raises_on_all_ranks_and_leaves_no_files(tmp_path):
    small = tmp_path / "root"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "smd-test", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        texts = run_ranks(_full_disk, 2, str(tmp_path), True, launcher=Forked("torch"), timeout=150)[0]
        assert [kind for kind, _, _ in texts] == list(_KINDS)
        assert all("No space left on device" in text or "unexpected pos" in text for _, _, text in texts), texts
    finally:
        subprocess.run(["umount", "-l", small], check=False)


def _damaged(folder):
    smp, model, optimizer = _job()
    texts = {}
    for kind in _KINDS:
        for damage in ("missing", "altered"):
            root = Path(folder, f"{kind}-{damage}")
            _save(smp, model, optimizer, root, kind, "t", {"step": 1})
            smp.barrier()
            if smp.rank() == 0:
                _damage(root, kind, damage)
            smp.barrier()
            texts[kind, damage] = _error(smp, lambda root=root, kind=kind: _load(smp, root, kind, "t"))
    return texts


def _damage(root, kind, damage):
    """Removes a file that only rank 1 reads, or flips a bit in it. A full checkpoint has one file, which rank 0
    reads."""
    if kind == "partial":
        file = root / "t_partial/model_1_0.pt"
    elif kind == "full":
        file = root / "t"
    else:
        file = max(root.glob("t/rank-00001-*.safetensors"), key=lambda each: each.stat().st_size)
    if damage == "missing":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_file_is_the_same_error_on_all_ranks(tmp_path):
    texts = run_ranks(_damaged, 2, str(tmp_path), launcher=Forked("torch"), timeout=150)[0]
    for (kind, damage), text in texts.items():
        culprit = 0 if kind == "full" else 1
        assert f"rank {culprit}: " in text, (kind, damage, text)
        assert "could not be loaded" in text, (kind, damage, text)


def _saved_and_damaged(folder):
    smp, model, optimizer = _job()
    for kind in ("partial", "full"):
        _save(smp, model, optimizer, folder, kind, f"t-{kind}")
    with smp.CheckpointManager(folder, threads=4) as manager:
        manager.save(1, tag="t-manager")


def _before_the_first_step(folder, kind):
    """Returns the error of the first step, which partitions the model and loads a checkpoint that does not fit."""
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 1, "ddp": True})
    # The last layer, on the second partition, has another size than the saved one.
    sizes = [(192, 192), (192, 192), (192, 192), (192, 191 if kind != "manager" else 192)]
    model = smp.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(*each) for each in sizes)))
    # Each writer thread writes a file. The damaged one may contain optimizer state only, so an optimizer has to load,
    # too.
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    _load(smp, folder, kind, f"t-{kind}")
    return _error_of_each_step(smp, model, 192)


def _error_of_each_step(smp, model, units):
    """Returns the error of a step whose partitioning fails; asserts that a second step raises the same one."""
    import torch

    @smp.step
    def step(model, x):
        return model(x)

    texts = {_error(smp, lambda: step(model, torch.ones(2, units))) for _ in range(2)}
    assert len(texts) == 1, texts
    return texts.pop()


def test_a_checkpoint_that_does_not_fit_raises_when_the_model_is_partitioned(tmp_path):
    run_ranks(_saved_and_damaged, 2, str(tmp_path), launcher=Forked("torch"), timeout=100)
    shard = max(tmp_path.glob("t-manager/rank-00001-*.safetensors"), key=lambda each: each.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for kind, words in (("manager", "checksum"), ("partial", "has the shape"), ("full", "has the shape")):
        texts = run_ranks(_before_the_first_step, 2, str(tmp_path), kind, launcher=Forked("torch"), timeout=100)
        assert words in texts[0], (kind, texts)


def _check_state_that_does_not_fit():
    import torch

    import smdistributed.modelparallel.torch as smp

    for manual in ({}, {"auto_partition": False, "default_partition": 0}):
        smp.init({"partitions": 2, "microbatches": 1, "ddp": True, **manual})
        network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 7))
        if manual:
            smp.set_partition(network[1], 1)
        model = smp.DistributedModel(network)
        # The state fits on the first replica only.
        model.load_state_dict(network.state_dict() if smp.dp_rank() == 0 else other.state_dict())
        text = _error_of_each_step(smp, model, 8)
        assert "`1.weight` has the shape [7, 8] in the state and [8, 8] in the model" in text, text
        smp.shutdown()


def test_a_state_that_does_not_fit_one_replica_is_the_same_error_on_all_ranks_in_each_step():
    run_ranks(_check_state_that_does_not_fit, 4, launcher=Forked("torch"), timeout=100)


def _check_whole_again():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 1, "auto_partition": False, "default_partition": 0})
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    smp.set_partition(network[1], 1)
    model = smp.DistributedModel(network)

    @smp.step
    def step(model, x):
        return model(x)

    step(model, torch.ones(2, 8))
    model.cpu()
    with pytest.raises(smp.exceptions.SMPUsageError, match="no steps after"):
        step(model, torch.ones(2, 8))
    # The model has not been partitioned again.
    assert network(torch.ones(2, 8)).shape == (2, 8)


def test_a_model_that_is_whole_again_is_not_divided_by_a_step():
    run_ranks(_check_whole_again, 2, launcher=Forked("torch"), timeout=60)


def _contents(folder):
    import numpy as np
    import torch

    smp, model, optimizer = _job(8)
    content = {"best": np.float64(0.5), "settings": Settings(3)}
    for kind in ("partial", "full"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _save(smp, model, optimizer, folder, kind, f"t-{kind}", content)
        messages = [str(each.message) for each in caught if "the user content holds" in str(each.message)]
        assert len(messages) == (smp.rank() == 0), messages
        assert all("Settings" in each and "numpy" in each for each in messages), messages
        text = _error(smp, lambda kind=kind: _load(smp, folder, kind, f"t-{kind}"))
        assert "Settings" in text
        assert "safe_globals" in text
        allowed = [Settings, np.dtype, np.float64, type(np.dtype("float64")), np.float64(0.5).__reduce__()[0]]
        for options in ({"safe_globals": allowed}, {"weights_only": False}):
            found = _load(smp, folder, kind, f"t-{kind}", **options)
            assert (found["best"], found["settings"].width) == (0.5, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _save(smp, model, optimizer, folder, kind, f"t-{kind}", {"best": 0.5, "mean": torch.ones(2)})
        assert _load(smp, folder, kind, f"t-{kind}")["best"] == 0.5
    # A save without user content removes the content of the older checkpoint of that name.
    _save(smp, model, optimizer, folder, "full", "t-full")
    assert _load(smp, folder, "full", "t-full") == {}
    smp.barrier()
    # The sharded format stores user content as JSON; an unsupported value raises with its path.
    _save(smp, model, optimizer, folder, "manager", "numbers", {"best": np.float64(0.5)})
    assert _load(smp, folder, "manager", "numbers") == {"best": 0.5}
    assert "`user_content['settings']` is a" in _error(
        smp, lambda: _save(smp, model, optimizer, folder, "manager", "t", content)
    )
    return sorted(os.listdir(folder))


def test_user_content_that_needs_safe_globals_warns_when_it_is_saved(tmp_path):
    found = run_ranks(_contents, 2, str(tmp_path), launcher=Forked("torch"), timeout=100)
    assert [name for name in found[0] if not name.startswith(".")] == [
        "newest",
        "numbers",
        "t-full",
        "t-partial_partial",
    ]


def _one_copy(folder):
    import torch

    smp, _, _ = _job(8)
    manager = smp.CheckpointManager(folder)
    dense, turned = torch.rand(3, 4), torch.rand(4, 3).t()
    copies, owned = manager._on_host({"dense": dense, "turned": turned})
    # A tensor that was made contiguous is a copy already, and the core does not copy it again. Other tensors it copies,
    # because training may change them.
    assert owned == {"turned"}
    assert copies["dense"].data_ptr() == dense.data_ptr()
    assert copies["turned"].is_contiguous()
    manager.save(1, {"turned": turned, "dense": dense})
    turned.zero_()
    dense.zero_()
    found = manager.load()
    assert torch.equal(found["turned"], copies["turned"])
    assert float(found["dense"].min()) > 0
    return [each.is_held for each in (_block("a", copies["turned"], True, None), _block("b", dense, False, None))]


def _block(*arguments):
    from smdistributed.modelparallel.torch.checkpoint import manager

    return manager._block(*arguments)


def test_a_copy_is_not_copied_again(tmp_path):
    assert run_ranks(_one_copy, 2, str(tmp_path), launcher=Forked("torch"), timeout=60) == [[True, False]] * 2
