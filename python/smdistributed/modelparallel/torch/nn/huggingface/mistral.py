"""Mistral, whose weights have the names of Llama's."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.causal import causal
from smdistributed.modelparallel.torch.nn.huggingface.llama import NAMES, llama_arguments
from smdistributed.modelparallel.torch.nn.huggingface.names import translations


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    return llama_arguments(
        module, config, qkv_bias=False, dense_bias=False, windows=(getattr(config, "sliding_window", None),)
    )


translate_state_dict_to_hf_mistral, translate_hf_state_dict_to_smdistributed_mistral = translations(NAMES)
translate_state_dict_to_hf = translate_state_dict_to_hf_mistral
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_mistral
)

#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {"MistralForCausalLM": causal(NAMES, _arguments)}
