"""T5: models with its encoder, or its encoder and decoder, are replaced, in every model that has them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.encoder_decoder import DistributedEncoderDecoder
from smdistributed.modelparallel.torch.nn.feed_forward import ACTIVATIONS
from smdistributed.modelparallel.torch.nn.huggingface.names import State
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.registry import Arguments, Registration, StateTranslations
from smdistributed.modelparallel.torch.nn.relative_bias import RelativeBias

#: The names of a layer's weights, in the distributed module and in Hugging Face's; their layouts are equal. Layers of
#: the encoder have their feed-forward layer in the place of the decoder's cross attention.
_LAYER = {
    "attention.pre_layernorm": "layer.0.layer_norm",
    "attention.query": "layer.0.SelfAttention.q",
    "attention.key": "layer.0.SelfAttention.k",
    "attention.value": "layer.0.SelfAttention.v",
    "attention.dense": "layer.0.SelfAttention.o",
}
_CROSS_ATTENTION = {
    "cross_attention.pre_layernorm": "layer.1.layer_norm",
    "cross_attention.query": "layer.1.EncDecAttention.q",
    "cross_attention.key": "layer.1.EncDecAttention.k",
    "cross_attention.value": "layer.1.EncDecAttention.v",
    "cross_attention.dense": "layer.1.EncDecAttention.o",
}


def _feed_forward(place: int) -> dict[str, str]:
    # A gated layer has two products where others have one.
    return {
        "output.pre_layernorm": f"layer.{place}.layer_norm",
        "output.gate": f"layer.{place}.DenseReluDense.wi_0",
        "output.dense1": f"layer.{place}.DenseReluDense.wi_1",
        "output.dense2": f"layer.{place}.DenseReluDense.wo",
    }


_NAMES = {"encoder": _LAYER | _feed_forward(1), "decoder": _LAYER | _CROSS_ATTENTION | _feed_forward(2)}
_PLAIN = {"encoder": "layer.1.DenseReluDense.wi", "decoder": "layer.2.DenseReluDense.wi"}
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_OURS = re.compile(r"(?P<prefix>(?:.*\.)?)(?P<stack>encoder|decoder)\.seq_layers\.(?P<layer>\d+)\.(?P<name>.+)\.weight")
_THEIRS = re.compile(r"(?P<prefix>(?:.*\.)?)(?P<stack>encoder|decoder)\.block\.(?P<layer>\d+)\.(?P<name>.+)\.weight")
#: Other weights, in the distributed module and in Hugging Face's.
_REST = {
    "embeddings.word_embedding.weight": "shared.weight",
    "encoder.relative_bias.weight": f"encoder.{_BIAS}",
    "decoder.relative_bias.weight": f"decoder.{_BIAS}",
    "encoder_output.layernorm.weight": "encoder.final_layer_norm.weight",
    "lm_head.layernorm.weight": "decoder.final_layer_norm.weight",
}
_WORDS, _HEAD = "embeddings.word_embedding.weight", "lm_head.weight"
#: Further names of the embedding in the states of Hugging Face's models.
_SAME_AS_WORDS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
#: A weight that old files contain, and no model uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def translate_state_dict_to_hf_t5(state_dict: State, max_seq_len: int | None = None) -> dict[str, Any]:
    """Translate the state of a distributed model to that of Hugging Face's model.

    Args:
        state_dict: The result of ``model.state_dict()``.
        max_seq_len: Without effect; the functions of all models take it.

    Returns:
        The state, with the embedding by all of its names.
    """
    del max_seq_len
    result: dict[str, Any] = {}
    stacks: dict[str, set[str]] = {}
    gated = {found["prefix"] for name in state_dict if (found := _OURS.fullmatch(name)) and ".gate" in found["name"]}
    for name, tensor in state_dict.items():
        found = _OURS.fullmatch(name)
        if found is None or found["name"] not in _NAMES[found["stack"]]:
            result[_renamed(name, _REST)] = tensor
            continue
        prefix, stack = found["prefix"], found["stack"]
        stacks.setdefault(prefix, set()).add(stack)
        is_plain = found["name"] == "output.dense1" and prefix not in gated
        new = _PLAIN[stack] if is_plain else _NAMES[stack][found["name"]]
        result[f"{prefix}{stack}.block.{found['layer']}.{new}.weight"] = tensor
    for prefix, present in stacks.items():
        for name in _SAME_AS_WORDS:
            if name.split(".")[0] in present and prefix + "shared.weight" in result:
                result[prefix + name] = result[prefix + "shared.weight"]
    return result


def translate_hf_state_dict_to_smdistributed_t5(state_dict: State, *, has_lm_head: bool = True) -> dict[str, Any]:
    """Translate the state of Hugging Face's model to that of a distributed model.

    Args:
        state_dict: The state of the model, or of a file of its weights.
        has_lm_head: Whether a model with a decoder has a head. If the state has no weight of the head, it is the
            embedding's.

    Returns:
        A state for ``model.load_state_dict()``.
    """
    old = {stack: {theirs: ours for ours, theirs in names.items()} for stack, names in _NAMES.items()}
    for stack, name in _PLAIN.items():
        old[stack][name] = "output.dense1"
    rest = {theirs: ours for ours, theirs in _REST.items()}
    result: dict[str, Any] = {}
    decoders: set[str] = set()
    for name, tensor in state_dict.items():
        if name.endswith(_UNUSED):
            continue
        same = next((each for each in _SAME_AS_WORDS if name == each or name.endswith(f".{each}")), None)
        if same is not None:
            result.setdefault(name.removesuffix(same) + _WORDS, tensor)
            continue
        found = _THEIRS.fullmatch(name)
        if found is None or found["name"] not in old[found["stack"]]:
            result[_renamed(name, rest)] = tensor
            continue
        prefix, stack = found["prefix"], found["stack"]
        if stack == "decoder":
            decoders.add(prefix)
        result[f"{prefix}{stack}.seq_layers.{found['layer']}.{old[stack][found['name']]}.weight"] = tensor
    for prefix in decoders if has_lm_head else ():
        if prefix + _HEAD not in result and prefix + _WORDS in result:
            result[prefix + _HEAD] = result[prefix + _WORDS]
    return result


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the new name of a weight, with the same prefix."""
    for old, new in names.items():
        if name == old or name.endswith(f".{old}"):
            return name.removesuffix(old) + new
    return name


translate_state_dict_to_hf = translate_state_dict_to_hf_t5
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_t5
)


def _arguments(module: nn.Module) -> Arguments:
    config: Any = module.config
    if config.dense_act_fn not in ACTIVATIONS:
        raise SMPUnsupportedError(f"the activation {config.dense_act_fn!r} is not supported")
    words: Any = module.shared
    stacks: list[Any] = [getattr(module, name) for name in ("encoder", "decoder") if hasattr(module, name)]
    if any(each.embed_tokens.weight is not words.weight for each in stacks):
        raise SMPUnsupportedError("encoder and decoder of T5 with embeddings of their own are not supported")
    head: Any = getattr(module, "lm_head", None)
    # Version 4 of transformers has no attribute for this.
    scales = getattr(config, "scale_decoder_outputs", getattr(config, "tie_word_embeddings", True))
    return (), {
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers if hasattr(module, "decoder") else 0,
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.d_kv,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "vocab_size": words.weight.shape[0],
        "dropout_prob": float(config.dropout_rate),
        "activation": config.dense_act_fn,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_factor": config.initializer_factor,
        "add_lm_head": head is not None,
        "tie_word_embedding": head is None or head.weight is words.weight,
        "scale_decoder_outputs": bool(scales),
        "start_token": getattr(config, "decoder_start_token_id", None),
        "padding_token": config.pad_token_id,
        "options": BlockOptions(
            qkv_bias=False,
            dense_bias=False,
            mlp_bias=False,
            normalization="rmsnorm",
            attention_scale=1.0,
            gated=config.is_gated_act,
            relative_bias=RelativeBias(config.relative_attention_num_buckets, config.relative_attention_max_distance),
            activation_dropout_prob=float(config.dropout_rate),
            limits_fp16=True,
        ),
    }


def _translate(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    return translate_hf_state_dict_to_smdistributed_t5(state_dict, has_lm_head=hasattr(module, "lm_head"))


def _translations(module: nn.Module) -> StateTranslations:
    has_lm_head = hasattr(module, "lm_head")
    return translate_state_dict_to_hf_t5, functools.partial(
        translate_hf_state_dict_to_smdistributed_t5, has_lm_head=has_lm_head
    )


#: Arguments of `forward` in their order, without those that are not taken.
_FIRST, _SECOND = ("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")
_IGNORED = {"use_cache", "return_dict", "cache_position", "num_items_in_batch"}


def _forward(*args: torch.Tensor | None, **kwargs: Any) -> Arguments:
    """Convert arguments of Hugging Face's models to those of the distributed module; most are passed by name."""
    names = (*_FIRST, *_SECOND)
    if len(args) > len(names):
        raise SMPUnsupportedError(f"a distributed T5 takes {len(names)} positional arguments: pass others by name")
    values = dict(zip(names, args, strict=False)) | kwargs
    taken = [values.pop(name, None) for name in (*names, "labels")]
    given = [name for name, value in values.items() if value is not None and value is not False]
    wanted = [name for name in given if name not in _IGNORED]
    if wanted:
        raise SMPUnsupportedError(f"a distributed T5 does not take `{wanted[0]}`")
    if taken[0] is None:
        raise SMPUnsupportedError("a distributed T5 takes `input_ids`, and no embeddings")
    for place in (1, 3):
        mask = taken[place]
        if mask is not None:
            if mask.dim() != 2:
                raise SMPUnsupportedError(f"the attention mask has {mask.dim()} dimensions: expected [batch, S]")
            taken[place] = 1 - mask.long()
    return (tuple(taken),), {}


def _encoded(result: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=result[2])


def _decoded(result: Any) -> Any:
    from transformers.modeling_outputs import Seq2SeqModelOutput

    return Seq2SeqModelOutput(last_hidden_state=result[1], encoder_last_hidden_state=result[2])


def _predicted(result: Any) -> Any:
    from transformers.modeling_outputs import Seq2SeqLMOutput

    loss, logits, states = result
    return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=states)


#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS = {
    name: Registration(DistributedEncoderDecoder, _arguments, _forward, output, _translate, _translations)
    for name, output in {
        "T5EncoderModel": _encoded,
        "T5Model": _decoded,
        "T5ForConditionalGeneration": _predicted,
    }.items()
}
