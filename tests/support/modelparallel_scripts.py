"""Scripts from the published guides, completed where the guides leave gaps: layers, a digits data set instead of
downloaded images, the device.
"""

from __future__ import annotations

#: From the guide to modifying a PyTorch script; `{layers}` is filled with `AUTOMATIC` or `MANUAL`.
GUIDE = """
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import smdistributed.modelparallel.torch as smp


class GroupedNet(nn.Module):
    def __init__(self):
        super(GroupedNet, self).__init__()
{layers}

    def forward(self, x):
        x = F.relu(self.conv(x), inplace=True)
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def train_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


def train(model, device, train_loader, optimizer):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        # Return value, loss_mb is a StepOutput object
        _, loss_mb = train_step(model, data, target)

        # smdistributed: Average the loss across microbatches.
        loss = loss_mb.reduce_mean()

        optimizer.step()
        losses.append(loss.item())


smp.init()
device = torch.device("cpu")
torch.manual_seed(0)
losses = []

from sklearn.datasets import load_digits

digits = load_digits()
dataset = torch.utils.data.TensorDataset(
    torch.tensor(digits.images[:, None] / 16.0, dtype=torch.float32), torch.tensor(digits.target)
)

# smdistributed: Shard the dataset based on data-parallel ranks
if smp.dp_size() > 1:
    shares = torch.arange(len(dataset)).chunk(smp.dp_size())
    dataset = torch.utils.data.Subset(dataset, shares[smp.dp_rank()].tolist())

train_loader = torch.utils.data.DataLoader(dataset, batch_size=64, drop_last=True)

model = GroupedNet()
optimizer = optim.Adadelta(model.parameters(), lr=4.0)

model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(optimizer)

for _ in range(3):
    train(model, device, train_loader, optimizer)
first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
assert last < 0.5 * first, (first, last)
names = [name for name, _ in model.local_named_parameters()]
names_of_ranks = smp.allgather(names, smp.WORLD)
assert sorted(sum(names_of_ranks[: smp.pp_size()], [])) == sorted(name for name, _ in model.module.named_parameters())
assert all(names_of_ranks), names_of_ranks
(pathlib.Path(__file__).parent / f"trained.{smp.rank()}").write_text(str(len(losses)))
"""

AUTOMATIC = """
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(256, 64)
        self.fc2 = nn.Linear(64, 10)
"""

MANUAL = """
        with smp.partition(0):
            self.conv = nn.Conv2d(1, 16, 3, padding=1)
        with smp.partition(1):
            self.fc1 = nn.Linear(256, 64)
            self.fc2 = nn.Linear(64, 10)
"""

#: The training loop of the notebook that trains ResNet-18: phases, a criterion as an argument of the step, a sampler.
NOTEBOOK = """
import pathlib

import torch
import torch.nn as nn

import smdistributed.modelparallel.torch as smp
from support.models import ResNet18

smp.init()
device = torch.device("cpu")
torch.manual_seed(0)

from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.images[:256, None] / 16.0, dtype=torch.float32)
targets = torch.tensor(digits.target[:256])
image_datasets = {"train": torch.utils.data.TensorDataset(images[:192], targets[:192] % 4)}
image_datasets["val"] = torch.utils.data.TensorDataset(images[192:], targets[192:] % 4)

model = ResNet18(8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
criterion = nn.CrossEntropyLoss()
model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(optimizer)

dataloaders = {}
train_sampler = torch.utils.data.distributed.DistributedSampler(
    image_datasets["train"], num_replicas=smp.dp_size(), rank=smp.dp_rank()
)
dataloaders["train"] = torch.utils.data.DataLoader(
    image_datasets["train"], batch_size=32, shuffle=False, num_workers=0, sampler=train_sampler, drop_last=True
)
dataloaders["val"] = torch.utils.data.DataLoader(image_datasets["val"], batch_size=32, shuffle=False, drop_last=True)


@smp.step
def train_step(model, data, target, criterion):
    output = model(data)
    loss = criterion(output, target)
    model.backward(loss)  #  instead of PyTorch loss.backward()
    return output, loss


@smp.step
def test_step(model, data, target, criterion):
    output = model(data)
    loss = criterion(output, target)
    return output, loss


losses = {"train": [], "val": []}
for epoch in range(3):
    for phase in ["train", "val"]:
        if phase == "train":
            model.train()  # Set model to training
        else:
            model.eval()  # Set model to evaluate
        for inputs, labels in dataloaders[phase]:
            inputs = inputs.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                if phase == "train":
                    outputs, loss_mb = train_step(model, inputs, labels, criterion)
                    loss = loss_mb.reduce_mean()
                    optimizer.step()
                else:
                    outputs, loss_mb = test_step(model, inputs, labels, criterion)
                    loss = loss_mb.reduce_mean()
            assert outputs.concat().shape == (32, 4)
            losses[phase].append(loss.item())
assert losses["train"][-1] < losses["train"][0], losses
(pathlib.Path(__file__).parent / f"trained.{smp.rank()}").write_text(str(len(losses["train"])))
"""
