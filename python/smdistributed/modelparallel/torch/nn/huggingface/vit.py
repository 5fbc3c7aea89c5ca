"""ViT: its layers are replaced, in every model that has them.

The layers of transformers 5 have their configuration, so those of older versions are not replaced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.feed_forward import ACTIVATIONS
from smdistributed.modelparallel.torch.nn.huggingface import encoder
from smdistributed.modelparallel.torch.nn.huggingface.names import State
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.registry import Registration
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformerLayer

#: The names of a layer's weights, in the distributed module and in transformers 5; their layouts are equal.
_NEW = {
    "attention.pre_layernorm": "layernorm_before",
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
    "attention.dense": "attention.o_proj",
    "output.pre_layernorm": "layernorm_after",
    "output.dense1": "mlp.fc1",
    "output.dense2": "mlp.fc2",
}
#: The same for transformers 4, whose names published files have.
_OLD = {
    "attention.pre_layernorm": "layernorm_before",
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.dense": "attention.output.dense",
    "output.pre_layernorm": "layernorm_after",
    "output.dense1": "intermediate.dense",
    "output.dense2": "output.dense",
}
_FROM_NEW, _FROM_OLD = ({theirs: ours for ours, theirs in names.items()} for names in (_NEW, _OLD))
_ENTRY = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>\d+)\.(?P<name>.+)\.(?P<kind>weight|bias)")
_OLD_ENTRY = re.compile(r"(?P<prefix>(?:.*\.)?)encoder\.layer\.(?P<layer>\d+)\.(?P<name>.+)\.(?P<kind>weight|bias)")


def _renamed(state_dict: State, pattern: re.Pattern[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename the weights of layers in a state; others keep their names."""
    result = {}
    for name, tensor in state_dict.items():
        found = pattern.fullmatch(name)
        if found is not None and found["name"] in names:
            name = f"{found['prefix']}layers.{found['layer']}.{names[found['name']]}.{found['kind']}"
        result[name] = tensor
    return result


def translate_state_dict_to_hf_vit(state_dict: State, max_seq_len: int | None = None) -> dict[str, Any]:
    """Translate the state of a model with distributed layers to that of Hugging Face's model.

    Args:
        state_dict: The result of ``model.state_dict()``.
        max_seq_len: Without effect; the functions of all models take it.

    Returns:
        The state, with the names of transformers 5.
    """
    del max_seq_len
    return _renamed(state_dict, _ENTRY, _NEW)


def translate_hf_state_dict_to_smdistributed_vit(state_dict: State) -> dict[str, Any]:
    """Translate the state of Hugging Face's model to that of a model with distributed layers.

    Args:
        state_dict: The state of the model, or of a file with the names of transformers 4.

    Returns:
        A state for ``model.load_state_dict()``.
    """
    return _renamed(_renamed(state_dict, _ENTRY, _FROM_NEW), _OLD_ENTRY, _FROM_OLD)


translate_state_dict_to_hf = translate_state_dict_to_hf_vit
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_vit
)


def _arguments(module: nn.Module) -> tuple[tuple[()], dict[str, Any]]:
    config: Any = getattr(module.attention, "config", None)
    if config is None:
        raise SMPUnsupportedError("layers of ViT are replaced as a whole with transformers 5 or newer")
    if config.hidden_act not in ACTIVATIONS:
        raise SMPUnsupportedError(f"the activation {config.hidden_act!r} is not supported")
    return (), {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "options": BlockOptions(qkv_bias=config.qkv_bias),
    }


def _translate(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    del module
    # A layer's own state has no name of the layer.
    of_layer = translate_hf_state_dict_to_smdistributed_vit(
        {f"layers.0.{key}": each for key, each in state_dict.items()}
    )
    return {key.removeprefix("layers.0."): each for key, each in of_layer.items()}


def _forward(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **rest: Any
) -> tuple[tuple[Any], dict[str, Any]]:
    """Convert the arguments for the distributed module."""
    if attention_mask is not None:
        return encoder.block_inputs(hidden_states, attention_mask, **rest)
    wanted = [name for name in ("output_attentions", "output_hidden_states") if rest.get(name)]
    if wanted:
        raise SMPUnsupportedError(f"a distributed layer of ViT does not take `{wanted[0]}`")
    return ((hidden_states, None),), {}


def _output(result: Any) -> torch.Tensor:
    return result[0]


#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {
    "ViTLayer": Registration(
        DistributedTransformerLayer,
        _arguments,
        _forward,
        _output,
        _translate,
        lambda module: (translate_state_dict_to_hf_vit, translate_hf_state_dict_to_smdistributed_vit),
    )
}
