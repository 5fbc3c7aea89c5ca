"""The training of :class:`horovod.spark.torch.TorchEstimator` on one rank."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import horovod.torch as hvd
from horovod.spark.common.estimator import shaped
from horovod.spark.common.reader import Shard


def inputs(features: Sequence[np.ndarray], device: Any = "cpu") -> list[torch.Tensor]:
    """Return the arguments of a model.

    Args:
        features: An array for each feature.
        device: The device of the model.

    Returns:
        Tensors. Numbers of double precision become ``float32``.
    """
    # Arrays that pyarrow made cannot be written to, and PyTorch warns of such ones.
    tensors = [torch.from_numpy(np.array(feature)).to(device) for feature in features]
    return [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in tensors]


def train(task: bytes, plain: dict[str, Any]) -> tuple[list[dict[str, Any]], bytes] | None:
    """Train on the rows of this rank.

    Args:
        task: The model, its optimizer and the losses, pickled.
        plain: Other parameters of the estimator.

    Returns:
        On rank 0 the figures of each epoch, and the model's state; ``None`` on the others.
    """
    from pyspark import cloudpickle

    hvd.init()
    if plain["random_seed"] is not None:
        # Each rank has numbers of its own, as for its dropout. Parameters are those of rank 0.
        torch.manual_seed(plain["random_seed"] + hvd.rank())
    model, optimizer, losses = cloudpickle.loads(task)
    trainer = _Trainer(model, optimizer, losses, plain)
    trainer.fit()
    return (trainer.history, _bytes(model.cpu().state_dict())) if hvd.rank() == 0 else None


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class _Trainer:
    def __init__(self, model: Any, optimizer: Any, losses: list[Any], plain: dict[str, Any]) -> None:
        self._plain = plain
        self._model = model
        self._losses = losses
        labels = plain["label_cols"]
        weights = plain["loss_weights"] or [1.0 / len(labels)] * len(labels)
        self._weights = [float(weight) for weight in weights]
        self._metrics = [_metrics_of(plain["metrics"], place) for place in range(len(labels))]
        self.history: list[dict[str, Any]] = []
        self._device = torch.device("cpu")
        if plain["use_gpu"] and torch.cuda.is_available():
            self._device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
            model.to(self._device)
            # The optimizer's states follow its parameters.
            optimizer.load_state_dict(optimizer.state_dict())
        self._first_epoch = self._resume(optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self._optimizer: Any = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=plain["gradient_compression"] or hvd.Compression.none,
            backward_passes_per_step=plain["backward_passes_per_step"],
        )

    def _resume(self, optimizer: Any) -> int:
        """Load the checkpoint of this run on rank 0, and return the first epoch."""
        plain, epoch = self._plain, 0
        path = plain["store"].get_checkpoint_path(plain["run_id"])
        if hvd.rank() == 0 and plain["store"].saving_runs() and plain["store"].exists(path):
            found = torch.load(io.BytesIO(plain["store"].read(path)), map_location=self._device, weights_only=True)
            self._model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            self.history, epoch = found["history"], found["epoch"]
        return int(hvd.broadcast_object(epoch, root_rank=0))

    def _shard(self, path: str) -> Shard:
        plain = self._plain
        weight = [plain["sample_weight_col"]] if plain["sample_weight_col"] else []
        columns = list(dict.fromkeys([*plain["feature_cols"], *plain["label_cols"], *weight]))
        return Shard(plain["store"], path, columns, hvd.rank(), hvd.size(), plain["transformation_fn"])

    def fit(self) -> None:
        plain = self._plain
        size, val_size = plain["batch_size"], plain["val_batch_size"] or plain["batch_size"]
        rows = self._shard(plain["train_path"])
        held_back = self._shard(plain["val_path"]) if plain["val_path"] else None
        steps = plain["train_steps_per_epoch"] or rows.steps(size)
        seed = plain["random_seed"] or 0
        is_shuffled = plain["shuffle"] and plain["shuffle_buffer_size"] != 0
        for epoch in range(self._first_epoch, plain["epochs"]):
            order = (seed, epoch, hvd.rank()) if is_shuffled else None
            self._model.train()
            batches = rows.batches(size, steps, order, plain["shuffle_buffer_size"])
            figures = {"epoch": epoch, "train": self._run(batches, is_training=True)}
            if held_back is not None:
                self._model.eval()
                batches = held_back.batches(val_size, plain["validation_steps_per_epoch"])
                with torch.no_grad():
                    figures["validation"] = self._run(batches, is_training=False)
            self.history.append(figures)
            if hvd.rank() == 0:
                self._end_epoch(epoch, figures)

    def _end_epoch(self, epoch: int, figures: dict[str, Any]) -> None:
        plain = self._plain
        for callback in plain["callbacks"]:
            callback(epoch, figures)
        if plain["verbose"]:
            texts = [f"{part} loss {figures[part]['loss']:.4f}" for part in ("train", "validation") if part in figures]
            print(f"epoch {epoch + 1} of {plain['epochs']}: {', '.join(texts)}", flush=True)
        if plain["store"].saving_runs():
            state = {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "history": self.history,
                "epoch": epoch + 1,
            }
            plain["store"].write(plain["store"].get_checkpoint_path(plain["run_id"]), _bytes(state))

    def _run(self, batches: Any, is_training: bool) -> dict[str, Any]:
        """Compute batches, and return the average over the rows of all ranks."""
        passes = self._plain["backward_passes_per_step"]
        sums: np.ndarray = np.zeros(1)
        pending = 0
        for batch in batches:
            loss, metrics, rows = self._step(batch)
            if is_training:
                loss.backward()
                pending += 1
                if pending == passes:
                    self._optimizer.step()
                    self._optimizer.zero_grad()
                    pending = 0
            figures = rows * np.array([1.0, loss.item(), *metrics])
            sums = figures if len(sums) == 1 else sums + figures
        if pending:
            self._optimizer.step()
            self._optimizer.zero_grad()
        total = hvd.allreduce(torch.from_numpy(sums), op=hvd.Sum, name=f"figures.{is_training}").numpy()
        averages = (total[1:] / total[0]).tolist()
        return {"loss": averages[0], "all_metrics": averages[1:]}

    def _step(self, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, list[float], int]:
        plain = self._plain
        features = shaped([batch[name] for name in plain["feature_cols"]], plain["input_shapes"])
        labels = inputs(shaped([batch[name] for name in plain["label_cols"]], plain["label_shapes"]), self._device)
        weight = plain["sample_weight_col"]
        sample_weights = inputs([batch[weight]], self._device)[0] if weight else None
        outputs = self._model(*inputs(features, self._device))
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        if len(outputs) != len(labels):
            raise ValueError(f"the model has {len(outputs)} outputs for {len(labels)} label columns")
        total: Any = 0.0
        metrics: list[float] = []
        for place, (output, label) in enumerate(zip(outputs, labels, strict=True)):
            total = total + self._weights[place] * _loss(self._losses[place], output, label, sample_weights)
            metrics += [float(metric(output.detach(), label)) for metric in self._metrics[place]]
        return total, metrics, len(labels[0])


def _loss(loss: Any, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return loss(output, label)
    if hasattr(loss, "reduction"):
        before, loss.reduction = loss.reduction, "none"
        try:
            each = loss(output, label)
        finally:
            loss.reduction = before
    else:
        each = loss(output, label, reduction="none")
    # Losses of several numbers for each row.
    return (each.reshape(len(weights), -1).mean(1) * weights).mean()


def _metrics_of(metrics: Any, place: int) -> list[Any]:
    """Return the metrics of one label."""
    if metrics and isinstance(metrics[0], (list, tuple)):
        return list(metrics[place])
    return list(metrics or [])
