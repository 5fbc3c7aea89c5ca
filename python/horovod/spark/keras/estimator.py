"""The estimator and the model for Keras."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from pyspark import cloudpickle

from horovod.spark.common.backend import Backend
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.params import with_params
from horovod.spark.keras import training

_KERAS: dict[str, tuple[Any, str]] = {
    "checkpoint_callback": (None, "without effect: the estimator itself writes a checkpoint after each epoch"),
}


def package_of(model: Any) -> str:
    """Return the package that a model is of.

    Args:
        model: The model.

    Returns:
        ``keras`` for Keras 3, or ``tf_keras``.

    Raises:
        ValueError: The object is not a model of Keras.
    """
    for cls in type(model).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in ("keras", "tf_keras"):
            return package
    raise ValueError(f"`model` is of type {type(model).__name__}: expected a model of Keras")


def _variables(package: str) -> dict[str, str]:
    """Return the variables with which processes use the driver's Keras."""
    if package == "tf_keras":
        return {"TF_USE_LEGACY_KERAS": "1"}
    return {"KERAS_BACKEND": importlib.import_module("keras").backend.backend(), "TF_USE_LEGACY_KERAS": "0"}


@with_params(_KERAS)
class KerasEstimator(HorovodEstimator):
    """Trains a Keras model on the rows of a data frame.

    The model need not be compiled. ``optimizer``, ``loss``, ``loss_weights`` and ``metrics`` are arguments of
    ``compile``.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``.

    Raises:
        TypeError: A name is not that of a parameter.

    Examples:
        >>> estimator = KerasEstimator(
        ...     num_proc=2, store=Store.create("/data"), model=model, optimizer=keras.optimizers.SGD(0.1),
        ...     loss="sparse_categorical_crossentropy", metrics=["accuracy"], feature_cols=["features"],
        ...     label_cols=["label"], epochs=5, validation=0.1)
        >>> model = estimator.fit(frame)
        >>> model.transform(frame).select("label__output")
    """

    def _train(self, backend: Backend, plain: dict[str, Any]) -> KerasModel:
        model, optimizer = self.value("model"), self.value("optimizer")
        package = package_of(model)
        keras = importlib.import_module(package)
        if not isinstance(optimizer, str):
            optimizer = keras.optimizers.serialize(optimizer)
        pickled = cloudpickle.dumps(model)
        custom_objects = self.value("custom_objects") or {}
        others = cloudpickle.dumps((self.value("loss"), plain.pop("metrics"), plain.pop("callbacks")))
        task = training.Task(package, pickled, optimizer, others, custom_objects)
        variables = _variables(package)
        if not plain["use_gpu"]:
            # Keras on PyTorch reads it when it is imported. `training` chooses all other devices.
            variables["KERAS_TORCH_DEVICE"] = "cpu"
        results = backend.run(training.train, (task, plain), env=variables)
        history, weights = results[0]
        with keras.utils.custom_object_scope(custom_objects):
            trained = cloudpickle.loads(pickled)
        trained.set_weights(weights)
        return KerasModel(
            model=trained,
            history=history,
            feature_columns=plain["feature_cols"],
            label_columns=plain["label_cols"],
            input_shapes=plain["input_shapes"],
            custom_objects=custom_objects,
            run_id=plain["run_id"],
        )


class KerasModel(HorovodModel):
    """A trained Keras model.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``.
    """

    def _predictor(self) -> _Predictor:
        model = self.value("model")
        package = package_of(model)
        return _Predictor(package, _variables(package), cloudpickle.dumps(model), self.value("custom_objects") or {})


class _Predictor:
    def __init__(self, package: str, variables: dict[str, str], pickled: bytes, custom_objects: dict[str, Any]) -> None:
        self._task = package, variables, pickled, custom_objects
        self._model: Any = None

    def __call__(self, features: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._model is None:
            package, variables, pickled, custom_objects = self._task
            for name, value in variables.items():
                os.environ.setdefault(name, value)
            keras = importlib.import_module(package)
            with keras.utils.custom_object_scope(custom_objects):
                self._model = cloudpickle.loads(pickled)
        outputs = self._model.predict_on_batch(features[0] if len(features) == 1 else list(features))
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
