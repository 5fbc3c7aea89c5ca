"""Small models of Hugging Face's, each with a loss and batches, whose computations are all in the type of the weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from support.exact_models import exact
from support.smp.models import Model
from support.tensor_parallel import tokens

#: Factor of the loss that balances experts.
BALANCING = 0.3


def causal_configurations() -> dict[str, Any]:
    """Returns configurations of causal language models, by name."""
    gpt2 = {"vocab_size": 53, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12}
    small = {
        "vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "max_position_embeddings": 12,
    }  # fmt: skip
    grouped = {**small, "num_key_value_heads": 2}
    return {
        "gpt2": transformers.GPT2Config(**gpt2, scale_attn_by_inverse_layer_idx=True),
        "llama": transformers.LlamaConfig(**grouped),
        "llama3": transformers.LlamaConfig(
            **{**grouped, "num_key_value_heads": 1},
            tie_word_embeddings=True,
            rope_scaling={
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4, "rope_theta": 10000.0,
            },
        ),
        "mistral": transformers.MistralConfig(**grouped, sliding_window=3),
        "mixtral": transformers.MixtralConfig(
            **grouped, num_local_experts=4, experts_implementation="eager", output_router_logits=True,
            router_aux_loss_coef=BALANCING, pad_token_id=3,
        ),
        "qwen2": transformers.Qwen2Config(**grouped),
        "gptj": transformers.GPTJConfig(**gpt2, rotary_dim=2),
        "gptneo": transformers.GPTNeoConfig(
            vocab_size=53, hidden_size=16, num_layers=2, num_heads=4, max_position_embeddings=12, window_size=3,
            attention_types=[[["global", "local"], 1]],
        ),
        "gptneox": transformers.GPTNeoXConfig(**small, rotary_pct=0.5),
        "gptneox-serial": transformers.GPTNeoXConfig(**small, use_parallel_residual=False),
    }  # fmt: skip


def make_causal(config: Any) -> Any:
    """Makes a causal language model without dropout, in float64; initial weights are drawn in float32."""
    for name in list(vars(config)):
        if "drop" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return transformers.AutoModelForCausalLM.from_config(config).double()
    finally:
        torch.set_default_dtype(before)


def run_causal(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and the output of a causal language model; the loss of models with experts balances them."""
    output = model(input_ids=ids)
    loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    balancing = getattr(output, "aux_loss", None)
    return loss if balancing is None else loss + BALANCING * balancing, output.logits


def other_kinds() -> dict[str, tuple[Any, Any]]:
    """Returns classes and configurations of further models, by name."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = {**sizes, **quiet, "vocab_size": 53, "max_position_embeddings": 16, "classifier_dropout": 0.0}
    return {
        "bart": (
            transformers.BartForConditionalGeneration,
            transformers.BartConfig(
                vocab_size=53, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=12,
                dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            ),
        ),
        "vit": (
            transformers.ViTForImageClassification, transformers.ViTConfig(**sizes, **quiet, image_size=8, patch_size=4),
        ),
        "olmoe": (
            transformers.OlmoeForCausalLM,
            transformers.OlmoeConfig(
                **sizes, vocab_size=53, num_experts=4, num_experts_per_tok=2, experts_implementation="eager"
            ),
        ),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**encoder)),
        "roberta": (transformers.RobertaForSequenceClassification, transformers.RobertaConfig(**encoder)),
    }  # fmt: skip


def run_other(name: str, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and the output of a model."""
    if name == "vit":
        pixels = (ids[:, :1, None, None].to(torch.get_default_dtype()) * torch.linspace(-1, 1, 192).view(3, 8, 8)).sin()
        logits = model(pixel_values=pixels).logits
        return functional.cross_entropy(logits, ids[:, 0] % 2), logits
    more = {}
    if name == "bart":
        more["decoder_input_ids"] = ids.flip(1)
    if name in ("bert", "roberta"):
        more["attention_mask"] = padding(ids)
    logits = model(input_ids=ids, **more).logits
    if logits.dim() == 2:
        return functional.cross_entropy(logits, ids[:, 0] % logits.shape[-1]), logits
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def padding(ids: torch.Tensor) -> torch.Tensor:
    """Returns the mask of tokens that makes some of them padding, but none of the first ones."""
    return (ids % 11 != 0).long().index_fill_(1, torch.tensor([0]), 1)


def translated(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors by the names that they have in Hugging Face's model. If the model has these names already, they
    stay.
    """
    family = {"llama3": "llama", "gptneox-serial": "gptneox"}.get(name, name)
    if not hasattr(smp.nn.huggingface, family) or not any("seq_layers" in each or ".dense1." in each for each in found):
        return found
    to_hf = getattr(getattr(smp.nn.huggingface, family), f"translate_state_dict_to_hf_{family}")
    result = to_hf(found, **({"num_attention_heads": 4} if family == "gptneox" else {}))
    if "embed_out.weight" in result:
        result["lm_head.weight"] = result["embed_out.weight"]
    return result


def models() -> dict[str, Model]:
    """Returns the models by name; they are made under ``smp.tensor_parallelism()``."""

    def ids(step: int, replica: int) -> tuple[torch.Tensor, ...]:
        return (tokens(step, replica),)

    def made(make: Any) -> Any:
        with smp.tensor_parallelism():
            return exact(make())

    found = {}
    for name in causal_configurations():
        # A configuration is not shared: making a model may change it.
        make = functools.partial(made, lambda name=name: make_causal(causal_configurations()[name]))
        found[name] = Model(make, run_causal, ids, functools.partial(translated, name), together=name == "mixtral")
    for name, (kind, config) in other_kinds().items():
        config.use_cache = False
        make = functools.partial(made, functools.partial(kind, config))
        found[name] = Model(make, functools.partial(run_other, name), ids, functools.partial(translated, name))
    for name in T5_KINDS:
        make = functools.partial(made, functools.partial(make_t5, name))
        run = functools.partial(run_t5, name)
        found[f"t5-{name}"] = Model(make, run, ids, functools.partial(translated, "t5"), together=name == "labels")
    return found


#: The class of T5 and changes to its configuration, by name.
T5_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("T5ForConditionalGeneration", {}),
    "gated": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "labels": ("T5ForConditionalGeneration", {}),
    "bare": ("T5Model", {}),
    "encoder": ("T5EncoderModel", {}),
    "sequences": ("T5ForSequenceClassification", {"feed_forward_proj": "gated-gelu"}),
    "tokens": ("T5ForTokenClassification", {}),
}


def t5_configuration(**more: Any) -> Any:
    """Returns the configuration of a small T5."""
    sizes = {
        "vocab_size": 53, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 5, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "use_cache": False,
    }  # fmt: skip
    return transformers.T5Config(**sizes | more)


def make_t5(name: str, seed: int | None = None) -> Any:
    """Makes a T5, with initial weights from a seed if there is one."""
    kind, more = T5_KINDS[name]
    if seed is not None:
        torch.manual_seed(seed)
    return exact(getattr(transformers, kind)(t5_configuration(**more)))


def run_t5(name: str, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and an output of a T5; encoder and decoder inputs have different lengths, and padding."""
    mask, targets = padding(ids), ids.flip(1)[:, :4]
    if name == "labels":
        loss = model(input_ids=ids, attention_mask=mask, labels=targets.masked_fill(targets % 11 == 0, -100)).loss
        return loss, loss[None]
    if name == "sequences":
        # Each sequence has one end-of-sequence token.
        ids = (ids % 50 + 2).index_fill_(1, torch.tensor([ids.shape[1] - 1]), 1)
        logits = model(input_ids=ids, attention_mask=mask).logits
        return functional.cross_entropy(logits, ids[:, 0] % 2), logits
    if name == "tokens":
        logits = model(input_ids=ids, attention_mask=mask).logits
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 2), logits
    if name == "encoder":
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states.sin().mean(), states
    decoder_mask = (targets % 7 != 0).long().index_fill_(1, torch.tensor([0]), 1)
    output = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets, decoder_attention_mask=decoder_mask)
    encoded = output.encoder_last_hidden_state.sin().mean()
    if name == "bare":
        return output.last_hidden_state.sin().mean() + encoded, output.last_hidden_state
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten()) + encoded, output.logits
