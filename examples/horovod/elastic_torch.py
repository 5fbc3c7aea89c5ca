"""Trains on scikit-learn's handwritten digits while hosts come and go, or workers die.

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./discover.sh python examples/horovod/elastic_torch.py

where `discover.sh` prints a line such as `localhost:2` for each host. It also runs under `horovodrun -np 2`, mpirun, and torchrun,
whose agent (`--max-restarts`) starts all workers anew after a failure: they continue from the last commit.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
# The sampler records which samples of the epoch were processed, and divides the others among the current workers.
sampler = hvd.elastic.ElasticSampler(labels)


@hvd.elastic.run
def train(state):
    while state.epoch < arguments.epochs:
        for number, indices in enumerate(torch.utils.data.BatchSampler(state.sampler, arguments.batch_size, False)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(number, len(indices))
            if number % 5 == 4:
                # Saves the progress. If hosts were added or removed, training restarts here with the new workers.
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} on {hvd.size()} workers: loss {loss.item():.3f}", flush=True)


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
if hvd.rank() == 0:
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{right:.1%} of the digits are right", flush=True)
