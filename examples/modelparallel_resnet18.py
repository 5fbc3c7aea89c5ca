"""ResNet-18 on handwritten digits, divided automatically: two partitions, two replicas.

smdrun -n 4 examples/modelparallel_resnet18.py
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, default=None, help="of each epoch; by default all")
parser.add_argument("--batch", type=int, default=64, help="images for each replica and step")
parser.add_argument("--width", type=int, default=64, help="channels of the first layers")
parser.add_argument("--size", type=int, default=32, help="pixels of a side, which 8 are made of")
options = parser.parse_args()

smp.init(
    {
        "partitions": 2,
        "microbatches": 8,
        "pipeline": "interleaved",
        "optimize": "speed",
        "placement_strategy": "cluster",
        "ddp": True,
    }
)
torch.manual_seed(0)


class Block(nn.Module):
    """Two convolutions and a way around them. B images, C channels, H by W pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        around_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        x_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        x_BCHW = self.bn2(self.conv2(x_BCHW))
        x_BCHW += around_BCHW
        return self.relu(x_BCHW)


class ResNet18(nn.Module):
    """Names and layers are torchvision's, so its weights fit."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_BCHW))))
        x_BCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_BCHW))))
        return self.fc(torch.flatten(self.avgpool(x_BCHW), 1))


digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16.0, dtype=torch.float32)
images = F.interpolate(images, size=options.size, mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
targets = torch.tensor(digits.target)
order = torch.randperm(len(images))
train_part, test_part = order[:1536], order[1536:1792]

model = ResNet18(options.width, 10)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4))
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
    started = time.perf_counter()
    # Replicas train on different parts of the same permutation; the ranks of a pipeline train on the same batches.
    shuffled = train_part[torch.randperm(len(train_part), generator=torch.Generator().manual_seed(epoch))]
    model.train()
    for batch in shuffled.split(options.batch * smp.dp_size())[: options.steps]:
        mine = batch.chunk(smp.dp_size())[smp.dp_rank()]
        optimizer.zero_grad()
        loss = train_step(model, images[mine], targets[mine]).reduce_mean()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = test_step(model, images[test_part], targets[test_part]).reduce_sum()
    if smp.rank() == 0:
        seconds = time.perf_counter() - started
        print(f"epoch {epoch}: loss {loss:.4f}, {int(right)} of {len(test_part)} right, {seconds:.1f} s", flush=True)

held = sum(parameter.numel() for parameter in model.local_parameters())
whole = sum(parameter.numel() for parameter in model.parameters())
print(f"rank {smp.rank()} is partition {smp.pp_rank()} of replica {smp.dp_rank()} and holds {held} of {whole} numbers")
