"""Mixtral, whose weights have the names of Llama's, but for its experts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPCheckpointError
from smdistributed.modelparallel.torch.nn.huggingface import llama
from smdistributed.modelparallel.torch.nn.huggingface.causal import causal
from smdistributed.modelparallel.torch.nn.huggingface.names import NameTable, State, Weight
from smdistributed.modelparallel.torch.nn.registry import Registration, StateTranslations

#: The names of transformers 5, where a tensor holds the weights of all experts.
NAMES = NameTable(
    base="model.",
    layers="layers.{}.",
    layer=[
        *(each for each in llama.NAMES.layer if not each.theirs.startswith("mlp.")),
        Weight(("output.router.weight",), "mlp.gate.weight"),
        Weight(("output.experts.gate", "output.experts.dense1"), "mlp.experts.gate_up_proj", dim=1),
        Weight(("output.experts.dense2",), "mlp.experts.down_proj"),
    ],
    rest=llama.NAMES.rest,
)
#: The names of transformers 4, where each expert has its own weights.
_OLD_BLOCK = ".block_sparse_moe."
_OLD_EXPERT = re.compile(r"(?P<layer>.*)\.block_sparse_moe\.experts\.(?P<expert>\d+)\.(?P<name>w[123])\.weight")
_NEW_EXPERTS = re.compile(r"(?P<layer>.*)\.mlp\.experts\.(?P<name>gate_up_proj|down_proj)")


def _joined(state_dict: State) -> dict[str, Any]:
    """Return a state with the names of transformers 5."""
    result: dict[str, Any] = {}
    experts: dict[str, dict[str, dict[int, Any]]] = {}
    for name, tensor in state_dict.items():
        found = _OLD_EXPERT.fullmatch(name)
        if found is None:
            result[name.replace(_OLD_BLOCK, ".mlp.")] = tensor
        else:
            experts.setdefault(found["layer"], {}).setdefault(found["name"], {})[int(found["expert"])] = tensor
    for layer, tensors in experts.items():
        numbers = {name: sorted(tensors.get(name, ())) for name in ("w1", "w2", "w3")}
        complete = list(range(max(map(len, numbers.values()))))
        if any(found != complete for found in numbers.values()):
            raise SMPCheckpointError(
                f"{layer}.mlp.experts: each of w1, w2 and w3 needs experts {complete}: got {numbers}"
            )
        gate, up, down = (
            torch.stack([each for _, each in sorted(tensors[name].items())]) for name in ("w1", "w3", "w2")
        )
        result[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        result[f"{layer}.mlp.experts.down_proj"] = down
    return result


def _split_experts(state_dict: State) -> dict[str, Any]:
    """Return a state with the names of transformers 4."""
    result: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        found = _NEW_EXPERTS.fullmatch(name)
        if found is None:
            result[name.replace(".mlp.", _OLD_BLOCK)] = tensor
            continue
        names = ("w1", "w3") if found["name"] == "gate_up_proj" else ("w2",)
        for part, whole in zip(names, tensor.chunk(len(names), 1), strict=True):
            for expert, weight in enumerate(whole.unbind()):
                result[f"{found['layer']}{_OLD_BLOCK}experts.{expert}.{part}.weight"] = weight.contiguous()
    return result


def translate_state_dict_to_hf_mixtral(
    state_dict: State, max_seq_len: int | None = None, *, joins_experts: bool = True
) -> dict[str, Any]:
    """Translate the state of a distributed model to that of Hugging Face's model.

    Args:
        state_dict: The result of ``model.state_dict()``.
        max_seq_len: Without effect; the functions of all models take it.
        joins_experts: Whether names are those of transformers 5, with one tensor for all experts; otherwise those of
        transformers 4.

    Returns:
        The state.
    """
    result = NAMES.to_hf(state_dict, max_seq_len)
    return result if joins_experts else _split_experts(result)


def translate_hf_state_dict_to_smdistributed_mixtral(state_dict: State) -> dict[str, Any]:
    """Translate the state of Hugging Face's model to that of a distributed model.

    Args:
        state_dict: The state of the model, or of a file of its weights, with the names of transformers 4 or 5.

    Returns:
        A state for ``model.load_state_dict()``.
    """
    return NAMES.from_hf(_joined(state_dict))


translate_state_dict_to_hf = translate_state_dict_to_hf_mixtral
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_mixtral
)


def _arguments(module: nn.Module, config: Any) -> dict[str, Any]:
    values = llama.llama_arguments(
        module, config, qkv_bias=False, dense_bias=False, windows=(getattr(config, "sliding_window", None),)
    )
    values["options"] = dataclasses.replace(
        values["options"],
        num_experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
        router_jitter=getattr(config, "router_jitter_noise", 0.0),
    )
    return values | {
        "router_loss_factor": config.router_aux_loss_coef,
        "output_router_logits": bool(config.output_router_logits),
    }


def _output(result: Any) -> Any:
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not isinstance(result, tuple):
        result = (None, result)
    loss, logits, aux_loss, router_logits = (*result, None, None)[:4]
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits, router_logits=router_logits)


def _translate(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    del module
    return translate_hf_state_dict_to_smdistributed_mixtral(state_dict)


def _translations(module: nn.Module) -> StateTranslations:
    joins = any(name.endswith(".experts.gate_up_proj") for name, _ in module.named_parameters())
    to_hf = functools.partial(translate_state_dict_to_hf_mixtral, joins_experts=joins)
    return to_hf, translate_hf_state_dict_to_smdistributed_mixtral


#: By the name of a class of transformers, how it is replaced.
REGISTRATIONS: dict[str, Registration] = {
    "MixtralForCausalLM": dataclasses.replace(
        causal(NAMES, _arguments, _output), translate=_translate, model_translations=_translations
    )
}
