"""Replaces the encoders of BERT and related models by :class:`DistributedTransformer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn import collectives, layout
from smdistributed.modelparallel.torch.nn.feed_forward import ACTIVATIONS
from smdistributed.modelparallel.torch.nn.huggingface.names import State
from smdistributed.modelparallel.torch.nn.registry import Registration
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer

#: The names of a layer's weights, in the distributed module and in Hugging Face's; their layouts are equal.
LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.dense": "attention.output.dense",
    "attention.layernorm": "attention.output.LayerNorm",
    "output.dense1": "intermediate.dense",
    "output.dense2": "output.dense",
    "output.layernorm": "output.LayerNorm",
}
_OURS = re.compile(r"(?P<prefix>(?:.*\.)?)seq_layers\.(?P<layer>\d+)\.(?P<name>.+)\.(?P<kind>weight|bias)")
_THEIRS = re.compile(r"(?P<prefix>(?:.*\.)?)layer\.(?P<layer>\d+)\.(?P<name>.+)\.(?P<kind>weight|bias)")


def _renamed(state_dict: State, pattern: re.Pattern[str], container: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Rename the layers in a state; other modules of the model keep their names."""
    result = {}
    for name, tensor in state_dict.items():
        found = pattern.fullmatch(name)
        if found is not None and found["name"] in names:
            name = f"{found['prefix']}{container}.{found['layer']}.{names[found['name']]}.{found['kind']}"
        result[name] = tensor
    return result


def translations() -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]:
    """Return the two public functions of an encoder.

    Returns:
        The function to the names of Hugging Face's model, and that from them.
    """

    def to_hf(state_dict: State, max_seq_len: int | None = None) -> dict[str, Any]:
        """Translate the state of a model with a distributed encoder to that of Hugging Face's model.

        Args:
            state_dict: The result of ``model.state_dict()``.
            max_seq_len: Adds this many position ids, which older versions of transformers expect.

        Returns:
            The state.
        """
        result = _renamed(state_dict, _OURS, "layer", LAYER)
        if max_seq_len is not None:
            embeddings = [name for name in result if name.endswith("embeddings.position_embeddings.weight")]
            for name in embeddings:
                prefix = name.removesuffix("position_embeddings.weight")
                result[f"{prefix}position_ids"] = torch.arange(max_seq_len, device="cpu")[None]
        return result

    def from_hf(state_dict: State) -> dict[str, Any]:
        """Translate the state of Hugging Face's model to that of a model with a distributed encoder.

        Args:
            state_dict: The state of the model, or of a file of its weights.

        Returns:
            A state for ``model.load_state_dict()``.
        """
        names = {theirs: ours for ours, theirs in LAYER.items()}
        weights = {name: tensor for name, tensor in state_dict.items() if not name.endswith("embeddings.position_ids")}
        return _renamed(weights, _THEIRS, "seq_layers", names)

    return to_hf, from_hf


def encoder() -> Registration:
    """Return how encoders are replaced.

    Returns:
        The registration.
    """

    def arguments(module: nn.Module) -> tuple[tuple[()], dict[str, Any]]:
        config: Any = module.config
        if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
            raise SMPUnsupportedError("`is_decoder` or `add_cross_attention` of an encoder is not supported")
        if getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
            raise SMPUnsupportedError(f"`position_embedding_type` {config.position_embedding_type!r} is not supported")
        if config.hidden_act not in ACTIVATIONS:
            raise SMPUnsupportedError(f"the activation {config.hidden_act!r} is not supported")
        return (), {
            "num_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "attention_head_size": config.hidden_size // config.num_attention_heads,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "attention_dropout_prob": config.attention_probs_dropout_prob,
            "hidden_dropout_prob": config.hidden_dropout_prob,
            "activation": config.hidden_act,
            "layernorm_epsilon": config.layer_norm_eps,
            "initializer_range": config.initializer_range,
            "use_normal_initialization": True,
        }

    def translate(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
        del module
        return translations()[1](state_dict)

    return Registration(
        DistributedTransformer, arguments, block_inputs, _output, translate, lambda module: translations()
    )


#: Further positional arguments of older versions.
_LATER: Sequence[str] = (
    "head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict",
)  # fmt: skip
_IGNORED = ("use_cache", "return_dict", "past_key_values", "num_items_in_batch")


def block_inputs(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *more: Any, **rest: Any
) -> tuple[tuple[Any], dict[str, Any]]:
    """Convert the arguments of an encoder or a layer of Hugging Face's to those of the distributed module.

    Args:
        hidden_states: ``[batch, S, H]``.
        attention_mask: A boolean mask, or one that is added to scores.
        *more: Further arguments of older versions.
        **rest: Further arguments by name.

    Returns:
        Arguments, and arguments by name.

    Raises:
        SMPUnsupportedError: An argument requests more than the states.
    """
    rest |= dict(zip(_LATER, more, strict=False))
    head_mask = rest.get("head_mask")
    if isinstance(head_mask, list) and all(each is None for each in head_mask):
        rest["head_mask"] = None
    wanted = [name for name, value in rest.items() if value is not None and value is not False and name not in _IGNORED]
    if wanted:
        raise SMPUnsupportedError(f"a distributed encoder does not take `{wanted[0]}`")
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        additive = torch.zeros_like(attention_mask, dtype=hidden_states.dtype)
        attention_mask = additive.masked_fill(~attention_mask, torch.finfo(hidden_states.dtype).min)
    if collectives.tp_size() > 1 and not layout.is_prescaled():
        # A rank whose batch has no padding may have no mask, but the masks of the group are gathered.
        batch, length = hidden_states.shape[:2]
        if attention_mask is None:
            attention_mask = torch.zeros((1, 1, 1, 1), dtype=hidden_states.dtype, device=hidden_states.device)
        attention_mask = attention_mask.to(hidden_states.dtype).expand(batch, 1, length, length)
    return ((hidden_states, attention_mask),), {}


def _output(result: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=result[0])
