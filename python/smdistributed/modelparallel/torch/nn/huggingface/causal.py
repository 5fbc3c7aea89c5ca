"""Replaces causal language models of Hugging Face by :class:`DistributedTransformerLMHead`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.feed_forward import ACTIVATIONS
from smdistributed.modelparallel.torch.nn.huggingface.names import NameTable
from smdistributed.modelparallel.torch.nn.lm_head import DistributedTransformerLMHead
from smdistributed.modelparallel.torch.nn.registry import Registration, StateTranslations
from smdistributed.modelparallel.torch.nn.rotary import Rotary

#: Arguments of `forward` that request further results, or that have no effect in training.
_OUTPUTS = ("output_attentions", "output_hidden_states")
_IGNORED = {"use_cache", "return_dict", "cache_position", "logits_to_keep", *_OUTPUTS}


def causal(
    table: NameTable,
    arguments: Callable[[nn.Module, Any], dict[str, Any]],
    output: Callable[[Any], Any] | None = None,
) -> Registration:
    """Return how the models of an architecture are replaced.

    Args:
        table: Names of its weights.
        arguments: Returns the keyword arguments of ``DistributedTransformerLMHead`` for a model and its
        configuration.
        output: Converts the result of its ``forward``; by default to ``CausalLMOutputWithPast``.

    Returns:
        The registration.
    """

    def of(module: nn.Module) -> tuple[tuple[()], dict[str, Any]]:
        config: Any = module.config
        values = arguments(module, config)
        if values["activation"] not in ACTIVATIONS:
            raise SMPUnsupportedError(f"the activation {values['activation']!r} is not supported")
        if getattr(config, "add_cross_attention", False):
            raise SMPUnsupportedError("`add_cross_attention` of a causal model is not supported")
        values.setdefault("attention_head_size", values["hidden_size"] // values["num_attention_heads"])
        values |= {
            "use_normal_initialization": True,
            "initializer_range": config.initializer_range,
            "pre_layernorm": True,
            "post_layernorm": False,
            "vocab_size": config.vocab_size,
            "padding_idx": getattr(_embedding(module), "padding_idx", None),
            "tie_word_embedding": bool(getattr(config, "tie_word_embeddings", True)),
        }
        return (), values

    def translate(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
        config: Any = module.config
        return table.from_hf(state_dict, config.num_attention_heads)

    def model_translations(module: nn.Module) -> StateTranslations:
        config: Any = module.config
        heads = config.num_attention_heads
        return functools.partial(table.to_hf, heads=heads), functools.partial(table.from_hf, heads=heads)

    return Registration(DistributedTransformerLMHead, of, _forward, output or _output, translate, model_translations)


def _embedding(module: Any) -> Any:
    return module.get_input_embeddings()


def _forward(
    input_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[tuple[Any], dict[str, Any]]:
    """Convert arguments of Hugging Face's models to those of the distributed module; most are passed by name."""
    labels, num_items = rest.pop("labels", None), rest.pop("num_items_in_batch", None)
    wants_routers = rest.pop("output_router_logits", None)
    if isinstance(past_key_values, torch.Tensor):
        # In newer models, the mask is the second argument.
        attention_mask, past_key_values = past_key_values, None
    if input_ids is None or past_key_values is not None:
        raise SMPUnsupportedError("a distributed model takes `input_ids`, and no embeddings and no cache")
    wanted = [name for name, value in rest.items() if value is not None and name not in _IGNORED]
    wanted += [name for name in _OUTPUTS if rest.get(name)]
    if wanted:
        raise SMPUnsupportedError(f"a distributed model does not take `{wanted[0]}`")
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise SMPUnsupportedError(f"the attention mask has {attention_mask.dim()} dimensions: expected [batch, S]")
        attention_mask = 1 - attention_mask.long()
    inputs = input_ids, attention_mask, token_type_ids, position_ids, labels
    return (inputs,), {"num_items_in_batch": num_items, "output_router_logits": wants_routers}


def _output(result: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    loss, logits = result if isinstance(result, tuple) else (None, result)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def rotary_of(module: nn.Module) -> Rotary:
    """Return the rotary embedding that a model has computed from its configuration.

    Args:
        module: The model.

    Returns:
        The rotary embedding.

    Raises:
        SMPUnsupportedError: Its frequencies depend on the length of the sequence.
    """
    for each in module.modules():
        if isinstance(getattr(each, "inv_freq", None), torch.Tensor):
            kind = getattr(each, "rope_type", "default")
            if kind in ("dynamic", "longrope"):
                raise SMPUnsupportedError(f"rotary embeddings of the type {kind!r} are not supported")
            frequencies: Any = each.inv_freq
            return Rotary(tuple(frequencies.float().tolist()), False, getattr(each, "attention_scaling", 1.0))
    raise SMPUnsupportedError("rotary embeddings without `inv_freq` are not supported")


def head_size(config: Any) -> int:
    """Return the size of a head.

    Args:
        config: The model's configuration.

    Returns:
        The size.
    """
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
