"""Memory of each rank of a pipeline: bytes of its parameters, and growth of the process's peak resident size.

    smdrun -n 4 benches/modelparallel/memory.py [--blocks 24] [--width 1536]

The model is a GPT of equal blocks whose parameters are created without memory.
"""

from __future__ import annotations

import argparse
import resource

import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, width // 32, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes. The embedding and the head are small compared with the blocks."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(ids)))


def measure(partitions: int, blocks: int, width: int) -> tuple[int, int, int]:
    """Returns the bytes of the whole model's parameters, the bytes of this rank's parameters, and the growth of the
    peak resident size through the first step.
    """
    smp.init({"partitions": partitions, "microbatches": 4})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with smp.model_creation(dtype=torch.float32):
        model = GPT(blocks, width)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model = smp.DistributedModel(model)

    @smp.step
    def forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    with torch.no_grad():
        loss = forward(model, torch.randint(256, (4, 8))).reduce_mean()
    assert torch.isfinite(loss)
    # Counts the memory of the storages, since parameters of other partitions have none.
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.local_parameters()}
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return whole, sum(memory.values()), grown


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1536)
    arguments = parser.parse_args()
    whole, held, grown = measure(arguments.partitions, arguments.blocks, arguments.width)
    print(
        f"rank {smp.rank()}: {held / whole:.3f} of {whole / 2**20:.0f} MiB of parameters; the peak size grew by "
        f"{grown / 2**20:.0f} MiB, {grown / whole:.3f} of them",
        flush=True,
    )


if __name__ == "__main__":
    main()
