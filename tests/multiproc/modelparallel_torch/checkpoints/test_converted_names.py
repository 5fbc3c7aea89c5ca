"""Files that transformers 5 writes with the names and tensors of transformers 4: they are converted when they are
loaded."""

from __future__ import annotations

import os

import pytest

from support import Forked, run_ranks

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def _models():
    """Returns model makers by name: in a file one has other weight names, and one has a tensor for each expert."""
    import transformers

    image = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZES)
    # More than ten experts, whose names do not sort in the order of their numbers.
    experts = {"num_local_experts": 11, "num_key_value_heads": 2, "vocab_size": 19, "tie_word_embeddings": True}
    text = transformers.MixtralConfig(**SIZES, **experts)
    return {
        "renamed": lambda: transformers.ViTForImageClassification(image),
        "joined": lambda: transformers.MixtralForCausalLM(text),
    }


def _check_written(folder):
    """Writes both models with transformers, and one again without one expert; returns the models' state dicts."""
    import safetensors.torch
    import torch

    states = {}
    for name, make in _models().items():
        torch.manual_seed(3)
        model = make()
        where = os.path.join(folder, name)
        # The limit makes transformers write several files.
        model.save_pretrained(where, max_shard_size="20KB" if name == "joined" else "1GB")
        states[name] = model.state_dict()
    whole = {}
    for each in os.listdir(os.path.join(folder, "joined")):
        if each.endswith(".safetensors"):
            whole |= safetensors.torch.load_file(os.path.join(folder, "joined", each))
    assert not whole.keys() <= states["joined"].keys()
    lost = next(name for name in whole if ".experts.3." in name)
    del whole[lost]
    os.makedirs(os.path.join(folder, "incomplete"))
    safetensors.torch.save_file(whole, os.path.join(folder, "incomplete", "model.safetensors"))
    return states


def _check_loaded(folder, states, settings):
    import torch

    import smdistributed.modelparallel.torch as smp

    for name, make in _models().items():
        smp.init({"microbatches": 1, "ddp": True, **settings})
        torch.manual_seed(smp.rank())
        with smp.tensor_parallelism(smp.tp_size() > 1):
            whole = make()
        model = smp.DistributedModel(whole)

        @smp.step
        def run(model, inputs):
            return model(**inputs).logits

        smp.resume_from_checkpoint(os.path.join(folder, name), "pytorch_model.bin", partial=False)
        model.eval()
        with torch.no_grad():
            images, ids = {"pixel_values": torch.ones(1, 3, 8, 8)}, {"input_ids": torch.ones(1, 4, dtype=torch.long)}
            run(model, images if name == "renamed" else ids)
        # Layers of ViT that tensor parallelism replaces have names of their own.
        found = smp.state.module_manager.to_own_names(model.state_dict())
        assert found.keys() == states[name].keys()
        assert all(torch.equal(found[key], value) for key, value in states[name].items()), name
        if name == "joined":
            with pytest.raises(smp.exceptions.SMPCheckpointError, match="experts"):
                smp.resume_from_checkpoint(os.path.join(folder, "incomplete"), "pytorch_model.bin", partial=False)
        smp.shutdown()


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "settings",
    [{"partitions": 2}, {"sharded_data_parallel_degree": 2}, {"tensor_parallel_degree": 2}],
    ids=["pipeline", "shards", "slices"],
)
def test_files_are_converted_as_transformers_does(settings, tmp_path):
    pytest.importorskip("transformers.core_model_loading")
    folder = os.fspath(tmp_path)
    (states,) = run_ranks(_check_written, 1, folder, launcher=Forked("transformers"), timeout=60)
    run_ranks(_check_loaded, 2, folder, states, settings, launcher=Forked("transformers"), timeout=80)
