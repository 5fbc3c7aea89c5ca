"""GPT-Neo."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.causal import causal
from smdistributed.modelparallel.torch.nn.huggingface.names import NameTable, Weight, product, translations
from smdistributed.modelparallel.torch.nn.options import BlockOptions

NAMES = NameTable(
    base="transformer.",
    layers="h.{}.",
    layer=[
        *product("attention.pre_layernorm", "ln_1"),
        *product("attention.query", "attn.attention.q_proj"),
        *product("attention.key", "attn.attention.k_proj"),
        *product("attention.value", "attn.attention.v_proj"),
        *product("attention.dense", "attn.attention.out_proj"),
        *product("output.pre_layernorm", "ln_2"),
        *product("output.dense1", "mlp.c_fc"),
        *product("output.dense2", "mlp.c_proj"),
    ],
    rest=[
        Weight(("embeddings.word_embedding.weight",), "transformer.wte.weight"),
        Weight(("embeddings.position_embedding.weight",), "transformer.wpe.weight"),
        *product("lm_head.layernorm", "transformer.ln_f"),
        Weight(("lm_head.weight",), "lm_head.weight"),
    ],
    masks="attn.attention",
)


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    del module
    windows = tuple(config.window_size if kind == "local" else None for kind in config.attention_layers)
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.max_position_embeddings,
        "options": BlockOptions(qkv_bias=False, attention_scale=1.0, attention_in_fp32=True, windows=windows),
    }


translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_gptneo
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_gptneo
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"GPTNeoForCausalLM": causal(NAMES, _arguments)}
