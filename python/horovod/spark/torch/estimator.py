"""The estimator and the model for PyTorch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pyspark import cloudpickle

from horovod.spark.common.backend import Backend
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.params import with_params
from horovod.spark.torch import training

#: Meaning of `custom_objects` here.
CUSTOM_OBJECTS_UNUSED = "without effect: models of PyTorch are pickled, and pickle finds their classes"

_TORCH: dict[str, tuple[Any, str]] = {
    "loss_constructors": (None, "functions that create the losses, instead of `loss`"),
    "train_minibatch_fn": (None, "without effect: the estimator itself computes the batches"),
    "custom_objects": (None, CUSTOM_OBJECTS_UNUSED),
}


@with_params(_TORCH)
class TorchEstimator(HorovodEstimator):
    """Trains a PyTorch model on the rows of a data frame.

    The optimizer is one of the model's parameters. ``loss`` is a function of an output and a label, or a list of them.
    ``metrics`` are functions of an output and a label, or a list of them for each label.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``, and ``loss_constructors``.

    Raises:
        TypeError: A name is not that of a parameter.

    Examples:
        >>> estimator = TorchEstimator(
        ...     num_proc=2, store=Store.create("/data"), model=model, optimizer=optimizer, loss=nn.CrossEntropyLoss(),
        ...     feature_cols=["features"], label_cols=["label"], input_shapes=[[-1, 1, 8, 8]], epochs=5, validation=0.1)
        >>> model = estimator.fit(frame)
        >>> model.transform(frame).select("label__output")
    """

    def _needed(self) -> list[str]:
        has_constructors = self.value("loss_constructors") is not None
        return [name for name in super()._needed() if not (has_constructors and name == "loss")]

    def _train(self, backend: Backend, plain: dict[str, Any]) -> TorchModel:
        constructors, loss = self.value("loss_constructors"), self.value("loss")
        if constructors is not None and loss is not None:
            raise ValueError("`loss` and `loss_constructors` exclude each other")
        losses = [make() for make in _listed(constructors)] if constructors is not None else _listed(loss)
        if len(losses) != len(plain["label_cols"]):
            raise ValueError(f"there are {len(losses)} losses for {len(plain['label_cols'])} label columns")
        _check_for_each_label(plain)
        # The optimizer refers to the model's parameters, so both are pickled together.
        task = cloudpickle.dumps((self.value("model"), self.value("optimizer"), losses))
        results = backend.run(training.train, (task, plain))
        history, state = results[0]
        model = cloudpickle.loads(task)[0]
        model.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
        return TorchModel(
            model=model,
            history=history,
            feature_columns=plain["feature_cols"],
            label_columns=plain["label_cols"],
            input_shapes=plain["input_shapes"],
            run_id=plain["run_id"],
        )


@with_params({"custom_objects": (None, CUSTOM_OBJECTS_UNUSED)})
class TorchModel(HorovodModel):
    """A trained PyTorch model.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``.
    """

    def _predictor(self) -> _Predictor:
        return _Predictor(self.value("model"))


class _Predictor:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, features: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._model.eval()
        with torch.no_grad():
            outputs = self._model(*training.inputs(features))
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return [output.numpy() for output in outputs]


def _check_for_each_label(plain: dict[str, Any]) -> None:
    """Check the parameters that have an item for each label."""
    count, weights, metrics = len(plain["label_cols"]), plain["loss_weights"], plain["metrics"] or []
    if weights is not None and len(weights) not in (0, count):
        raise ValueError(f"`loss_weights` has {len(weights)} weights for {count} label columns")
    are_lists = [isinstance(each, (list, tuple)) for each in metrics]
    if any(are_lists) and (len(metrics) != count or not all(are_lists)):
        raise ValueError(
            f"`metrics` has {sum(are_lists)} lists for {count} label columns: expected a list for each, or functions"
        )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
