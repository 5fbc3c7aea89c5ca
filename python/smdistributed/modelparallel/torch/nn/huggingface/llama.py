"""Llama; Mistral and Qwen2 have the same weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.causal import causal, head_size, rotary_of
from smdistributed.modelparallel.torch.nn.huggingface.names import NameTable, Weight, product, translations
from smdistributed.modelparallel.torch.nn.options import BlockOptions

NAMES = NameTable(
    base="model.",
    layers="layers.{}.",
    layer=[
        *product("attention.pre_layernorm", "input_layernorm"),
        *product("attention.query", "self_attn.q_proj"),
        *product("attention.key", "self_attn.k_proj"),
        *product("attention.value", "self_attn.v_proj"),
        *product("attention.dense", "self_attn.o_proj"),
        *product("output.pre_layernorm", "post_attention_layernorm"),
        *product("output.gate", "mlp.gate_proj"),
        *product("output.dense1", "mlp.up_proj"),
        *product("output.dense2", "mlp.down_proj"),
    ],
    rest=[
        Weight(("embeddings.word_embedding.weight",), "model.embed_tokens.weight"),
        *product("lm_head.layernorm", "model.norm"),
        Weight(("lm_head.weight",), "lm_head.weight"),
    ],
)


def llama_arguments(
    module: nn.Module, config: Any, *, qkv_bias: bool, dense_bias: bool, windows: tuple[int | None, ...] = (None,)
) -> dict[str, Any]:
    """Return the arguments of the distributed module.

    Args:
        module: The model.
        config: Its configuration.
        qkv_bias: Whether query, key and value have biases.
        dense_bias: Whether the output projection has one.
        windows: Number of tokens to which a token attends, by layer.

    Returns:
        Keyword arguments.
    """
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": head_size(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_positions": 0,
        "attention_dropout_prob": getattr(config, "attention_dropout", 0.0),
        "hidden_dropout_prob": 0.0,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.rms_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        "options": BlockOptions(
            num_key_value_heads=config.num_key_value_heads,
            qkv_bias=qkv_bias,
            dense_bias=dense_bias,
            mlp_bias=getattr(config, "mlp_bias", False),
            normalization="rmsnorm",
            rotary=rotary_of(module),
            windows=windows,
            gated=True,
        ),
    }


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    bias = getattr(config, "attention_bias", False)
    return llama_arguments(module, config, qkv_bias=bias, dense_bias=bias)


translate_state_dict_to_hf_llama, translate_hf_state_dict_to_smdistributed_llama = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_llama
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_llama
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"LlamaForCausalLM": causal(NAMES, _arguments)}
