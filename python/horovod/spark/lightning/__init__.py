"""Not available: importing it says what to use instead."""

from __future__ import annotations

raise ImportError(
    "`horovod.spark.lightning` is not part of this release of OpenSMD: use `horovod.spark.torch.TorchEstimator`, or "
    "train a LightningModule in a function of `horovod.spark.run`",
    name=__name__,
)
