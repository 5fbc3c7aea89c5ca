"""An estimator of ``pyspark.ml`` that trains Keras models: those of Keras 3 and those of tf_keras."""

from __future__ import annotations

try:
    import pyarrow as _pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "`horovod.spark.keras` reads Parquet files by pyarrow, which is not installed: `pip install pyarrow pandas`",
        name=__name__,
    ) from error

from horovod.spark.keras.estimator import KerasEstimator as KerasEstimator
from horovod.spark.keras.estimator import KerasModel as KerasModel
