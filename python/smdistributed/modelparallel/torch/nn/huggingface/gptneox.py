"""GPT-NeoX."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.causal import causal, rotary_of
from smdistributed.modelparallel.torch.nn.huggingface.names import NameTable, Weight, product, translations
from smdistributed.modelparallel.torch.nn.options import BlockOptions

NAMES = NameTable(
    base="gpt_neox.",
    layers="layers.{}.",
    layer=[
        *product("attention.pre_layernorm", "input_layernorm"),
        *product(("attention.query", "attention.key", "attention.value"), "attention.query_key_value", by_head=True),
        *product("attention.dense", "attention.dense"),
        *product("output.pre_layernorm", "post_attention_layernorm"),
        *product("output.dense1", "mlp.dense_h_to_4h"),
        *product("output.dense2", "mlp.dense_4h_to_h"),
    ],
    rest=[
        Weight(("embeddings.word_embedding.weight",), "gpt_neox.embed_in.weight"),
        *product("lm_head.layernorm", "gpt_neox.final_layer_norm"),
        # The older name, which files contain and `from_pretrained` of every version accepts.
        Weight(("lm_head.weight",), "embed_out.weight", other_name="lm_head.weight"),
    ],
)


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    bias = getattr(config, "attention_bias", True)
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_positions": 0,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        "options": BlockOptions(
            qkv_bias=bias,
            dense_bias=bias,
            rotary=rotary_of(module),
            parallel_residual=config.use_parallel_residual,
        ),
    }


translate_state_dict_to_hf_gptneox, translate_hf_state_dict_to_smdistributed_gptneox = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_gptneox
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_gptneox
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"GPTNeoXForCausalLM": causal(NAMES, _arguments)}
