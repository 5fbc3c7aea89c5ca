"""Classifies handwritten digits with PyTorch and Horovod's API: the classic script.

horovodrun -np 2 python examples/horovod/torch_digits.py
mpirun -np 2 python examples/horovod/torch_digits.py
torchrun --nproc-per-node 2 examples/horovod/torch_digits.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


def main() -> None:
    """Trains, and prints the accuracy on what was held back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in half precision")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    training = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(training, batch_size=options.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # The learning rate is scaled by the number of ranks, because a step processes one batch of each rank.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    )

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean.item():.3f}")

    with torch.no_grad():
        # Each rank evaluates its share of the test images.
        mine = slice(1500 + hvd.rank(), None, hvd.size())
        hits = (model(images[mine]).argmax(1) == labels[mine]).sum()
        counts = hvd.allreduce(torch.stack([hits, torch.tensor(len(labels[mine]))]), op=hvd.Sum, name="accuracy")
    if hvd.rank() == 0:
        print(f"accuracy {counts[0].item() / counts[1].item():.3f} on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
