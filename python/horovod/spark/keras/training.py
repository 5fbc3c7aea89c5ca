"""The training of :class:`horovod.spark.keras.KerasEstimator` on one rank."""

from __future__ import annotations

import importlib
import itertools
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod.spark.common.estimator import shaped
from horovod.spark.common.reader import Shard


@dataclass
class Task:
    """The model and the data that a rank trains.

    Attributes:
        package: ``keras`` or ``tf_keras``.
        model: The model, pickled.
        optimizer: Configuration of the optimizer, or its name.
        others: The losses, the metrics and the callbacks, pickled: metrics have variables, and the device must be
            chosen before they are created.
        custom_objects: Custom objects of the model by name.
    """

    package: str
    model: bytes
    optimizer: Any
    others: bytes
    custom_objects: dict[str, Any]


def train(task: Task, plain: dict[str, Any]) -> tuple[dict[str, list[float]], list[np.ndarray]] | None:
    """Train on the rows of this rank.

    Args:
        task: The model.
        plain: Other parameters of the estimator.

    Returns:
        On rank 0 the history and the weights; ``None`` on the others.
    """
    keras = importlib.import_module(task.package)
    hvd: Any = importlib.import_module("horovod.keras" if task.package == "keras" else "horovod.tensorflow.keras")
    hvd.init()
    choose_device(task.package, plain["use_gpu"], hvd.local_rank())
    if plain["random_seed"] is not None:
        # Each rank has numbers of its own, as for its dropout. Weights are those of rank 0.
        keras.utils.set_random_seed(plain["random_seed"] + hvd.rank())
    with keras.utils.custom_object_scope(task.custom_objects):
        model = pickle.loads(task.model)
        loss, metrics, own_callbacks = pickle.loads(task.others)
        chosen = task.optimizer
        optimizer = keras.optimizers.get(chosen) if isinstance(chosen, str) else keras.optimizers.deserialize(chosen)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        compression=plain["gradient_compression"] or hvd.Compression.none,
        backward_passes_per_step=plain["backward_passes_per_step"],
    )
    # XLA cannot compile collectives.
    model.compile(
        optimizer=optimizer,
        loss=loss,
        loss_weights=plain["loss_weights"],
        metrics=metrics or None,
        jit_compile=False,
    )
    first, history = _resume(model, plain, hvd)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        *own_callbacks,
    ]
    if hvd.rank() == 0:
        callbacks.append(_recorder(keras, plain, history))
    batch_size, val_batch_size = plain["batch_size"], plain["val_batch_size"] or plain["batch_size"]
    rows = _shard(plain, plain["train_path"], hvd)
    steps = plain["train_steps_per_epoch"] or rows.steps(batch_size)
    validation: dict[str, Any] = {}
    if plain["val_path"]:
        held_back = _shard(plain, plain["val_path"], hvd)
        val_steps = plain["validation_steps_per_epoch"] or held_back.steps(val_batch_size)
        validation = {"validation_data": _sequence(keras, held_back, plain, val_batch_size, val_steps)}
    is_shuffled = plain["shuffle"] and plain["shuffle_buffer_size"] != 0
    orders = (
        (plain["random_seed"] or 0, epoch, hvd.rank()) if is_shuffled else None for epoch in itertools.count(first)
    )
    if first < plain["epochs"]:
        model.fit(
            _batches(rows, plain, batch_size, steps, orders),
            steps_per_epoch=steps,
            epochs=plain["epochs"],
            initial_epoch=first,
            # Lines for a log, not a bar.
            verbose=2 if plain["verbose"] and hvd.rank() == 0 else 0,
            callbacks=callbacks,
            # Keras cannot shuffle what a generator yields.
            shuffle=False,
            **validation,
        )
    return (history, model.get_weights()) if hvd.rank() == 0 else None


def choose_device(package: str, use_gpu: bool, local_rank: int) -> None:
    """Choose the GPU of this rank, or none. Call this before the framework uses a device.

    Args:
        package: ``keras`` or ``tf_keras``.
        use_gpu: Whether the rank trains on a GPU where there is one. If not, Keras on PyTorch needs the variable
            ``KERAS_TORCH_DEVICE`` in addition.
        local_rank: The local rank. Ranks share GPUs if there are fewer GPUs than local ranks.
    """
    if package == "keras" and importlib.import_module("keras").backend.backend() == "torch":
        import torch

        if use_gpu and torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    own = [gpus[local_rank % len(gpus)]] if use_gpu else []
    for gpu in own:
        # Other ranks may use the same GPU.
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.set_visible_devices(own, "GPU")


def _shard(plain: dict[str, Any], path: str, hvd: Any) -> Shard:
    weight = [plain["sample_weight_col"]] if plain["sample_weight_col"] else []
    columns = list(dict.fromkeys([*plain["feature_cols"], *plain["label_cols"], *weight]))
    return Shard(plain["store"], path, columns, hvd.rank(), hvd.size(), plain["transformation_fn"])


def _batches(rows: Shard, plain: dict[str, Any], batch_size: int, steps: int, orders: Any) -> Iterator[Any]:
    """Yield batches without end, as many for each epoch as it has steps."""
    for order in orders:
        for batch in rows.batches(batch_size, steps, order, plain["shuffle_buffer_size"]):
            yield _item(batch, plain)


def _item(batch: dict[str, np.ndarray], plain: dict[str, Any]) -> tuple[Any, ...]:
    """Return features, labels and weights as Keras takes them."""

    def several(arrays: list[np.ndarray]) -> Any:
        # Copies: arrays that pyarrow made cannot be written to.
        copies = tuple(np.array(each) for each in arrays)
        return copies[0] if len(copies) == 1 else copies

    features = shaped([batch[name] for name in plain["feature_cols"]], plain["input_shapes"])
    labels = shaped([batch[name] for name in plain["label_cols"]], plain["label_shapes"])
    weight = plain["sample_weight_col"]
    return (several(features), several(labels), *([np.array(batch[weight])] if weight else []))


def _sequence(keras: Any, rows: Shard, plain: dict[str, Any], batch_size: int, steps: int) -> Any:
    """Return the batches of a validation. Keras reads all of a sequence each time; of a generator it loses some."""

    class Batches(keras.utils.PyDataset if hasattr(keras.utils, "PyDataset") else keras.utils.Sequence):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Lock()
            self._following = 0
            self._batches = rows.batches(batch_size, steps)

        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            with self._lock:
                if index < self._following:
                    self._following, self._batches = 0, rows.batches(batch_size, steps)
                batch = next(itertools.islice(self._batches, index - self._following, None))
                self._following = index + 1
            return _item(batch, plain)

    return Batches()


def _resume(model: Any, plain: dict[str, Any], hvd: Any) -> tuple[int, dict[str, list[float]]]:
    """Load the checkpoint of this run on rank 0, and return the first epoch and the history so far."""
    store = plain["store"]
    path = store.get_checkpoint_path(plain["run_id"])
    epoch, history = 0, {}
    # The store is shared, and the checkpoint is complete before any rank of this job reads it.
    if store.saving_runs() and store.exists(path):
        epoch, history, weights = pickle.loads(store.read(path))
        model.set_weights(weights)
    if hvd.rank() == 0 and epoch and plain["verbose"]:
        print(f"run {plain['run_id']} resumes after epoch {epoch}", flush=True)
    return epoch, history


def _recorder(keras: Any, plain: dict[str, Any], history: dict[str, list[float]]) -> Any:
    """Return the callback that keeps the history and writes checkpoints."""

    class Recorder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            for name, value in (logs or {}).items():
                history.setdefault(name, []).append(float(value))
            store = plain["store"]
            if store.saving_runs():
                state = pickle.dumps((epoch + 1, history, self.model.get_weights()))
                store.write(store.get_checkpoint_path(plain["run_id"]), state)

    return Recorder()
