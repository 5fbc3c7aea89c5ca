"""Trains a small convolutional network on scikit-learn's handwritten digits, data-parallel.

    smdrun -n 2 examples/torch_digits.py

Lines marked "data parallel" are all that differs from a script for one process.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# Data parallel: the library, and its wrapper for models.
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

matplotlib.use("Agg")
from matplotlib import pyplot


class Net(nn.Module):
    """Two convolutions and two linear layers for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = torch.relu(self.conv1(x_BCHW))
        x_BCHW = torch.max_pool2d(torch.relu(self.conv2(x_BCHW)), 2)
        return self.fc2(torch.relu(self.fc1(x_BCHW.flatten(1))))


def digits(dtype: torch.dtype = torch.float32) -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to learn from and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    x_train, x_test = (torch.tensor(x, dtype=dtype).reshape(-1, 1, 8, 8) / 16 for x in split[:2])
    y_train, y_test = (torch.tensor(y) for y in split[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def train(model, loader, optimizer, bar, task) -> list[float]:
    """One epoch; returns the loss of each step, over the batches of all ranks."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        # Data parallel: average the loss, which is computed from this rank's share of the batch.
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVERAGE)
        losses.append(mean.item())
        bar.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")
    return losses


@torch.no_grad()
def test(model, dataset) -> float:
    """Share of the test images that the model names correctly."""
    model.eval()
    images, labels = dataset.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def plot(losses: list[float], path: Path) -> None:
    """Draws the loss curve."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title=f"digits, {dist.get_world_size()} process(es)")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def replicas_are_equal(model) -> bool:
    """Whether the parameters are the same on all ranks, bit for bit."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    return all(torch.equal(mine, other) for other in everybodys)


def main(words: list[str] | None = None) -> None:
    """Trains with the options in `words`, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--double", action="store_true", help="train in float64, so that loss curves can be compared")
    parser.add_argument("--out", type=Path, default=Path("digits-out"), help="folder for the results")
    arguments = parser.parse_args(words)

    # Data parallel: join the job, unless the launcher has done so, as Ray's TorchTrainer does.
    if not dist.is_initialized():
        dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)

    # Data parallel: each rank takes its share of every batch.
    batch_size = max(arguments.batch_size // dist.get_world_size(), 1)
    dtype = torch.float64 if arguments.double else torch.float32
    train_set, test_set = digits(dtype)
    sampler = DistributedSampler(train_set, num_replicas=dist.get_world_size(), rank=rank, drop_last=True)
    loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)

    # Data parallel: wrap the model.
    model = DDP(Net().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    losses: list[float] = []
    accuracy = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        # One progress bar, on rank 0. Without a terminal, it is printed at the end of the epoch.
        console = Console(quiet=rank != 0, width=100)
        with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[accuracy]}"), console=console) as bar:
            task = bar.add_task(f"epoch {epoch:2}", total=len(loader), loss="", accuracy="")
            losses += train(model, loader, optimizer, bar, task)
            # Data parallel: rank 0 evaluates; a forward in eval mode does not communicate.
            if rank == 0:
                accuracy = test(model, test_set)
                bar.update(task, accuracy=f"test accuracy {accuracy:.1%}")

    equal = replicas_are_equal(model)
    # Data parallel: one rank saves.
    if rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), arguments.out / "model.pt")
        plot(losses, arguments.out / "loss.png")
        results = {"losses": losses, "accuracy": accuracy, "replicas_are_equal": equal}
        (arguments.out / "results.json").write_text(json.dumps(results))
        print(f"saved model.pt, loss.png and results.json in {arguments.out}")


if __name__ == "__main__":
    main()
