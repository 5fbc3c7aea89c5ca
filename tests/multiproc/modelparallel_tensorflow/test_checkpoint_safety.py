"""Failing saves and restores: the same error on all ranks within seconds, and the existing checkpoints stay unchanged.

Checkpoint names that lead outside the folder are rejected.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import pytest

from support import Forked, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(240),
]
#: Within this time all ranks must raise the error of a failing rank.
_SOON_SECONDS = 10.0
_UNITS = 192


def _job():
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.one, self.two = tf.keras.layers.Dense(_UNITS, "tanh"), tf.keras.layers.Dense(_UNITS)

        def call(self, x):
            return self.two(self.one(x))

    smp.init({"partitions": 2, "microbatches": 1})
    model, optimizer = Model(), tf.keras.optimizers.SGD(0.1)

    @smp.step
    def gradients(x):
        return optimizer.get_gradients(tf.reduce_mean(tf.square(model(x))), model.trainable_variables)

    found = gradients(tf.ones([2, _UNITS]))
    optimizer.apply_gradients(zip([each.reduce_mean() for each in found], model.trainable_variables, strict=True))
    return smp, tf.train.Checkpoint(model=model, optimizer=optimizer)


def _error(smp, call, kind=None):
    """Returns the text of the error that `call` raises; asserts that it is prompt and equal on all ranks."""
    from smdistributed.modelparallel.exceptions import SMPCheckpointError

    start = time.monotonic()
    with pytest.raises(kind or SMPCheckpointError) as caught:
        call()
    took = time.monotonic() - start
    texts = smp.allgather(str(caught.value), smp.CommGroup.WORLD)
    assert len(set(texts)) == 1, texts
    assert took < _SOON_SECONDS, f"{took:.1f} s: {texts[0]}"
    return texts[0]


def _contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


def _safety(folder):
    import resource

    from smdistributed.modelparallel.exceptions import SMPValidationError

    smp, checkpoint = _job()
    for form in ("tensorflow", "sharded"):
        for name in ("../evil", f"{folder}/evil", "newest"):
            make = lambda name=name, form=form: smp.CheckpointManager(  # noqa: E731
                checkpoint, f"{folder}/names", checkpoint_name=name, format=form
            )
            _error(smp, make, SMPValidationError)
        root = Path(folder, form)
        manager = smp.CheckpointManager(checkpoint, str(root), format=form)
        older = manager.save(checkpoint_number=1)
        smp.barrier()
        before = _contents(root)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for victim in range(2):
            if smp.rank() == victim:
                # Writes beyond 16 KiB fail, as on a full disk.
                resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
            text = _error(smp, lambda manager=manager: manager.save(checkpoint_number=1))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert f"rank {victim}: " in text, text
            assert _contents(root) == before, f"{form}: the failed save has changed or left files"
            assert not list(root.glob(".*")), os.listdir(root)
            smp.barrier()
        # Without the limit the save succeeds. Then a file that rank 1 reads is damaged.
        path = manager.save(checkpoint_number=2)
        smp.barrier()
        if smp.rank() == 0:
            _corrupt(root, form)
        smp.barrier()
        text = _error(smp, lambda manager=manager, path=path: manager.restore(path))
        assert "rank 1: " in text, text
        assert manager.restore(older) == older
        smp.barrier()
    # A folder with a user's file has the name of a checkpoint.
    if smp.rank() == 0:
        Path(folder, "sharded/ckpt-7").mkdir()
        Path(folder, "sharded/ckpt-7/photo").write_text("mine")
    smp.barrier()
    text = _error(smp, lambda: manager.save(checkpoint_number=7))
    assert "a save replaces only what it wrote" in text, text
    assert Path(folder, "sharded/ckpt-7/photo").read_text() == "mine"
    return sorted(os.listdir(folder))


def _corrupt(root, form):
    """Flips a bit in a file that only rank 1 reads."""
    if form == "sharded":
        file = max(root.glob("ckpt-2/rank-00001-*.safetensors"), key=lambda each: each.stat().st_size)
    else:
        file = root / "ckpt-2.data-00001-of-00002"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_failing_saves_and_restores_are_the_same_error_on_all_ranks(tmp_path):
    found = run_ranks(_safety, 2, str(tmp_path), launcher=Forked("tensorflow"), env=ENV, timeout=200)
    assert found[0] == ["sharded", "tensorflow"]
