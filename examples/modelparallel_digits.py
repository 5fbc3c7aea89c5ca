"""Handwritten digits, with the model divided over the ranks.

smdrun -n 2 examples/modelparallel_digits.py
smdrun -n 4 examples/modelparallel_digits.py --manual      # two partitions by hand, two replicas
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--manual", action="store_true", help="say where the layers go")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--pipeline", default="interleaved", choices=("interleaved", "simple", "zero_bubble"))
options = parser.parse_args()

smp.init(
    {
        "partitions": 2,
        "microbatches": 4,
        "pipeline": options.pipeline,
        "ddp": True,
        "auto_partition": not options.manual,
        "default_partition": 0,
    }
)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        with smp.partition(1):
            self.hidden = nn.Linear(32 * 16, 128)
            self.out = nn.Linear(128, 10)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = F.relu(self.conv1(x_BCHW))
        x_BCHW = F.max_pool2d(F.relu(self.conv2(x_BCHW)), 2)
        return self.out(F.relu(self.hidden(x_BCHW.flatten(1))))


digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16.0, dtype=torch.float32)
targets = torch.tensor(digits.target)
order = torch.randperm(len(images))
train_part, test_part = order[:1536], order[1536:1792]

model = Net()
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
model = smp.DistributedModel(model)


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


@smp.step
def test_step(model, x, y):
    return (model(x).argmax(1) == y).sum()


for epoch in range(options.epochs):
    # Replicas train on different parts of the same permutation; the ranks of a pipeline train on the same batches.
    shuffled = train_part[torch.randperm(len(train_part), generator=torch.Generator().manual_seed(epoch))]
    model.train()
    for batch in shuffled.split(64 * smp.dp_size()):
        mine = batch.chunk(smp.dp_size())[smp.dp_rank()]
        optimizer.zero_grad()
        loss = train_step(model, images[mine], targets[mine]).reduce_mean()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = test_step(model, images[test_part], targets[test_part]).reduce_sum()
    if smp.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, {int(right)} of {len(test_part)} right")

names = ", ".join(name for name, _ in model.local_named_parameters())
print(f"rank {smp.rank()} is partition {smp.pp_rank()} of replica {smp.dp_rank()} and holds {names}")
