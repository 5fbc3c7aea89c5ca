"""Memory for loading a whole model from safetensors files: each rank reads only the tensors that it holds."""

from __future__ import annotations

import os

import pytest

from support import Forked, run_ranks

#: Limit for the resident bytes of a mapped file, low enough that a small model shows which tensors are read.
MAPPED_BYTES = 1 << 20


def _model():
    import torch
    import transformers

    sizes = {"vocab_size": 512, "n_embd": 384, "n_layer": 8, "n_head": 4, "n_positions": 64}
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _written_body(folder, shards):
    _model().save_pretrained(folder, max_shard_size="12MB" if shards else "1GB")
    return sorted(os.listdir(folder)), sum(each.nbytes for each in _model().parameters())


def _peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def _loaded_body(folder, settings):
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.checkpoint import hugging_face

    hugging_face._MAPPED_BYTES = MAPPED_BYTES
    smp.init({"ddp": True, "microbatches": 1, **settings})
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        whole = _model()
    model = smp.DistributedModel(whole)

    @smp.step
    def logits(model, ids):
        return model(input_ids=ids).logits

    ids = torch.arange(8).view(1, 8)
    model.eval()
    with torch.no_grad():
        expected = logits(model, ids).concat()
        for each in model.local_parameters():
            each.zero_()
        # Sets the peak to the memory that is resident now.
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = _peak_kib()
        smp.resume_from_checkpoint(folder, tag="pytorch_model.bin", partial=False, load_optimizer=False)
        peak = _peak_kib()
        assert torch.equal(logits(model, ids).concat(), expected)
    held = sum(each.nbytes for each in model.local_parameters())
    smp.shutdown()
    return (peak - before) * 1024, held


LAYOUTS = {
    "pipeline": {"partitions": 2},
    "tensor": {"tensor_parallel_degree": 2},
    "both": {"partitions": 2, "tensor_parallel_degree": 2},
    "sharded": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10},
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "layout", ["tensor", "sharded", *(pytest.param(each, marks=pytest.mark.more) for each in ("pipeline", "both"))]
)
def test_a_rank_reads_only_the_tensors_that_it_holds(layout, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    folder = os.fspath(tmp_path)
    is_indexed = layout in ("tensor", "pipeline")
    (written,) = run_ranks(_written_body, 1, folder, is_indexed, launcher=Forked("transformers"), timeout=60)
    names, whole = written
    assert ("model.safetensors.index.json" in names) == is_indexed
    settings = LAYOUTS[layout]
    ranks = 4 if layout == "both" else 2
    for growth, held in run_ranks(_loaded_body, ranks, folder, settings, launcher=Forked("transformers"), timeout=120):
        print(layout, growth, held, whole)
        assert held < 0.75 * whole
        # The growth is one tensor of the file, one mapping, and allocations of the interpreter.
        assert growth < whole / 4, (growth, held, whole)
