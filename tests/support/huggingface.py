"""Architectures of Hugging Face with the smallest sizes that their configurations allow. All other defaults stay
(`use_cache`, the implementation of attention, routing, tied weights).

Dropout probabilities are 0. Each partition draws random numbers of its own, so one process cannot draw the same ones.
The same holds for other random choices of a training forward (LayerDrop, SpecAugment, patch masks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH = 8
LENGTH = 12
VOCABULARY = 64

#: Small sizes, in the spellings of all architectures. Each configuration uses the attributes that it knows.
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
#: Parts of the names of probabilities for which a training forward draws random numbers.
_RANDOM = (
    "dropout",
    "drop_rate",
    "layerdrop",
    "drop_path",
    "mask_time_prob",
    "mask_feature_prob",
    "drop_prob",
    "pdrop",
    "jitter_noise",
)


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        kind: `model_type` of the configuration.
        task: The auto class that makes the model and the kind of its inputs: `causal`, `masked`, `seq2seq`, `image`,
            `sound`, `whisper`, `ctc`, `pretraining`.
        config: Values of the configuration beside those of `_TINY`.
        bare: Whether the values of `_TINY` are left out.
    """

    kind: str
    task: str = "causal"
    config: dict[str, Any] = field(default_factory=dict)
    bare: bool = False


def _gpt2(**config: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, **config}


_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_key_value_heads": None}
_DEEPSEEK = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "topk_method": "greedy",
}  # fmt: skip
_BERT: dict[str, Any] = {"type_vocab_size": 2, "pad_token_id": 0}

ARCHITECTURES: dict[str, Architecture] = {
    # Decoders.
    "llama": Architecture("llama"),
    "llama-tied": Architecture("llama", config={"tie_word_embeddings": True}),
    "mistral": Architecture("mistral", config={"sliding_window": 8}),
    "mixtral": Architecture("mixtral", config=_MOE),
    "qwen2": Architecture("qwen2"),
    "qwen2-moe": Architecture("qwen2_moe", config={**_MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": Architecture("qwen3", config={"head_dim": 8}),
    "qwen3-moe": Architecture("qwen3_moe", config={**_MOE, "head_dim": 8}),
    "gemma": Architecture("gemma", config={"head_dim": 8}),
    "gemma2": Architecture("gemma2", config={"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": Architecture("gemma3_text", config={"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi": Architecture("phi", config={"num_key_value_heads": 4}),
    "phi3": Architecture("phi3", config={"pad_token_id": 0}),
    "phimoe": Architecture("phimoe", config=_MOE),
    "falcon": Architecture("falcon"),
    "stablelm": Architecture("stablelm"),
    "olmo": Architecture("olmo"),
    "olmo2": Architecture("olmo2"),
    "olmo3": Architecture("olmo3"),
    "olmoe": Architecture("olmoe", config=_MOE),
    "deepseek-v2": Architecture("deepseek_v2", config=_DEEPSEEK),
    "deepseek-v3": Architecture("deepseek_v3", config=_DEEPSEEK),
    "gpt-oss": Architecture("gpt_oss", config={**_MOE, "head_dim": 8, "sliding_window": 8}),
    "cohere": Architecture("cohere"),
    "cohere2": Architecture("cohere2", config={"sliding_window": 8}),
    "granite": Architecture("granite"),
    "granitemoe": Architecture("granitemoe", config=_MOE),
    "glm": Architecture("glm", config={"head_dim": 8, "pad_token_id": 0}),
    "glm4": Architecture("glm4", config={"head_dim": 8, "pad_token_id": 0}),
    "smollm3": Architecture("smollm3", config={"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "starcoder2": Architecture("starcoder2"),
    "nemotron": Architecture("nemotron"),
    "persimmon": Architecture("persimmon"),
    "helium": Architecture("helium", config={"head_dim": 8}),
    "exaone4": Architecture("exaone4"),
    "ernie4.5": Architecture("ernie4_5"),
    "bitnet": Architecture("bitnet"),
    "gpt2": Architecture("gpt2", config=_gpt2(), bare=True),
    "gptj": Architecture("gptj", config=_gpt2(rotary_dim=4), bare=True),
    "gpt-neo": Architecture(
        "gpt_neo",
        config={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
        },
        bare=True,
    ),
    "gpt-neox": Architecture("gpt_neox"),
    "gpt-bigcode": Architecture("gpt_bigcode", config=_gpt2(), bare=True),
    "codegen": Architecture("codegen", config=_gpt2(n_ctx=64, rotary_dim=4), bare=True),
    "bloom": Architecture(
        "bloom", config={"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4}, bare=True
    ),
    "mpt": Architecture(
        "mpt",
        config={"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
        bare=True,
    ),
    "opt": Architecture("opt", config={"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "xglm": Architecture(
        "xglm",
        config={
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "num_layers": 4,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        bare=True,
    ),
    "biogpt": Architecture("biogpt"),
    "ctrl": Architecture("ctrl", config=_gpt2(dff=48), bare=True),
    "openai-gpt": Architecture("openai-gpt", config=_gpt2(), bare=True),
    "mamba": Architecture("mamba", config={"state_size": 4}),
    "mamba2": Architecture(
        "mamba2", config={"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
    ),
    "recurrent-gemma": Architecture(
        "recurrent_gemma", config={"lru_width": 32, "attention_window_size": 8, "head_dim": 8}
    ),
    "jamba": Architecture(
        "jamba",
        config={
            **_MOE,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "pad_token_id": 0,
        },
    ),
    "lfm2": Architecture("lfm2", config={"layer_types": ["conv", "full_attention"] * 2, "pad_token_id": 0}),
    "rwkv": Architecture("rwkv", config={"attention_hidden_size": 32}),
    # Encoders of text.
    "bert": Architecture("bert", "masked", _BERT),
    "roberta": Architecture("roberta", "masked", {**_BERT, "pad_token_id": 1}),
    "distilbert": Architecture(
        "distilbert",
        "masked",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48},
        bare=True,
    ),
    "albert": Architecture("albert", "masked", {"embedding_size": 16}),
    "electra": Architecture("electra", "pretraining", {"embedding_size": 16, **_BERT}),
    "deberta-v2": Architecture(
        "deberta-v2",
        "masked",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, **_BERT},
    ),
    "modernbert": Architecture(
        "modernbert",
        "masked",
        {
            "local_attention": 8,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mpnet": Architecture("mpnet", "masked", {"pad_token_id": 1}),
    "longformer": Architecture("longformer", "masked", {"attention_window": 4, **_BERT, "pad_token_id": 1}),
    "xlnet": Architecture(
        "xlnet",
        "causal",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48},
        bare=True,
    ),
    # Encoders and decoders.
    "t5": Architecture(
        "t5",
        "seq2seq",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        bare=True,
    ),
    "bart": Architecture("bart", "seq2seq", _SEQ2SEQ, bare=True),
    "pegasus": Architecture("pegasus", "seq2seq", _SEQ2SEQ, bare=True),
    "marian": Architecture("marian", "seq2seq", _SEQ2SEQ, bare=True),
    # Images.
    "vit": Architecture("vit", "image", _IMAGE),
    "beit": Architecture("beit", "image", _IMAGE),
    "dinov2": Architecture("dinov2", "image", _IMAGE),
    "swin": Architecture(
        "swin",
        "image",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        bare=True,
    ),
    "convnext": Architecture(
        "convnext", "image", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 64}, bare=True
    ),
    "resnet": Architecture(
        "resnet", "image", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, bare=True
    ),
    # Audio.
    "whisper": Architecture(
        "whisper",
        "whisper",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
        bare=True,
    ),
    "wav2vec2": Architecture(
        "wav2vec2",
        "ctc",
        {
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "conv_dim": [8, 8],
            "conv_stride": [4, 4],
            "conv_kernel": [6, 4],
            "num_feat_extract_layers": 2,
            "pad_token_id": 0,
        },
    ),
    "hubert": Architecture(
        "hubert",
        "ctc",
        {
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "conv_dim": [8, 8],
            "conv_stride": [4, 4],
            "conv_kernel": [6, 4],
            "num_feat_extract_layers": 2,
            "pad_token_id": 0,
        },
    ),
    "audio-spectrogram": Architecture(
        "audio-spectrogram-transformer",
        "sound",
        {
            "num_mel_bins": 8,
            "max_length": 16,
            "patch_size": 4,
            "time_stride": 4,
            "frequency_stride": 4,
            "num_key_value_heads": None,
        },
    ),
}

#: Models that do not run in float64 even in one process.
FLOAT32_ONLY = {"xlnet"}
#: Models that compute parts in float32 whatever their dtype. There, a difference in the last place of a float64 number
#: may become one of 1e-7. In the comparison in float64, these parts run in float64 on both sides.
FLOAT32_INSIDE = {
    "deepseek-v2": "its rotary embedding, router and norms cast to float32; here these casts are to float64",
    **dict.fromkeys(("gptj", "gpt-neo", "codegen"), "its attention casts to float32; here these casts are to float64"),
}

_AUTO = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
    "sound": "AutoModelForAudioClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
    "pretraining": "AutoModelForPreTraining",
}


def make(name: str) -> nn.Module:
    """Makes the model of an architecture, in PyTorch's default dtype and in training mode."""
    import transformers

    row = ARCHITECTURES[name]
    known = vars(transformers.AutoConfig.for_model(row.kind))
    sizes = {} if row.bare else {key: size for key, size in _TINY.items() if size is not None}
    values = {key: value for key, value in {**sizes, **row.config}.items() if value is not None}
    if row.config.get("num_key_value_heads", 0) is None:
        values.pop("num_key_value_heads", None)
    random = {
        key: 0.0 for key, value in known.items() if any(word in key for word in _RANDOM) and isinstance(value, int | float)
        and not isinstance(value, bool)
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(row.kind, **{**random, **values})
    dtype = torch.get_default_dtype()
    # The default implementation of experts, PyTorch's grouped matrix product, does not support float64.
    experts = {"experts_implementation": "eager"} if routes(name) and dtype is torch.float64 else {}
    return getattr(transformers, _AUTO[row.task]).from_config(config, dtype=dtype, **experts).train()


def routes(name: str) -> bool:
    """Whether an architecture is a mixture of experts."""
    return "num_experts_per_tok" in ARCHITECTURES[name].config


def batch(name: str, number: int) -> dict[str, torch.Tensor]:
    """Returns the keyword arguments of a step."""
    row = ARCHITECTURES[name]
    generator = torch.Generator().manual_seed(number)
    dtype = torch.get_default_dtype()

    def ids(low: int = 3, high: int = VOCABULARY, length: int = LENGTH) -> torch.Tensor:
        return torch.randint(low, high, (BATCH, length), generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64).to(dtype)

    if row.task == "image":
        size = row.config.get("image_size", 32)
        return {"pixel_values": floats(3, size, size), "labels": torch.randint(0, 2, (BATCH,), generator=generator)}
    if row.task == "sound":
        return {"input_values": floats(16, 8), "labels": torch.randint(0, 2, (BATCH,), generator=generator)}
    if row.task == "whisper":
        return {"input_features": floats(8, 24), "labels": ids()}
    if row.task == "ctc":
        return {"input_values": floats(400), "labels": ids(length=4)}
    if row.task == "seq2seq":
        return {"input_ids": ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64), "labels": ids()}
    if row.task == "pretraining":
        return {"input_ids": ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64), "labels": ids(0, 2)}
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}
