"""Trains `examples/torch_digits.py` with two workers of a running Ray cluster, which the driver finds by RAY_ADDRESS.

    python benches/engines/ray_driver.py executor --double --out FOLDER     # horovod.ray.RayExecutor
    python benches/engines/ray_driver.py trainer --double --out FOLDER      # TorchTrainer of Ray Train

The folder is an absolute path, which all nodes share.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ray

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(config: dict[str, object]) -> None:
    """Runs on each worker."""
    sys.path.insert(0, config["examples"])
    if config["kind"] == "executor":
        import horovod.torch as hvd

        # Only Horovod's `init` asks the driver for the host of rank 0. The script then trains in this job.
        hvd.init()
    import torch_digits

    torch_digits.main(config["words"])


def main() -> None:
    kind, *words = sys.argv[1:]
    config = {"examples": str(EXAMPLES), "kind": kind, "words": words}
    ray.init(log_to_driver=True)
    {"executor": train_by_executor, "trainer": train_by_trainer}[kind](config)


def train_by_executor(config: dict[str, object]) -> None:
    from horovod.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
    executor.start()
    try:
        executor.run(train, args=[config])
    finally:
        executor.shutdown()


def train_by_trainer(config: dict[str, object]) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from smdistributed.integrations.ray import SmdConfig

    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=SmdConfig(timeout_s=120),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="digits", storage_path=storage),
        ).fit()


if __name__ == "__main__":
    main()
