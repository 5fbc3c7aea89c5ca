"""GPT-2."""

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
        *product(("attention.query", "attention.key", "attention.value"), "attn.c_attn", transposed=True),
        *product("attention.dense", "attn.c_proj", transposed=True),
        *product("output.pre_layernorm", "ln_2"),
        *product("output.dense1", "mlp.c_fc", transposed=True),
        *product("output.dense2", "mlp.c_proj", transposed=True),
    ],
    rest=[
        Weight(("embeddings.word_embedding.weight",), "transformer.wte.weight"),
        Weight(("embeddings.position_embedding.weight",), "transformer.wpe.weight"),
        *product("lm_head.layernorm", "transformer.ln_f"),
        Weight(("lm_head.weight",), "lm_head.weight"),
    ],
    masks="attn",
)


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    del module
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "options": BlockOptions(
            attention_scale=None if config.scale_attn_weights else 1.0,
            scale_by_layer=config.scale_attn_by_inverse_layer_idx,
            attention_in_fp32=config.reorder_and_upcast_attn,
        ),
    }


translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_gpt2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_gpt2
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"GPT2LMHeadModel": causal(NAMES, _arguments)}
