"""A language model of bytes on the sources of Python's own library, divided over the ranks.

smdrun -n 4 examples/modelparallel_gpt.py --partitions 4 --pipeline zero_bubble
smdrun -n 4 examples/modelparallel_gpt.py --partitions 2      # and two replicas
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--partitions", type=int, default=2)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--pipeline", default="interleaved", choices=("interleaved", "simple", "zero_bubble"))
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch", type=int, default=16, help="sequences for each replica and step")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

smp.init(
    {
        "partitions": options.partitions,
        "microbatches": options.microbatches,
        "pipeline": options.pipeline,
        "ddp": True,
    }
)
torch.manual_seed(0)


class Block(nn.Module):
    """Attention and a feed-forward layer. B sequences of L bytes, width W, H heads of size S."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLW: torch.Tensor) -> torch.Tensor:
        B, L, W = x_BLW.shape
        qkv = self.qkv(self.norm1(x_BLW)).view(B, L, 3, self.heads, W // self.heads)
        q_BHLS, k_BHLS, v_BHLS = qkv.permute(2, 0, 3, 1, 4)
        y_BHLS = F.scaled_dot_product_attention(q_BHLS, k_BHLS, v_BHLS, is_causal=True)
        x_BLW = x_BLW + self.proj(y_BHLS.transpose(1, 2).reshape(B, L, W))
        return x_BLW + self.down(F.gelu(self.up(self.norm2(x_BLW))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, options.width)
        self.places = nn.Embedding(options.length, options.width)
        self.blocks = nn.Sequential(*(Block(options.width, 4) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, 256)

    def forward(self, x_BL: torch.Tensor) -> torch.Tensor:
        x_BLW = self.bytes(x_BL) + self.places(torch.arange(x_BL.shape[1], device=x_BL.device))
        return self.head(self.norm(self.blocks(x_BLW)))


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    model.backward(loss)
    return loss


paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)

model = GPT()
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, step / 20) * (0.5 + 0.5 * math.cos(math.pi * step / options.steps))
)
model = smp.DistributedModel(model)

started = time.perf_counter()
for step in range(options.steps):
    # The ranks of a pipeline draw the same positions, and replicas different ones.
    generator = torch.Generator().manual_seed(step * smp.dp_size() + smp.dp_rank())
    starts = torch.randint(len(text) - options.length - 1, (options.batch,), generator=generator)
    pieces = torch.stack([text[start : start + options.length + 1] for start in starts]).long()
    optimizer.zero_grad()
    loss = train_step(model, pieces[:, :-1], pieces[:, 1:]).reduce_mean()
    smp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if smp.rank() == 0 and (step % 10 == 9 or step == 0):
        seconds = time.perf_counter() - started
        print(f"step {step + 1}: {loss / math.log(2):.3f} bits per byte, {seconds:.1f} s", flush=True)
held = sum(parameter.numel() for parameter in model.local_parameters())
print(
    f"rank {smp.rank()} holds {held / 1e6:.2f} million of {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million"
)
