"""Models of the classes in smp.nn, each with a loss and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from support.tensor_parallel import LENGTH, VOCABULARY, WIDTH, states, tokens


class Model(NamedTuple):
    """Functions that make a model, run it and draw its batch: arguments of `support.tensor_parallel.compare`."""

    make: Callable[[], Any]
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]]
    names: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    together: bool = False


def models() -> dict[str, Model]:
    """Returns models of the classes in `smp.nn`, by name."""
    sizes = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": WIDTH}
    quiet = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    block = {**sizes, **quiet, "intermediate_size": 24}
    causal = {"causal_mask_size": LENGTH, "pre_layernorm": True, "post_layernorm": False}

    def head(**more):
        values = {**block, "num_layers": 2, "vocab_size": VOCABULARY, "num_positions": 8, **more}
        return lambda: smp.nn.DistributedTransformerLMHead(**values)

    def language(model, ids):
        model.train()
        loss, _ = model((ids, None, None, None, ids))
        return loss, ids

    def masked_language(model, ids):
        mask = (ids % 7 == 0).long()
        logits = model((ids, mask, ids % 2, None))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss, logits

    def loss_of(output):
        # A norm at the end makes the mean of the squares constant.
        return output.sin().mean()

    def hidden(model, x):
        output = model(x)
        return loss_of(output), output

    def layered(model, x):
        mask = (x[:, :, :1].transpose(1, 2)[:, None] > 1.0) * -1e9
        output = model((x, mask))[0]
        return loss_of(output), output

    def crossed(model, x):
        output = model((x, x.flip(1)[:, :4], None, None))[0]
        return loss_of(output), output

    def attended(model, x):
        output = model((x, None))
        return loss_of(output), output

    class Flash(nn.Module):
        """Attention with packed queries, keys and values between linear layers of smp.nn."""

        def __init__(self):
            super().__init__()
            self.first = smp.nn.DistributedLinear(WIDTH, 3 * WIDTH, bias=False)
            self.attention = smp.nn.FlashAttentionLayer(0.0, 4)
            self.second = smp.nn.DistributedLinear(WIDTH, WIDTH)

        def forward(self, x):
            packed = self.first(x).unflatten(-1, (3, 4, 4))
            return self.second(self.attention(packed, causal=True).transpose(1, 2).flatten(2))

    class Ends(nn.Module):
        """Linear layers and an embedding of smp.nn together with plain layers."""

        def __init__(self):
            super().__init__()
            self.embedding = smp.nn.DistributedEmbedding(VOCABULARY, WIDTH)
            self.first = nn.Linear(WIDTH, 20)
            self.second = smp.nn.DistributedLinear(20, VOCABULARY)
            self.norm = smp.nn.FusedLayerNorm(WIDTH)

        def forward(self, ids):
            return self.second(torch.tanh(self.first(self.norm(self.embedding(ids)))))

    def predict(model, ids):
        logits = model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

    def ids(step, replica):
        return (tokens(step, replica),)

    def activations(step, replica):
        return (states(step, replica),)

    options = smp.nn.BlockOptions
    llama = options(
        num_key_value_heads=2, qkv_bias=False, dense_bias=False, mlp_bias=False, normalization="rmsnorm",
        rotary=smp.nn.Rotary.with_base(4), gated=True,
    )  # fmt: skip
    gptj = options(rotary=smp.nn.Rotary.with_base(2, interleaved=True), parallel_residual=True, shared_norm=True)
    odd = {"num_positions": 0, "activation": "silu", "tie_word_embedding": False, **causal}
    experts = options(num_experts=3, gated=True, mlp_bias=False, normalization="rmsnorm")
    attention = {**sizes, **quiet, "pre_layernorm": True}
    found = {
        "ends": (Ends, predict, ids),
        "flash": (Flash, hidden, activations),
        "gpt": (head(**causal, use_normal_initialization=True), language, ids),
        "llama": (head(**odd, options=llama), language, ids),
        "mqa": (head(**odd, options=options(num_key_value_heads=1, windows=(None, 3))), language, ids),
        "gptj": (head(**odd, options=gptj, lm_head_bias=True), language, ids),
        "bert": (head(num_token_types=2), masked_language, ids),
        "alibi": (head(**{**causal, "num_positions": 0}, options=options(use_alibi=True)), language, ids),
        "output": (
            lambda: smp.nn.DistributedTransformerOutputLayer(WIDTH, 24, 0.0, pre_layernorm=True), hidden, activations,
        ),
        "attention": (lambda: smp.nn.DistributedAttentionLayer(**attention), attended, activations),
        "layer": (lambda: smp.nn.DistributedTransformerLayer(**block, pre_layernorm=True), layered, activations),
        "cross": (
            lambda: smp.nn.DistributedTransformerLayer(**block, add_cross_attention=True), crossed, activations,
        ),
        "experts": (
            lambda: smp.nn.DistributedTransformerLayer(**block, activation="silu", options=experts), layered,
            activations,
        ),
        "stack": (
            lambda: smp.nn.DistributedTransformer(num_layers=2, **block, pre_layernorm=True), layered, activations,
        ),
    }  # fmt: skip
    return {name: Model(*each) for name, each in found.items()}
