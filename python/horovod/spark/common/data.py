"""Rows of a Spark data frame as Parquet files of a store."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any


def columns_of(estimator: Any) -> list[str]:
    """Return the columns that a training reads.

    Args:
        estimator: The estimator.

    Returns:
        Their names.
    """
    weight = estimator.value("sample_weight_col")
    names = [*estimator.value("feature_cols"), *estimator.value("label_cols"), *([weight] if weight else [])]
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def prepared(frame: Any, estimator: Any, num_proc: int) -> Iterator[tuple[str, str | None]]:
    """Write the rows of a data frame to the store for the time of a block.

    Args:
        frame: The data frame.
        estimator: The estimator.
        num_proc: Number of processes.

    Yields:
        The folders of the training data and of the validation data; ``None`` without validation.

    Raises:
        ValueError: A column is missing, ``validation`` is out of range, or there are no rows.
    """
    store, name = estimator.value("store"), uuid.uuid4().hex
    train, val = store.get_train_data_path(name), store.get_val_data_path(name)
    parts = split(frame, estimator)
    count = num_proc * int(estimator.value("partitions_per_process"))
    try:
        for rows, path in zip(parts, (train, val), strict=False):
            _dense(rows, columns_of(estimator)).repartition(count).write.mode("overwrite").parquet(path)
        yield train, val if len(parts) > 1 else None
    finally:
        for path in (train, val):
            store.delete(path)


def split(frame: Any, estimator: Any) -> list[Any]:
    """Divide a data frame into rows to train with and rows to validate with.

    Args:
        frame: The data frame.
        estimator: The estimator.

    Returns:
        One data frame, or two with validation.

    Raises:
        ValueError: A column is missing, or ``validation`` is out of range.
    """
    validation = estimator.value("validation")
    missing = [name for name in columns_of(estimator) if name not in frame.columns]
    if isinstance(validation, str) and validation not in frame.columns:
        missing.append(validation)
    if missing:
        raise ValueError(f"the data frame has no columns {missing}: there are {frame.columns}")
    if not validation:
        return [frame]
    if isinstance(validation, str):
        chosen = frame[validation].cast("double") > 0
        return [frame.filter(~chosen), frame.filter(chosen)]
    if not 0 < validation < 1:
        raise ValueError(f"`validation` is {validation}: expected a fraction between 0 and 1, or the name of a column")
    return list(frame.randomSplit([1.0 - validation, float(validation)], seed=estimator.value("random_seed") or 0))


def _dense(frame: Any, names: Sequence[str]) -> Any:
    """Return columns, those of vectors as arrays."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT

    types = {field.name: field.dataType for field in frame.schema.fields}
    columns = [
        vector_to_array(frame[name]).alias(name) if isinstance(types[name], VectorUDT) else frame[name]
        for name in names
    ]
    return frame.select(*columns)
