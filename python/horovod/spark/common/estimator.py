"""The base classes of estimators, which run in the driver, and of models, which predict in executors."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from pyspark import cloudpickle
from pyspark.ml import Estimator, Model

from horovod.common.basics import warn_once
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.data import prepared
from horovod.spark.common.params import ESTIMATOR, MODEL, KeptParams, with_params


@with_params(ESTIMATOR)
class HorovodEstimator(KeptParams, Estimator):
    """Trains a model on the rows of a data frame. Subclasses train with a framework.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``.
    """

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: Any = None) -> Any:
        """Train on the Parquet files at the store's paths of training data and validation data.

        Args:
            params: Parameters of this call.
            dataset_idx: Names the data set, as in ``store.get_train_data_path(idx)``.

        Returns:
            The model.

        Raises:
            ValueError: A parameter is missing, or there are no files.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        backend = self._checked()
        store = self.value("store")
        train, val = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
        if not store.is_parquet_dataset(train):
            raise ValueError(f"there is no Parquet data set at `{train}`")
        has_validation = store.is_parquet_dataset(val)
        if self.value("validation") and not has_validation:
            warn_once(f"`validation` has no effect: there is no Parquet data set at `{val}`")
        return self._trained(backend, train, val if has_validation else None)

    def _fit(self, dataset: Any) -> Any:
        backend = self._checked()
        with prepared(dataset, self, backend.num_processes()) as (train, val):
            return self._trained(backend, train, val)

    def _checked(self) -> Backend:
        # `fit(frame, params)` sets parameters without the methods of this class.
        self._warn_unused({param.name: value for param, value in self._paramMap.items()})
        missing = [name for name in self._needed() if self.value(name) is None]
        if missing:
            raise ValueError(f"{type(self).__name__} needs the parameters {missing}")
        if self.value("num_proc") is not None and self.value("backend") is not None:
            raise ValueError("`num_proc` and `backend` exclude each other: the backend has a number of processes")
        return self.value("backend") or SparkBackend(self.value("num_proc"))

    def _needed(self) -> list[str]:
        return ["model", "store", "optimizer", "loss", "feature_cols", "label_cols"]

    def _trained(self, backend: Backend, train: str, val: str | None) -> Any:
        run_id = self.value("run_id") or f"run_{uuid.uuid4().hex[:12]}"
        names = ["backend", "num_proc", "model", "optimizer", "loss", "custom_objects"]
        plain = {name: self.value(name) for name in self._table if name not in names}
        plain |= {"run_id": run_id, "train_path": train, "val_path": val}
        return self._train(backend, plain)

    def _train(self, backend: Backend, plain: dict[str, Any]) -> Any:
        raise NotImplementedError


@with_params(MODEL)
class HorovodModel(KeptParams, Model):
    """A trained model. ``transform`` adds a column for each output. Subclasses predict with a framework.

    Args:
        **params: Parameters: see ``horovod.spark.common.params``.
    """

    def output_columns(self) -> list[str]:
        """Return the columns that ``transform`` adds.

        Returns:
            Their names.
        """
        return self.value("output_cols") or [f"{name}__output" for name in self.value("label_columns")]

    def _transform(self, dataset: Any) -> Any:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

        names, features = self.output_columns(), list(self.value("feature_columns"))
        shapes = self.value("input_shapes")
        pickled = cloudpickle.dumps(self._predictor())
        types = {field.name: field.dataType for field in dataset.schema.fields}
        first = dataset.limit(1).collect()
        outputs = cloudpickle.loads(pickled)(_features(first, features, shapes)) if first else []
        if first and len(outputs) != len(names):
            raise ValueError(f"the model has {len(outputs)} output(s), and there are the columns {names} for them")
        kinds = []
        for place, label in enumerate(self.value("label_columns")):
            is_vector = isinstance(types.get(label), VectorUDT)
            is_single = bool(first) and np.asarray(outputs[place][0]).size == 1
            kinds.append("vector" if is_vector else "number" if is_single else "array")
        spark_types = {"vector": VectorUDT(), "number": DoubleType(), "array": ArrayType(DoubleType())}
        added = [StructField(name, spark_types[kind]) for name, kind in zip(names, kinds, strict=True)]
        schema = StructType([field for field in dataset.schema.fields if field.name not in names] + added)
        broadcast = dataset.sparkSession.sparkContext.broadcast(pickled)
        size = int(self.value("batch_size"))
        kept = [field.name for field in schema.fields if field.name not in names]

        def predict(rows: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
            yield from _predictions(rows, cloudpickle.loads(broadcast.value), kept, features, shapes, kinds, size)

        return dataset.sparkSession.createDataFrame(dataset.rdd.mapPartitions(predict), schema)

    def _predictor(self) -> Any:
        """Return a function from the arrays of the features to those of the outputs. It can be pickled."""
        raise NotImplementedError


def _predictions(
    rows: Iterable[Any],
    predictor: Any,
    kept: Sequence[str],
    features: Sequence[str],
    shapes: Any,
    kinds: Sequence[str],
    size: int,
) -> Iterator[tuple[Any, ...]]:
    from itertools import islice

    from pyspark.ml.linalg import DenseVector

    def converted(value: Any, kind: str) -> Any:
        flat = np.asarray(value, dtype=np.float64).reshape(-1)
        if kind == "vector":
            return DenseVector(flat)
        return float(flat[0]) if kind == "number" else flat.tolist()

    remaining = iter(rows)
    while batch := list(islice(remaining, size)):
        outputs = predictor(_features(batch, features, shapes))
        for index, row in enumerate(batch):
            own = (converted(output[index], kind) for output, kind in zip(outputs, kinds, strict=True))
            yield (*(row[name] for name in kept), *own)


def _features(rows: Sequence[Any], names: Sequence[str], shapes: Any) -> list[np.ndarray]:
    arrays = []
    for name in names:
        values = [row[name] for row in rows]
        arrays.append(np.asarray([value.toArray() if hasattr(value, "toArray") else value for value in values]))
    return shaped(arrays, shapes)


def shaped(arrays: Sequence[np.ndarray], shapes: Any) -> list[np.ndarray]:
    """Reshape arrays to the shapes that a model expects.

    Args:
        arrays: An array for each column.
        shapes: A shape for each, with -1 for the rows; ``None`` leaves them.

    Returns:
        The arrays.

    Raises:
        ValueError: The number of shapes is not that of columns.
    """
    if shapes is None:
        return list(arrays)
    if len(shapes) != len(arrays):
        raise ValueError(f"there are {len(shapes)} shapes for {len(arrays)} columns")
    return [array.reshape([len(array), *list(shape)[1:]]) for array, shape in zip(arrays, shapes, strict=True)]
