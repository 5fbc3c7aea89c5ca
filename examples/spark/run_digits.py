"""Classifies handwritten digits with Horovod's API in the tasks of a Spark cluster.

    python examples/spark/run_digits.py --master 'local-cluster[2,1,1024]' --num-proc 2

Every rank takes its share of each batch, so the loss curve does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import horovod.spark


def train(epochs: int, batch_size: int, learning_rate: float) -> dict[str, Any]:
    """What each rank runs. Returns the loss of each step and the accuracy on what was held back."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    losses = []
    for epoch in range(epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(batch_size)[: 1500 // batch_size]:
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss").item())

    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    return {"rank": hvd.rank(), "size": hvd.size(), "losses": losses, "accuracy": accuracy}


def main() -> None:
    """Starts the Spark application and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local-cluster[2,1,1024]")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=60, help="over all ranks")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()

    session = SparkSession.builder.master(options.master).getOrCreate()
    arguments = (options.epochs, options.batch_size, options.learning_rate)
    results = horovod.spark.run(train, args=arguments, num_proc=options.num_proc)
    print(f"accuracy {results[0]['accuracy']:.3f} on {results[0]['size']} ranks")
    if options.out:
        options.out.write_text(json.dumps(results))
    session.stop()


if __name__ == "__main__":
    main()
