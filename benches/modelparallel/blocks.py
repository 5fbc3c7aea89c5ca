"""A GPT of equal blocks, which can be cut between any two blocks; all libraries get the same modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    width: int = 2048
    blocks: int = 32
    heads: int = 16
    vocabulary: int = 50_304
    context: int = 1024
    #: Whether attention and feed-forward network of a block are separate modules, so that the model can be cut between
    #: them.
    halves: bool = False

    @property
    def middle(self) -> int:
        """Modules between the embedding and the head."""
        return self.blocks * (2 if self.halves else 1)


class Embedding(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))

    def reset_parameters(self) -> None:
        """Initializes the positions."""
        nn.init.zeros_(self.positions)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens_BT) + self.positions[: tokens_BT.shape[1]]


class Attention(nn.Module):
    """Causal attention with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm = nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTC.shape
        heads = self.attention(self.norm(x_BTC)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x_BTC + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """A feed-forward network with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return x_BTC + self.down(functional.gelu(self.up(self.norm(x_BTC)), approximate="tanh"))


class Block(nn.Module):
    """Attention followed by a feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(self.attention(x_BTC))


class Head(nn.Module):
    """A norm and the logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x_BTC))


def loss_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each next token."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def build(shape: Shape, device: str | torch.device = "cpu") -> nn.Sequential:
    """Makes embedding, blocks and head. Parameters follow PyTorch's seed."""
    with torch.device(device):
        kinds = [Attention, FeedForward] if shape.halves else [Block]
        middle = [kind(shape) for _ in range(shape.blocks) for kind in kinds]
        model = nn.Sequential(Embedding(shape), *middle, Head(shape))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return model


def chunk_of(place: int, shape: Shape, chunks: int) -> int:
    """Returns the index of the piece, of ``chunks`` equal ones, to which the module at ``place`` belongs."""
    module = min(max(place - 1, 0), shape.middle - 1)
    return module * chunks // shape.middle
