"""Trains on handwritten digits while nodes join and leave the Ray cluster.

    ray start --head --num-cpus 1
    python examples/ray/elastic_digits.py --min-workers 1

Run ``ray start --address HEAD:6379 --num-cpus 1`` on another host meanwhile, or ``ray stop`` there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ray

from horovod.ray import ElasticRayExecutor, ray_logger


def train(epochs: int, batch_size: int, pause: float) -> dict[str, Any]:
    """What each worker runs. Returns the samples of each epoch, the sizes of the sessions and the accuracy."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # The sampler records which samples of the epoch were processed, and divides the others among the current workers.
    sampler = hvd.elastic.ElasticSampler(range(1500))

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.rank() == 0:
            ray_logger.log({"size": hvd.size(), "epoch": state.epoch})
        while state.epoch < epochs:
            for number, indices in enumerate(torch.utils.data.BatchSampler(state.sampler, batch_size, False)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
                loss.backward()
                optimizer.step()
                seen = hvd.allgather(torch.tensor(indices)).tolist()
                state.seen = [*state.seen[:-1], [*state.seen[-1], *seen]]
                state.sampler.record_batch(number, len(indices))
                time.sleep(pause)
                # Saves the progress. If nodes were added or removed, training restarts here with the new workers.
                state.commit()
            state.epoch += 1
            state.seen = [*state.seen, []]
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, seen=[[]])
    loop(state)
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    return {"rank": hvd.rank(), "size": hvd.size(), "seen": state.seen[:epochs], "accuracy": accuracy}


def main() -> None:
    """Trains on what nodes there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=30, help="of each worker")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()

    ray.init(address="auto")
    settings = ElasticRayExecutor.create_settings(
        min_num_proc=options.min_workers, max_num_proc=options.max_workers, elastic_timeout=300, timeout_s=120
    )
    executor = ElasticRayExecutor(settings, use_gpu=options.use_gpu)
    executor.start()
    results = executor.run(
        lambda: train(options.epochs, options.batch_size, options.pause),
        callbacks=[lambda record: print(f"a session of {record['size']} in epoch {record['epoch']}", flush=True)],
    )
    print(f"accuracy {results[0]['accuracy']:.3f}, {results[0]['size']} workers at the end")
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
