"""Jobs of Horovod on a Spark cluster, and estimators of ``pyspark.ml``.

The tasks of one Spark job start the processes of a job of Horovod. The driver's process serves the store through
which they connect and, for elastic jobs, runs the driver of ``horovod.runner``.
"""

from __future__ import annotations

try:
    import pyspark as _pyspark  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "`horovod.spark` needs Spark, which is not installed: `pip install pyspark`, and Java 17 or newer",
        name=__name__,
    ) from error

from horovod.spark.elastic import run_elastic as run_elastic
from horovod.spark.runner import run as run
