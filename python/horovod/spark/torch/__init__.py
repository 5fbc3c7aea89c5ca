"""An estimator of ``pyspark.ml`` that trains PyTorch models."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "`horovod.spark.torch` needs PyTorch, which is not installed: `pip install torch`", name=__name__
    ) from error
try:
    import pyarrow as _pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "`horovod.spark.torch` reads Parquet files by pyarrow, which is not installed: `pip install pyarrow pandas`",
        name=__name__,
    ) from error

from horovod.spark.torch.estimator import TorchEstimator as TorchEstimator
from horovod.spark.torch.estimator import TorchModel as TorchModel
