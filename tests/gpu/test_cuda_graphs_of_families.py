"""The option `cuda_graphs` with small models of 29 families of transformers, under autocast and with their dropout:
losses and gradients have the bits of steps without graphs.
"""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.devices import needs_one

pytestmark = [pytest.mark.timeout(400), pytest.mark.more, needs_one]

_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 90,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 80,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}
_LOCAL = {**_GROUPED, "sliding_window": 5}
_GPT = {"vocab_size": 90, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
#: For each kind of model, the families with their configurations.
FAMILIES = {
    "AutoModelForCausalLM": {
        "gpt2": _GPT,
        "gptj": {**_GPT, "rotary_dim": 4},
        "gpt_neox": _SMALL,
        "phi": {**_SMALL, "resid_pdrop": 0.1},
        "phi3": {**_GROUPED, "resid_pdrop": 0.1},
        "opt": {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
        "bloom": {**_SMALL, "n_layer": 4, "n_head": 4},
        "falcon": {**_SMALL, "tie_word_embeddings": True},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": 90, "max_seq_len": 64},
        **dict.fromkeys(("mistral", "gemma2", "gemma3_text"), _LOCAL),
        **dict.fromkeys(("llama", "qwen2", "qwen3", "granite", "olmo2", "cohere", "stablelm", "smollm3"), _GROUPED),
    },
    "AutoModelForMaskedLM": {
        **dict.fromkeys(("bert", "roberta", "modernbert", "deberta-v2"), _SMALL),
        "electra": {**_SMALL, "embedding_size": 32},
        "albert": {**_SMALL, "embedding_size": 16},
        "distilbert": {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "vocab_size": 90},
    },
    "AutoModelForSeq2SeqLM": {
        "t5": {
            "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
            "vocab_size": 90, "decoder_start_token_id": 0,
        },
        "bart": {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 90,
            "max_position_embeddings": 64,
        },
    },
}  # fmt: skip
#: Families without graphs: layers that are left out at random draw on the host, and one copies numbers from the host.
WITHOUT = {
    "opt": "draws random numbers on the host",
    "bart": "draws random numbers on the host",
    "falcon": "cannot be captured",
}
#: Families that make a mask in a partition, and another one, with other roundings, in a capture.
ROUNDED = ("t5", "albert")


def _train(auto_class, family, settings, device, graphs):
    """Trains five steps; returns losses and gradients, whether there are graphs, and the warnings about them."""
    import warnings

    import torch
    import transformers

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime import recomputation

    # The models are small. Without a lower limit, their backwards recompute tensors, too.
    recomputation._MIN_BYTES = 0
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    module = getattr(transformers, auto_class).from_config(config).train()
    smp.init({"partitions": 2, "microbatches": 4, "memory_weight": 0.0, "cuda_graphs": graphs})
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    ids = torch.randint(3, 90, (8, 16), generator=torch.Generator().manual_seed(5)).to(device)

    @smp.step
    def step(model, ids):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    losses, gradients = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            losses.append(torch.stack(list(step(model, ids))))
            gradients += [each.grad.clone() for each in model.local_parameters() if each.grad is not None]
            optimizer.step()
    has_graphs = model.pipeline._capture is not None and model.pipeline._capture.num_graphs > 0
    smp.shutdown()
    return losses, gradients, has_graphs, [str(each.message) for each in caught if "cuda_graphs" in str(each.message)]


def _check_families():
    import torch

    torch.cuda.set_device(devices.own())
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda", torch.cuda.current_device())
    failed = []
    for auto_class, families in FAMILIES.items():
        for family, settings in families.items():
            alone, others, _, _ = _train(auto_class, family, settings, device, False)
            losses, gradients, has_graphs, texts = _train(auto_class, family, settings, device, True)
            if family in WITHOUT:
                is_right = not has_graphs and any(WITHOUT[family] in each for each in texts)
            else:
                # Without gradients, this rank got no layers: the cut depends on measured times.
                is_right = (has_graphs or not gradients) and not texts
            if family in ROUNDED:
                is_right = is_right and torch.allclose(torch.stack(losses), torch.stack(alone), rtol=1e-2)
            else:
                is_right = is_right and all(map(torch.equal, losses + gradients, alone + others))
            if not is_right:
                failed.append((family, has_graphs, len(gradients), texts))
    return failed


def test_families_of_transformers_have_the_bits_of_steps_without_graphs():
    pytest.importorskip("transformers")
    assert run_ranks(_check_families, 2, timeout=300) == [[]] * 2
