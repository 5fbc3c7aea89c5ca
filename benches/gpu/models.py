"""Causal language models that return their loss: a plain GPT-2 (learned positions, pre-norm blocks, head tied to the
token embedding), and the GPT-2 and the Llama of transformers.
"""

from __future__ import annotations

import torch
from torch.nn import functional

#: Width, layers and heads of the published sizes of GPT-2.
SIZES = {"124M": (768, 12, 12), "350M": (1024, 24, 16), "774M": (1280, 36, 20), "1.5B": (1600, 48, 25)}
VOCABULARY = 50_257
LLAMA_VOCABULARY = 32_000
CONTEXT = 1024


class Block(torch.nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.norm_2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTC.shape
        heads = self.attention(self.norm_1(x_BTC)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTC = x_BTC + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x_BTC + self.down(functional.gelu(self.up(self.norm_2(x_BTC)), approximate="tanh"))


class GPT(torch.nn.Module):
    """Returns the mean loss of predicting each next token."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(CONTEXT, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits = self.head(self.norm(x_BTC))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets_BT.reshape(-1))


class HuggingFaceGPT(torch.nn.Module):
    """The GPT-2 of transformers with its defaults, including dropout. Returns the mean loss of predicting each next
    token.
    """

    def __init__(self, width: int, layers: int, heads: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel._from_config(GPT2Config(n_embd=width, n_layer=layers, n_head=heads))
        self.blocks = self.model.transformer.h

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens_BT, use_cache=False).logits
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets_BT.reshape(-1))


class HuggingFaceLlama(torch.nn.Module):
    """The Llama of transformers with 1.1 billion parameters. Returns the mean loss of predicting each next token."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
            num_key_value_heads=4, vocab_size=LLAMA_VOCABULARY,
        )  # fmt: skip
        self.model = LlamaForCausalLM._from_config(config)
        self.blocks = self.model.model.layers

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens_BT, use_cache=False).logits
        return functional.cross_entropy(logits.view(-1, LLAMA_VOCABULARY), targets_BT.reshape(-1))


def make(name: str) -> torch.nn.Module:
    """Makes a model: a size of GPT-2, ``hf-`` and a size for that of transformers, or ``hf-llama``."""
    if name == "hf-llama":
        return HuggingFaceLlama()
    return (HuggingFaceGPT if name.startswith("hf-") else GPT)(*SIZES[name.removeprefix("hf-")])
