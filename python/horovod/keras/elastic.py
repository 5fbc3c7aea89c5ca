"""Elastic training with the ``keras`` package: ``hvd.elastic``."""

from __future__ import annotations

import keras

from horovod.common import keras_elastic as _impl
from horovod.common.keras_backend import BACKEND

if BACKEND == "torch":
    from horovod._keras_torch.elastic import KerasState as KerasState
    from horovod.torch.elastic import run as run
else:
    from horovod._keras.elastic import KerasState as KerasState  # type: ignore[assignment]  # the other backend's
    from horovod.tensorflow.elastic import run as run

_classes = _impl.define(keras, __name__)

CommitStateCallback = _classes.CommitStateCallback
UpdateBatchStateCallback = _classes.UpdateBatchStateCallback
UpdateEpochStateCallback = _classes.UpdateEpochStateCallback
