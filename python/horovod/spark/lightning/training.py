"""The training of :class:`horovod.spark.lightning.TorchEstimator` on one rank.

Each rank has a trainer for its own device. A callback averages gradients before each step of an optimizer, and what
the module has logged after each epoch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import lightning
import torch

import horovod.torch as hvd
from horovod.spark.common.estimator import shaped
from horovod.spark.common.reader import Shard
from horovod.spark.torch.training import inputs


def train(task: bytes, plain: dict[str, Any]) -> tuple[list[dict[str, Any]], bytes] | None:
    """Train on the rows of this rank.

    Args:
        task: The module, pickled.
        plain: Other parameters of the estimator.

    Returns:
        On rank 0 the figures of each epoch, and the module's state; ``None`` on the others.
    """
    from pyspark import cloudpickle

    hvd.init()
    if plain["random_seed"] is not None:
        # Each rank has numbers of its own, as for its dropout. Parameters are those of rank 0.
        lightning.seed_everything(plain["random_seed"] + hvd.rank(), verbose=False)
    module = cloudpickle.loads(task)
    ranks = _Ranks(plain)
    first = ranks.resume(module)
    arguments = dict(plain["trainer_args"] or {})
    # Added to those below: without the callback of the ranks, gradients would not be averaged.
    more = arguments.pop("callbacks", None) or []
    has_gpu = plain["use_gpu"] and torch.cuda.is_available()
    options: dict[str, Any] = {
        "accelerator": "gpu" if has_gpu else "cpu",
        "devices": [hvd.local_rank() % torch.cuda.device_count()] if has_gpu else 1,
        "strategy": "auto",
        "callbacks": [ranks, *plain["callbacks"], *(more if isinstance(more, list) else [more])],
        "max_epochs": plain["epochs"] - first,
        "accumulate_grad_batches": plain["backward_passes_per_step"],
        "logger": (plain["logger"] or False) if hvd.rank() == 0 else False,
        "log_every_n_steps": plain["log_every_n_steps"],
        "detect_anomaly": plain["terminate_on_nan"],
        "profiler": plain["profiler"],
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        **arguments,
    }
    if plain["epochs"] > first:
        trainer = lightning.Trainer(**options)
        trainer.fit(module, _loader(plain, first, is_training=True), _loader(plain, first, is_training=False))
    return (ranks.history, _bytes(module.cpu().state_dict())) if hvd.rank() == 0 else None


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class _Rows(torch.utils.data.IterableDataset):
    """Batches of one epoch after the other."""

    def __init__(self, plain: dict[str, Any], path: str, first: int, is_training: bool) -> None:
        self._plain = plain
        weight = [plain["sample_weight_col"]] if plain["sample_weight_col"] else []
        columns = list(dict.fromkeys([*plain["feature_cols"], *plain["label_cols"], *weight]))
        self._rows = Shard(plain["store"], path, columns, hvd.rank(), hvd.size(), plain["transformation_fn"])
        self._epoch = first
        self._is_training = is_training
        kind = "train" if is_training else "validation"
        self._size = plain["batch_size"] if is_training else plain["val_batch_size"] or plain["batch_size"]
        self._steps = plain[f"{kind}_steps_per_epoch"] or self._rows.steps(self._size)

    def __len__(self) -> int:
        return int(self._steps)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        plain = self._plain
        is_shuffled = self._is_training and plain["shuffle"] and plain["shuffle_buffer_size"] != 0
        order = (plain["random_seed"] or 0, self._epoch, hvd.rank()) if is_shuffled else None
        self._epoch += 1
        for batch in self._rows.batches(self._size, self._steps, order, plain["shuffle_buffer_size"]):
            for part in ("feature", "label"):
                names = plain[f"{part}_cols"]
                shapes = plain["input_shapes" if part == "feature" else "label_shapes"]
                batch.update(zip(names, shaped([batch[name] for name in names], shapes), strict=True))
            yield dict(zip(batch, inputs(list(batch.values())), strict=True))


def averages(figures_of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average what the ranks have logged.

    Args:
        figures_of_ranks: The figures of each rank by name. A module may log a name on some ranks only.

    Returns:
        The average of each name over the ranks that have logged it, in the order of names.
    """
    values: dict[str, list[float]] = {}
    for figures in figures_of_ranks:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


def _loader(plain: dict[str, Any], first: int, is_training: bool) -> Any:
    path = plain["train_path" if is_training else "val_path"]
    if not path:
        return None
    return torch.utils.data.DataLoader(_Rows(plain, path, first, is_training), batch_size=None)


class _Ranks(lightning.Callback):
    """The callback that connects the trainers of all ranks."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self._plain = plain
        self.history: list[dict[str, Any]] = []

    def resume(self, module: Any) -> int:
        """Load the checkpoint of this run on rank 0, give all ranks its parameters, and return the first epoch."""
        store, epoch = self._plain["store"], 0
        path = store.get_checkpoint_path(self._plain["run_id"])
        if hvd.rank() == 0 and store.saving_runs() and store.exists(path):
            found = torch.load(io.BytesIO(store.read(path)), map_location="cpu", weights_only=True)
            module.load_state_dict(found["model"])
            self.history, epoch = found["history"], found["epoch"]
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        return int(hvd.broadcast_object(epoch, root_rank=0))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    # Another rank may have a gradient for the parameter.
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        compression = self._plain["gradient_compression"] or hvd.Compression.none
        packed = [compression.compress(gradient) for gradient in gradients]
        averages = hvd.grouped_allreduce([each for each, _ in packed], name="gradients", op=hvd.Average)
        for gradient, average, (_, context) in zip(gradients, averages, packed, strict=True):
            gradient.copy_(compression.decompress(average, context))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        own = {name: float(value) for name, value in trainer.callback_metrics.items()}
        figures = averages(hvd.allgather_object(own, name="figures"))
        if hvd.rank() != 0:
            return
        plain, epoch = self._plain, len(self.history)
        self.history.append({"epoch": epoch, **figures})
        if plain["verbose"]:
            texts = [f"{name} {value:.4f}" for name, value in figures.items()]
            print(f"epoch {epoch + 1} of {plain['epochs']}: {', '.join(texts)}", flush=True)
        if plain["store"].saving_runs():
            state = {"model": pl_module.state_dict(), "history": self.history, "epoch": epoch + 1}
            plain["store"].write(plain["store"].get_checkpoint_path(plain["run_id"]), _bytes(state))
