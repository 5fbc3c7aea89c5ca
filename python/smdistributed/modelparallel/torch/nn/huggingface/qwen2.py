"""Qwen2, whose weights have the names of Llama's."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.causal import causal
from smdistributed.modelparallel.torch.nn.huggingface.llama import NAMES, llama_arguments
from smdistributed.modelparallel.torch.nn.huggingface.names import translations


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    return llama_arguments(module, config, qkv_bias=True, dense_bias=False, windows=windows)


translate_state_dict_to_hf_qwen2, translate_hf_state_dict_to_smdistributed_qwen2 = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_qwen2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_qwen2
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"Qwen2ForCausalLM": causal(NAMES, _arguments)}
