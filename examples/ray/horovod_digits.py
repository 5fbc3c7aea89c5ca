"""Classifies handwritten digits with Horovod's API on the workers of a Ray cluster.

    ray start --head --num-cpus 2
    python examples/ray/horovod_digits.py --workers 2

Every rank takes its share of each batch, so the loss curve does not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ray

from horovod.ray import RayExecutor, ray_logger


def train(epochs: int, batch_size: int, learning_rate: float, use_gpu: bool = False) -> dict[str, Any]:
    """Trains on one worker, on its GPU with ``use_gpu``. Returns the loss of each step, and the accuracy on the test images."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import horovod.torch as hvd

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if use_gpu else torch.device("cpu")
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    losses = []
    for epoch in range(epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        # Without the last batch, which would be smaller than the others.
        for batch in order.split(batch_size)[: 1500 // batch_size]:
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        if hvd.rank() == 0:
            ray_logger.log({"epoch": epoch + 1, "loss": losses[-1]})

    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    return {"rank": hvd.rank(), "size": hvd.size(), "losses": losses, "accuracy": accuracy}


def main() -> None:
    """Starts the workers and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=60, help="over all workers")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()

    ray.init(address="auto", log_to_driver=True)
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=120), num_workers=options.workers, use_gpu=options.use_gpu
    )
    executor.start()
    try:
        results = executor.run(
            train,
            args=[options.epochs, options.batch_size, options.learning_rate, options.use_gpu],
            callbacks=[lambda record: print(f"epoch {record['epoch']}: loss {record['loss']:.4f}", flush=True)],
        )
    finally:
        executor.shutdown()
    print(f"accuracy {results[0]['accuracy']:.3f} on {results[0]['size']} workers")
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
