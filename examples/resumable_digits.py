"""Trains on handwritten digits, under Slurm or on Kubernetes, and continues from the newest checkpoint.

    srun --nodes 2 --ntasks 2 python examples/resumable_digits.py --checkpoints checkpoints

Every rank takes its share of each batch, so the loss curve does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP


def newest(folder: Path) -> Path | None:
    """The checkpoint of the last epoch that was completed, if there is one."""
    return max(folder.glob("epoch-*.pt"), key=lambda path: int(path.stem.partition("-")[2]), default=None)


def save(folder: Path, epoch: int, state: dict) -> None:
    """Writes a checkpoint that is complete or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".epoch-{epoch}.partial"
    torch.save(state, partial)
    partial.rename(folder / f"epoch-{epoch}.pt")


def main() -> None:
    """Trains, and prints the loss of each epoch and the accuracy on what was held back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=60, help="over all ranks")
    parser.add_argument("--checkpoints", type=Path, help="folder that all hosts see")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    first = 0
    checkpoint = newest(options.checkpoints) if options.checkpoints else None
    if checkpoint is not None:
        # Every rank reads the checkpoint, because the states are equal on all ranks.
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
        if rank == 0:
            print(f"going on from {checkpoint.name}", flush=True)

    for epoch in range(first, options.epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(options.batch_size):
            mine = batch[rank::size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            time.sleep(options.pause)
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVERAGE)
        if rank == 0:
            if options.checkpoints:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                save(options.checkpoints, epoch + 1, state)
            print(f"epoch {epoch + 1}: loss {mean.item():.5f}", flush=True)

    if rank == 0:
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        print(f"accuracy {accuracy:.3f} on {size} ranks", flush=True)


if __name__ == "__main__":
    main()
