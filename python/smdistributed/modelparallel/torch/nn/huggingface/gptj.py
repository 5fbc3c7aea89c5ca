"""GPT-J."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.causal import causal
from smdistributed.modelparallel.torch.nn.huggingface.names import NameTable, Weight, product, translations
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.rotary import Rotary

NAMES = NameTable(
    base="transformer.",
    layers="h.{}.",
    layer=[
        *product("attention.pre_layernorm", "ln_1"),
        *product("attention.query", "attn.q_proj"),
        *product("attention.key", "attn.k_proj"),
        *product("attention.value", "attn.v_proj"),
        *product("attention.dense", "attn.out_proj"),
        *product("output.dense1", "mlp.fc_in"),
        *product("output.dense2", "mlp.fc_out"),
    ],
    rest=[
        Weight(("embeddings.word_embedding.weight",), "transformer.wte.weight"),
        *product("lm_head.layernorm", "transformer.ln_f"),
        *product("lm_head", "lm_head"),
    ],
    masks="attn",
)


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    del module
    size = config.rotary_dim or config.n_embd // config.n_head
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "num_positions": 0,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "lm_head_bias": True,
        "options": BlockOptions(
            qkv_bias=False,
            dense_bias=False,
            rotary=Rotary.with_base(size, interleaved=True),
            attention_in_fp32=True,
            parallel_residual=True,
            shared_norm=True,
        ),
    }


translate_state_dict_to_hf_gptj, translate_hf_gptj_state_dict_to_smdistributed_gptj = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_gptj
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_gptj_state_dict_to_smdistributed_gptj
)
translate_hf_state_dict_to_smdistributed_gptj = translate_hf_gptj_state_dict_to_smdistributed_gptj

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"GPTJForCausalLM": causal(NAMES, _arguments)}
