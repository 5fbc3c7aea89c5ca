"""The estimator for modules of Lightning."""

from __future__ import annotations

import io
from typing import Any

import torch
from pyspark import cloudpickle

from horovod.spark.common.backend import Backend
from horovod.spark.common.estimator import HorovodEstimator
from horovod.spark.common.params import with_params
from horovod.spark.lightning import training
from horovod.spark.torch import TorchModel as TorchModel
from horovod.spark.torch.estimator import CUSTOM_OBJECTS_UNUSED

_LIGHTNING: dict[str, tuple[Any, str]] = {
    "trainer_args": (None, "more arguments of `lightning.Trainer`"),
    "loader_num_epochs": (None, "without effect: the loader has rows for all epochs"),
    "num_gpus": (None, "without effect: each rank trains on one device"),
    "loss_weights": (None, "without effect: the module computes its loss"),
    "metrics": ([], "without effect: the history has what the module logs"),
    "custom_objects": (None, CUSTOM_OBJECTS_UNUSED),
    "logger": (None, "logger of rank 0's trainer"),
    "log_every_n_steps": (50, "steps between two lines of the logger"),
    "terminate_on_nan": (False, "whether a number that is not finite ends the training"),
    "profiler": (None, "profiler of the trainers"),
}


@with_params(_LIGHTNING)
class TorchEstimator(HorovodEstimator):
    """Trains a module of Lightning on the rows of a data frame.

    A batch is a dictionary of tensors by column. The module makes its optimizers and computes its loss. What it logs
    for an epoch is the history. ``transform`` calls its ``forward``.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``, and ``trainer_args``.

    Raises:
        TypeError: A name is not that of a parameter.

    Examples:
        >>> estimator = TorchEstimator(
        ...     num_proc=2, store=Store.create("/data"), model=module, feature_cols=["features"], label_cols=["label"],
        ...     epochs=5, validation=0.1)
        >>> model = estimator.fit(frame)
    """

    def _needed(self) -> list[str]:
        return ["model", "store", "feature_cols", "label_cols"]

    def _train(self, backend: Backend, plain: dict[str, Any]) -> TorchModel:
        given = [name for name in ("optimizer", "loss") if self.value(name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} cannot be set: the module of Lightning has its own")
        task = cloudpickle.dumps(self.value("model"))
        history, state = backend.run(training.train, (task, plain))[0]
        model = cloudpickle.loads(task)
        model.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
        return TorchModel(
            model=model,
            history=history,
            feature_columns=plain["feature_cols"],
            label_columns=plain["label_cols"],
            input_shapes=plain["input_shapes"],
            run_id=plain["run_id"],
        )
