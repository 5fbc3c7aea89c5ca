"""An estimator of ``pyspark.ml`` that trains modules of Lightning."""

from __future__ import annotations

try:
    import lightning as _lightning  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "`horovod.spark.lightning` needs Lightning, which is not installed: `pip install lightning`", name=__name__
    ) from error

from horovod.spark.lightning.estimator import TorchEstimator as TorchEstimator
from horovod.spark.lightning.estimator import TorchModel as TorchModel
